"""Runs the rows of a forward through the target: in one pass, or in two if draft forwards began them.

A draft along a partial path (`LayerPath`) leaves its rows' keys, values and residual stream where its path and the
whole one part (`KeptRows`). The forward that verifies the same tokens, or continues the draft, then runs the lower
layers only for the rows that are new, and the upper layers for all. That saves the lower layers' time and changes no
bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, compress

import numpy as np

from ondevice.arrays import Float32Array, Int64Array
from ondevice.engines.layer_path import LayerPath
from ondevice.engines.protocol import MultiStep, Rows, TokenTree
from ondevice.engines.simd.forward_state import DraftState, ForwardState, SequenceRecord
from ondevice.engines.simd.kernels.contract import slots
from ondevice.engines.simd.plan.builder import Plan
from ondevice.engines.simd.plan.target import EMBEDDING_STEPS
from ondevice.engines.simd.program import Program
from ondevice.engines.simd.threads import NEIGHBOURS

EACH_ROW_COUNT = 8
"""Up to this many rows, each row count is a kind of work of its own. Beyond, all row counts up to the next power of two
are one kind, because a row takes nearly the same time in all of them."""

WHOLE, DRAFT, LOWER, UPPER, DRAFT_UPPER, EMBED, ROUNDS = range(0, 7 * NEIGHBOURS, NEIGHBOURS)
"""Kinds of work for the thread pool; the row count is added to them.

