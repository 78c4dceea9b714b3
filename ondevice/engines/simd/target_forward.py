"""Runs the rows of a forward through the target, in one piece, or in two where draft forwards have begun them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ondevice.engines.protocol import Floats, Ids, TokenTree
from ondevice.engines.simd.attention_scratch import AttentionScratch
from ondevice.engines.simd.batch import Batch
from ondevice.engines.simd.forward_state import ForwardState
from ondevice.engines.simd.kept_rows import KeptRows
from ondevice.engines.simd.kernels import slots
from ondevice.engines.simd.lookup_scratch import LookupScratch
from ondevice.engines.simd.program import Program
from ondevice.engines.simd.sequence_record import SequenceRecord
from ondevice.engines.simd.target_plans import Piece
from ondevice.engines.simd.thread_pool import NEIGHBOURS, ThreadPool

EACH_ROW_COUNT = 8
"""Beyond, the row counts up to a power of two are one kind of work: the time of a row is nearly the same."""

WHOLE, DRAFT, LOWER, UPPER, DRAFT_UPPER = range(0, 5 * NEIGHBOURS, NEIGHBOURS)
"""Kinds of work, told apart by rows from there on: whole rows and drafted ones in one piece, the lower layers of
either, the upper ones of whole rows, and of drafted rows, which may have none: as one kind with whole rows' 42 ms at
E2B's shape, their microseconds had taught these to run on one thread, in 98.
"""

_NOTHING = np.zeros(0, np.int64)


def kind_of_work(rows: int, base: int = WHOLE) -> tuple[int, int]:
    """What a forward of so many rows is to the thread pool: the kind of work, and how much of it."""
    if rows <= EACH_ROW_COUNT:
        return base + rows, 1
    return base + EACH_ROW_COUNT + (rows - 1).bit_length(), rows


class TargetForward:
    """One engine's; the caller holds its lock."""

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
            program, pool, state: what runs, who runs it, and what it is told.
            scratch, lookup: memory for attention.
            lookup_begin: positions from which on rows may look keys up; None where none do.
        """
        self._program, self._pool, self._state = program, pool, state
        self._scratch, self._lookup, self._lookup_begin = scratch, lookup, lookup_begin

    def run(self, rows: Batch, records: Sequence[SequenceRecord], begun: Sequence[KeptRows | None]) -> int:
        """Run all rows; the slots say where outputs go.

        Args:
            rows: of the sessions.
            records: of the sessions, which have made room for the rows.
            begun: for each session, what draft forwards have left behind its committed tokens.

        Returns:
            threads that took part.
        """
        begun, counts = _shared(rows, begun)
        if not any(counts):
            self._tell(rows, records)
            base = WHOLE if rows.path.is_whole else DRAFT
            return self._run(Piece(rows.path), rows.positions, kind_of_work(len(rows.tokens), base))
        cut = next(kept.cut for kept, count in zip(begun, counts, strict=True) if kept is not None and count)
        rest = [_rest(tree, count) for tree, count in zip(rows.trees, counts, strict=True)]
        if any(rest):
            lengths = [length + count for length, count in zip(rows.lengths, counts, strict=True)]
            positions = self._tell_rest(rest, lengths, records)
            self._run(Piece(rows.path.below(cut), "lower", cut), positions, kind_of_work(len(positions), LOWER))
        self._join(begun, counts, rest)
        self._tell(rows, records)
        base = UPPER if rows.path.is_whole else DRAFT_UPPER
        return self._run(Piece(rows.path, "upper", cut), rows.positions, kind_of_work(len(rows.tokens), base))

    def keep(self, rows: Batch) -> None:
        """Leave a draft's rows to their sessions, as far as the lower layers go."""
        planner = self._program.target.planner
        passed = rows.path.below(planner.stops_at(rows.path))
        first = 0
        for session, tree in zip(rows.sessions, rows.trees, strict=True):
            session.keep(passed, tree, [stream[first : first + len(tree)].copy() for stream in planner.streams])
            first += len(tree)

    def ends(self, count: int) -> Floats:
        """The residual stream of the wanted rows where their path ended, float32[count, H]; until the next forward."""
        return self._program.target.planner.ends[:count]

    def _run(self, piece: Piece, positions: Ids, kind: tuple[int, int]) -> int:
        looks_up = self._lookup_begin is not None and int(positions.max()) + 1 >= self._lookup_begin
        steps = self._program.target.steps(piece, looks_up=looks_up)
        return self._pool.run(steps, self._state.slots, *kind)

    def _tell(self, rows: Batch, records: Sequence[SequenceRecord]) -> None:
        """What rows there are, and whose."""
        first = first_wanted = 0
        for record, tree, length, wanted in zip(records, rows.trees, rows.lengths, rows.counts, strict=True):
            record.set_rows(tree, length)
            record.set_place(slots.ALL, first, len(tree))
            record.set_place(slots.WANTED, first_wanted, wanted)
            first, first_wanted = first + len(tree), first_wanted + wanted
        self._state.set_rows(rows.tokens, rows.positions, rows.positions + 1, rows.wanted)
        self._state.set_sequences(records, self._scratch, self._lookup)

    def _tell_rest(
        self, trees: Sequence[TokenTree | None], lengths: Sequence[int], records: Sequence[SequenceRecord]
    ) -> Ids:
        """The same of rows that nobody wants yet, of some sessions; their positions."""
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
        places = np.concatenate(positions)
        self._state.set_rows(np.concatenate(tokens), places, places + 1, _NOTHING)
        self._state.set_sequences(records, self._scratch, self._lookup)
        return places

    def _join(self, begun: Sequence[KeptRows | None], counts: Sequence[int], rest: Sequence[TokenTree | None]) -> None:
        """Lay the streams of kept rows and of the rest, which the lower layers have just left, side by side."""
        for index, stream in enumerate(self._program.target.planner.streams):
            parts, first = [], 0
            for kept, count, tree in zip(begun, counts, rest, strict=True):
                if kept is not None and count:
                    parts.append(kept.streams[index][:count])
                rows = 0 if tree is None else len(tree)
                parts.append(stream[first : first + rows].copy())
                first += rows
            joined = np.concatenate(parts)
            stream[: len(joined)] = joined


def _shared(rows: Batch, begun: Sequence[KeptRows | None]) -> tuple[list[KeptRows | None], list[int]]:
    """Of each session, how many of its rows need not pass the lower layers again: all of them meet at one layer."""
    counts = [0 if kept is None else kept.shared(tree, rows.path) for kept, tree in zip(begun, rows.trees, strict=True)]
    cuts = [kept.cut for kept, count in zip(begun, counts, strict=True) if kept is not None and count]
    fits = [kept is not None and kept.cut == cuts[0] for kept in begun] if cuts else [False] * len(counts)
    return list(begun), [count if fit else 0 for count, fit in zip(counts, fits, strict=True)]


def _rest(tree: TokenTree, count: int) -> TokenTree | None:
    """The rows after the first `count` ones of a chain; None where there are none."""
    if not count:
        return tree
    return TokenTree.chain(tree.tokens[count:].tolist()) if count < len(tree) else None
