"""Runs the rows of a forward through the target: in one pass, or in two if draft forwards began them.

A draft along a partial path (`LayerPath`) leaves its rows' keys, values and residual stream where its path and the
whole one part (`KeptRows`). The forward that verifies the same tokens, or continues the draft, then runs the lower
layers only for the rows that are new, and the upper layers for all. That saves the lower layers' time and changes no
bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ondevice.arrays import Float32Array, Int64Array
from ondevice.engines.layer_path import LayerPath
from ondevice.engines.protocol import Rows, TokenTree
from ondevice.engines.simd.buffers import AttentionScratch, LookupScratch
from ondevice.engines.simd.forward_state import ForwardState, SequenceRecord
from ondevice.engines.simd.kernels.steps import slots
from ondevice.engines.simd.plan.target import EMBEDDING_STEPS
from ondevice.engines.simd.program import Piece, Program
from ondevice.engines.simd.threads import NEIGHBOURS, ThreadPool

EACH_ROW_COUNT = 8
"""Up to this many rows, each row count is a kind of work of its own. Beyond, all row counts up to the next power of two
are one kind, because a row takes nearly the same time in all of them."""

WHOLE, DRAFT, LOWER, UPPER, DRAFT_UPPER, EMBED = range(0, 6 * NEIGHBOURS, NEIGHBOURS)
"""Kinds of work for the thread pool; the row count is added to them.