Whole rows in one pass, drafted rows in one pass, the lower layers of either, the upper layers of whole rows, the upper
layers of drafted rows, the embedding of rows of which some are soft, whole rows after a drafter's steps. The two kinds
of upper layers are apart because a path may have no upper layers: when they were one kind, these microseconds taught
the pool to run the upper layers of whole rows on one thread, in 98 ms instead of 42 (E2B's shape).
"""


class ForwardRows:
    """The rows of one forward, those of each session after those of the session before it.

    Attributes:
        path: the layers that all rows pass.
        trees: the new rows of each session.
        lengths: the position of each session's first row.
        sizes, firsts: number of rows of each session, and the index of its first one.
        counts: number of wanted rows of each session.
        unread: number of each session's last committed tokens that its states do not include.
        tokens: int64[T], the tokens of all rows.
        positions: int64[T]
        wanted: int64[R], the indices of the wanted rows among all rows.
        soft: the indices of the soft rows among all rows, int64[S], and their embeddings, float32[S, H]; None if there
            are none.
        block_stop: int64[T], one more than the last position that a row sees in sliding layers; None if that is its
            own for all rows.
        continuation: how a single row is continued; None if it is not.
    """

    soft: tuple[Int64Array, Float32Array] | None = None
    block_stop: Int64Array | None = None
    continuation: MultiStep | None = None

    def __init__(
        self,
        path: LayerPath,
        trees: Sequence[TokenTree],
        lengths: Sequence[int],
        wanted: Sequence[Sequence[int]],
        unread: Sequence[int] | None = None,
    ) -> None:
        self.path, self.trees, self.lengths = path, trees, lengths
        self.unread = [0] * len(trees) if unread is None else unread
        self.sizes = [len(tree) for tree in trees]
        self.counts = [len(each) for each in wanted]
        self.firsts = [0, *accumulate(self.sizes[:-1])]
        places = [first + row for first, each in zip(self.firsts, wanted, strict=True) for row in each]
        self.wanted = np.array(places, np.int64)
        self.tokens = _joined([tree.tokens for tree in trees])
        self.positions = _joined([length + tree.depths() for length, tree in zip(lengths, trees, strict=True)])

    @classmethod
    def of(cls, rows: Sequence[Rows], pad: int, unread: Sequence[int]) -> ForwardRows:
        """The batch of rows that were checked; `pad` is the token whose per-layer embeddings soft rows have."""
        lengths = [each.session.length for each in rows]
        batch = cls(rows[0].path, [each.tree for each in rows], lengths, [each.wanted for each in rows], unread)
        if any(each.soft is not None for each in rows):
            soft = np.flatnonzero(batch.tokens < 0)
            batch.soft = soft, np.concatenate([each.soft for each in rows if each.soft is not None])
            batch.tokens = np.where(batch.tokens < 0, pad, batch.tokens)
        if len(batch.tokens) == 1 and batch.soft is None and batch.path.is_whole:
            batch.continuation = rows[0].continuation
        if any(each.blocks for each in rows):
            batch.block_stop = batch.positions + 1
            for first, each in zip(batch.firsts, rows, strict=True):
                for begin, end in each.blocks:
                    batch.block_stop[first + begin : first + end] = batch.positions[first + end - 1] + 1
        return batch

    @property
    def following(self) -> int:
        """Most rows that follow in the same call of the kernels."""
        return 0 if self.continuation is None else self.continuation.most - 1

    def after_first(self, counts: Sequence[int]) -> ForwardRows:
        """Each session's rows after its first `counts` ones, none of them wanted; sessions without are left out."""
        left = [each for each in zip(self.trees, self.lengths, counts, strict=True) if each[2] < len(each[0])]
        trees = [TokenTree.chain(tree.tokens[count:].tolist()) if count else tree for tree, _, count in left]
        return ForwardRows(self.path, trees, [length + count for _, length, count in left], [()] * len(left))

    def by_session(self, rows: Float32Array) -> list[Float32Array]:
        """An array with a row for each of the batch, as one view for each session."""
        return [rows[first : first + size] for first, size in zip(self.firsts, self.sizes, strict=True)]


@dataclass(frozen=True, eq=False)
class KeptRows:
    """Rows that a draft forward has taken through the lower layers: a chain after a sequence's committed tokens.

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

    def __init__(self, program: Program, state: ForwardState) -> None:
        """
        Args:
            program: the plans of forwards, and the threads that run them.
            state: the slots that plans read.
        """
        self._program, self._state = program, state
        self._row_bytes = 4 * program.logits_width, 4 * program.models.target.config.hidden_size

    def run(self, batch: ForwardRows, records: Sequence[SequenceRecord], kept: Sequence[KeptRows | None]) -> int:
        """Run all rows, and those that follow. The outputs go to the addresses in the state's slots LOGITS and HIDDEN.

        Args:
            batch: the rows.
            records: the sessions' records; their caches have room for the rows.
            kept: for each session, what draft forwards have left after its committed tokens.

        Returns:
            The number of threads that took part.
        """
        counts = _reusable(batch, kept)
        if any(counts):
            batch.continuation = None
        program, is_whole = self._program, batch.path.is_whole
        if batch.soft is not None or not any(counts):
            self._write(batch, records)
            return self._run(program.plan(batch.path), batch, WHOLE if is_whole else DRAFT)
        cut = next(each.cut for each, count in zip(kept, counts, strict=True) if each is not None and count)
        new = None if counts == batch.sizes else batch.after_first(counts)
        if new is not None:
            more = [count < size for count, size in zip(counts, batch.sizes, strict=True)]
            self._write(new, list(compress(records, more)))
            self._run(program.plan(batch.path.below(cut), 0, cut), new, LOWER)
        self._join_streams(batch.sizes, kept, counts, new)
        self._write(batch, records)
        return self._run(program.plan(batch.path, cut), batch, UPPER if is_whole else DRAFT_UPPER)

    def run_rounds(self, batch: ForwardRows, record: SequenceRecord, drafts: DraftState) -> int:
        """Run a continuation that drafts: the rows are those of a round with the largest draft.

        Returns:
            The number of threads that took part.
        """
        program, count = self._program, len(batch.tokens)
        assert batch.continuation is not None
        assert batch.continuation.drafting is not None
        self._write(batch, [record])
        drafts.set_sequences([record], program.scratch)
        self._state.set_drafting(
            batch.continuation.drafting, drafts, program.cache_shapes, program.models.target.config.window
        )
        record.set_place(slots.ALL, 0, 1)  # the first step is the drafter's
        last = int(batch.positions[0]) + count * batch.continuation.most
        steps = program.steps(program.plan(batch.path), last)
        draft = program.steps(drafts.plan, last), drafts.slots
        return program.pool.run(steps, self._state.slots, *kind_of_work(count, ROUNDS), draft=draft)

    def lower_streams(self, batch: ForwardRows) -> tuple[LayerPath, list[list[Float32Array]]]:
        """After a draft forward: the layers that are common with whole rows, and copies of each session's streams
        there.

        They are the `passed` and the `streams` of `KeptRows`.
        """
        target = self._program.target
        streams = [batch.by_session(stream) for stream in target.streams]
        passed = batch.path.below(target.stops_at(batch.path))
        return passed, [[own.copy() for own in each] for each in zip(*streams, strict=True)]

    def _run(self, plan: Plan, batch: ForwardRows, kind: int) -> int:
        """Run a plan for the rows in the slots, as this kind of work; returns the number of threads that took part."""
        last, count = int(batch.positions.max()) + batch.following, len(batch.tokens)
        steps = self._program.steps(plan, last)
        if batch.soft is not None:
            rows, embeddings = batch.soft
            embed, steps = steps[:EMBEDDING_STEPS], steps[EMBEDDING_STEPS:]
            self._program.pool.run(embed, self._state.slots, *kind_of_work(count, EMBED))
            self._program.target.streams[0][rows] = embeddings
        return self._program.pool.run(steps, self._state.slots, *kind_of_work(count, kind))

    def _write(self, batch: ForwardRows, records: Sequence[SequenceRecord]) -> None:
        """Write rows to the slots and to the sessions' records."""
        first = first_wanted = 0
        sessions = zip(records, batch.trees, batch.lengths, batch.unread, batch.sizes, batch.counts, strict=True)
        for record, tree, length, unread, size, wanted in sessions:
            record.set_rows(tree, length, unread)
            record.set_place(slots.ALL, first, size)
            record.set_place(slots.WANTED, first_wanted, wanted)
            first, first_wanted = first + size, first_wanted + wanted
        positions = batch.positions
        if batch.continuation is not None:
            positions = np.arange(positions[0], positions[0] + len(positions) * batch.continuation.most)
        self._state.set_rows(batch.tokens, positions, batch.positions + 1, batch.wanted, batch.block_stop)
        self._state.set_sequences(records, self._program.scratch)
        if batch.continuation is not None:
            self._state.set_continuation(batch.continuation, *self._row_bytes)

    def _join_streams(
        self, sizes: Sequence[int], kept: Sequence[KeptRows | None], counts: Sequence[int], new: ForwardRows | None
    ) -> None:
        """Write the streams of all rows, kept and new ones of each session in turn, where the upper layers read them.

        The lower layers have just left the new rows' streams in the same buffers.
        """
        for index, stream in enumerate(self._program.target.streams):
            parts, computed = [], iter([] if new is None else new.by_session(stream))
            for each, count, size in zip(kept, counts, sizes, strict=True):
                if each is not None and count:
                    parts.append(each.streams[index][:count])
                if count < size:
                    parts.append(next(computed).copy())
            joined = np.concatenate(parts)
            stream[: len(joined)] = joined


def kind_of_work(rows: int, base: int) -> tuple[int, int]:
    """The kind of work that a forward of so many rows is to the thread pool, and its amount in units of that kind."""
    if rows <= EACH_ROW_COUNT:
        return base + rows, 1
    return base + EACH_ROW_COUNT + (rows - 1).bit_length(), rows


def _reusable(batch: ForwardRows, kept: Sequence[KeptRows | None]) -> list[int]:
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


def _joined(parts: list[Int64Array]) -> Int64Array:
    return parts[0] if len(parts) == 1 else np.concatenate(parts)