Whole rows in one pass, drafted rows in one pass, the lower layers of either, the upper layers of whole rows, the upper
layers of drafted rows, the embedding of rows of which some are soft. The two kinds of upper layers are apart because a
path may have no upper layers: when they were one kind, these microseconds taught the pool to run the upper layers of
whole rows on one thread, in 98 ms instead of 42 (E2B's shape).
"""

_NO_ROWS = np.zeros(0, np.int64)


class Batch:
    """The rows of one forward, those of each session after those of the session before it.

    Attributes:
        trees: the new rows of each session.
        lengths: committed tokens of each session.
        counts: number of wanted rows of each session.
        tokens: int64[T], the tokens of all rows.
        positions: int64[T]
        wanted: int64[R], the indices of the wanted rows among all rows.
        path: the layers that all rows pass.
        soft: the indices of the soft rows among all rows, int64[S], and their embeddings, float32[S, H]; None if there
            are none.
        block_stop: int64[T], one more than the last position that a row sees in sliding layers; None if that is its
            own for all rows.
    """

    def __init__(self, batch: Sequence[Rows], pad: int) -> None:
        """
        Args:
            batch: rows that were checked.
            pad: the token whose per-layer embeddings soft rows have.
        """
        self.path = batch[0].path
        self.trees = [rows.tree for rows in batch]
        self.lengths = [rows.session.length for rows in batch]
        self.counts = [len(rows.wanted) for rows in batch]
        wanted, positions, first = [], [], 0
        for length, tree, rows in zip(self.lengths, self.trees, batch, strict=True):
            wanted += [first + row for row in rows.wanted]
            positions.append(length + tree.depths())
            first += len(tree)
        self.tokens = _joined([tree.tokens for tree in self.trees])
        self.soft: tuple[Int64Array, Float32Array] | None = None
        if any(rows.soft is not None for rows in batch):
            soft = np.flatnonzero(self.tokens < 0)
            self.soft = soft, np.concatenate([rows.soft for rows in batch if rows.soft is not None])
            self.tokens = np.where(self.tokens < 0, pad, self.tokens)
        self.positions, self.wanted = _joined(positions), np.array(wanted, np.int64)
        self.block_stop: Int64Array | None = None
        if any(rows.blocks for rows in batch):
            self.block_stop = self.positions + 1
            first = 0
            for rows in batch:
                for begin, end in rows.blocks:
                    self.block_stop[first + begin : first + end] = self.positions[first + end - 1] + 1
                first += len(rows.tree)


@dataclass(frozen=True, eq=False)
class KeptRows:
    """What a draft forward leaves of its rows: a chain after a sequence's committed tokens, through the lower layers.

    Its keys and values are pending rows in the sequence's own cache. They are never committed; the next forward
    overwrites them, with the same bits if it verifies the same tokens. A fork for the draft would copy the whole cache.

    passed : the layers that the rows have passed; `passed.stop` is the first one that they have not
    tokens : int64[n]
    streams : float32[n, H], the residual stream before that layer; and float32[n, layers * size], the rows' per-layer
        embeddings, if the model has any
    length : the sequence's committed tokens before the rows
    bases : first position in each cache at that time; a cache that has slid since has lost its pending rows
    """

    passed: LayerPath
    tokens: Int64Array
    streams: list[Float32Array]
    length: int
    bases: tuple[int, ...]

    @property
    def cut(self) -> int:
        """The first layer that the rows have not passed."""
        assert self.passed.stop is not None
        return self.passed.stop

    def shared(self, tree: TokenTree, path: LayerPath) -> int:
        """How many first rows of a tree, all on this path, are the kept rows."""
        if not tree.is_chain or self.passed != path.below(self.cut):
            return 0
        count = 0
        for own, other in zip(self.tokens.tolist(), tree.tokens.tolist(), strict=False):
            if own != other:
                break
            count += 1
        return count


class TargetForward:
    """Runs forwards of one engine. The caller holds the engine's lock."""

    def __init__(
        self,
        program: Program,
        pool: ThreadPool,
        state: ForwardState,
        scratch: AttentionScratch,
        lookup: LookupScratch | None,
        lookup_begin: int | None,
    ) -> None:
        """
        Args:
            program: the plans of forwards.
            pool: the threads that run them.
            state: the slots that plans read.
            scratch: working memory of attention.
            lookup: working memory of lookup attention; None if attention is exact.
            lookup_begin: the number of positions that a row must see to use lookups; None if attention is exact.
        """
        self._program, self._pool, self._state = program, pool, state
        self._scratch, self._lookup, self._lookup_begin = scratch, lookup, lookup_begin

    def run(self, batch: Batch, records: Sequence[SequenceRecord], kept: Sequence[KeptRows | None]) -> int:
        """Run all rows. The outputs go to the addresses in the state's slots LOGITS and HIDDEN.

        Args:
            batch: the rows.
            records: the sessions' records; their caches have room for the rows.
            kept: for each session, what draft forwards have left after its committed tokens.

        Returns:
            The number of threads that took part.
        """
        counts = _reusable(batch, kept)
        if batch.soft is not None or not any(counts):
            self._write_all(batch, records)
            base = WHOLE if batch.path.is_whole else DRAFT
            return self._run(Piece(batch.path), batch.positions, kind_of_work(len(batch.tokens), base), batch.soft)
        cut = next(each.cut for each, count in zip(kept, counts, strict=True) if each is not None and count)
        new = [_without_first(tree, count) for tree, count in zip(batch.trees, counts, strict=True)]
        if any(new):
            lengths = [length + count for length, count in zip(batch.lengths, counts, strict=True)]
            positions = self._write_new(new, lengths, records)
            self._run(Piece(batch.path.below(cut), "lower", cut), positions, kind_of_work(len(positions), LOWER))
        self._join_streams(kept, counts, new)
        self._write_all(batch, records)
        base = UPPER if batch.path.is_whole else DRAFT_UPPER
        return self._run(Piece(batch.path, "upper", cut), batch.positions, kind_of_work(len(batch.tokens), base))

    def lower_streams(self, batch: Batch) -> tuple[LayerPath, list[list[Float32Array]]]:
        """After a draft forward: the layers that are common with whole rows, and copies of each session's streams
        there.

        They are the `passed` and the `streams` of `KeptRows`.
        """
        planner = self._program.target.planner
        passed = batch.path.below(planner.stops_at(batch.path))
        copies, first = [], 0
        for tree in batch.trees:
            copies.append([stream[first : first + len(tree)].copy() for stream in planner.streams])
            first += len(tree)
        return passed, copies

    def ends(self, count: int) -> Float32Array:
        """float32[count, H], valid until the next forward: residual stream of the wanted rows where their path ends."""
        return self._program.target.planner.ends[:count]

    def _run(
        self,
        piece: Piece,
        positions: Int64Array,
        kind: tuple[int, int],
        soft: tuple[Int64Array, Float32Array] | None = None,
    ) -> int:
        """Run a piece of the target for the rows in the slots; `soft` as in `Batch`."""
        looks_up = self._lookup_begin is not None and int(positions.max()) + 1 >= self._lookup_begin
        steps = self._program.target.steps(piece, looks_up=looks_up)
        if soft is not None:
            rows, embeddings = soft
            embed, steps = steps[:EMBEDDING_STEPS], steps[EMBEDDING_STEPS:]
            self._pool.run(embed, self._state.slots, *kind_of_work(len(positions), EMBED))
            self._program.target.planner.streams[0][rows] = embeddings
        return self._pool.run(steps, self._state.slots, *kind)

    def _write_all(self, batch: Batch, records: Sequence[SequenceRecord]) -> None:
        """Write all rows to the slots and to the sessions' records."""
        first = first_wanted = 0
        for record, tree, length, wanted in zip(records, batch.trees, batch.lengths, batch.counts, strict=True):
            record.set_rows(tree, length)
            record.set_place(slots.ALL, first, len(tree))
            record.set_place(slots.WANTED, first_wanted, wanted)
            first, first_wanted = first + len(tree), first_wanted + wanted
        self._state.set_rows(batch.tokens, batch.positions, batch.positions + 1, batch.wanted, batch.block_stop)
        self._state.set_sequences(records, self._scratch, self._lookup)

    def _write_new(
        self, trees: Sequence[TokenTree | None], lengths: Sequence[int], records: Sequence[SequenceRecord]
    ) -> Int64Array:
        """Write the rows that were not kept, none of them wanted, to the slots and records; returns their positions.

        A session without such rows has None for its tree.
        """
        tokens, positions, first = [], [], 0
        for record, tree, length in zip(records, trees, lengths, strict=True):
            count = 0 if tree is None else len(tree)
            record.set_place(slots.ALL, first, count)
            record.set_place(slots.WANTED, 0, 0)
            first += count
            if tree is not None:
                record.set_rows(tree, length)
                tokens.append(tree.tokens)
                positions.append(length + tree.depths())
        all_positions = np.concatenate(positions)
        self._state.set_rows(np.concatenate(tokens), all_positions, all_positions + 1, _NO_ROWS)
        self._state.set_sequences(records, self._scratch, self._lookup)
        return all_positions

    def _join_streams(
        self, kept: Sequence[KeptRows | None], counts: Sequence[int], new: Sequence[TokenTree | None]
    ) -> None:
        """Write the streams of all rows, kept and new ones of each session in turn, where the upper layers read them.

        The lower layers have just left the new rows' streams in the same buffers.
        """
        for index, stream in enumerate(self._program.target.planner.streams):
            parts, first = [], 0
            for each, count, tree in zip(kept, counts, new, strict=True):
                if each is not None and count:
                    parts.append(each.streams[index][:count])
                rows = 0 if tree is None else len(tree)
                parts.append(stream[first : first + rows].copy())
                first += rows
            joined = np.concatenate(parts)
            stream[: len(joined)] = joined


def kind_of_work(rows: int, base: int = WHOLE) -> tuple[int, int]:
    """The kind of work that a forward of so many rows is to the thread pool, and its amount in units of that kind."""
    if rows <= EACH_ROW_COUNT:
        return base + rows, 1
    return base + EACH_ROW_COUNT + (rows - 1).bit_length(), rows


def _reusable(batch: Batch, kept: Sequence[KeptRows | None]) -> list[int]:
    """For each session, how many of its first rows can skip the lower layers.

    All rows must enter the upper layers at one layer: the first session with kept rows decides which.
    """
    counts = [
        0 if each is None else each.shared(tree, batch.path) for each, tree in zip(kept, batch.trees, strict=True)
    ]
    cuts = [each.cut for each, count in zip(kept, counts, strict=True) if each is not None and count]
    if not cuts:
        return counts
    return [count if each is not None and each.cut == cuts[0] else 0 for each, count in zip(kept, counts, strict=True)]


def _without_first(tree: TokenTree, count: int) -> TokenTree | None:
    """The rows of a chain after its first `count` ones; None if there are none."""
    if not count:
        return tree
    return TokenTree.chain(tree.tokens[count:].tolist()) if count < len(tree) else None


def _joined(parts: list[Int64Array]) -> Int64Array:
    return parts[0] if len(parts) == 1 else np.concatenate(parts)
