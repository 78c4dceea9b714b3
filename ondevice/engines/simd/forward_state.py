"""The numbers that change between forwards while the plan stays the same: rows, positions, caches, output addresses.

Kernels read them from int64 arrays, whose fields `contract.slots` lists: one array of slots for a forward
(`ForwardState`), and one record for each of its sequences (`SequenceRecord`). A session has states of its own for its
drafter (`DraftState`) and for each kind of heads (`HeadsState`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ondevice.arrays import Int64Array
from ondevice.bundle_format.graph_io import AttentionKind
from ondevice.engines.kv_cache import KVCache, first_drafted
from ondevice.engines.protocol import (
    MAX_DRAFTED,
    MAX_ROUNDS,
    MAX_SESSIONS,
    ROOT,
    DraftStep,
    DraftVerdict,
    EngineDrafts,
    MultiStep,
    Proposals,
    TokenTree,
)
from ondevice.engines.simd.buffers import AttentionScratch
from ondevice.engines.simd.caches import KeyIndex
from ondevice.engines.simd.kernels.contract import slots
from ondevice.engines.simd.kernels.contract.attention_memory import SPLIT_ROWS
from ondevice.engines.simd.plan.drafts import DraftPlan
from ondevice.engines.simd.plan.layer import KIND_NUMBERS
from ondevice.engines.states import RecurrentStates
from ondevice.native.functions import address_of


class SlotArray:
    """An int64 array that kernels read, and the arrays that it points to. Fields: `contract.slots`."""

    def __init__(self, count: int) -> None:
        self.slots = np.zeros(count, np.int64)
        self._held: dict[int, NDArray[Any]] = {}

    def point(self, slot: int, array: NDArray[Any]) -> None:
        """Write the address of an array to a field, and keep the array alive."""
        assert array.flags.c_contiguous
        address = array.ctypes.data  # an interrupt is possible here, but not between the next two statements
        self._held[slot] = array
        self.slots[slot] = address


class SequenceRecord(SlotArray):
    """The record of a sequence: its rows in a forward, its tree, and the addresses of its caches.

    Attributes:
        address: address of the record.
        most_keys: positions that the sequence's longest cache has room for.
    """

    def __init__(self, places: Mapping[int, int]) -> None:
        """
        Args:
            places: layer -> number of its cache among the record's pairs of keys and values.
        """
        super().__init__(slots.CACHES + 4 * len(places))
        self.most_keys = 0
        self.address = int(self.slots.ctypes.data)
        self._places = places
        self._capacities: dict[AttentionKind, int] = {}
        self._version = 0

    def set_rows(self, tree: TokenTree, length: int, unread: int = 0) -> None:
        """Write the rows of a forward that follow `length` tokens; the states do not include the last `unread` of them.

        For a tree that is no chain: `paths[row, depth]`, the ancestor of `row` at `depth`.
        """
        self.slots[slots.LENGTH], self.slots[slots.UNREAD] = length, unread
        self.slots[slots.PATHS] = 0
        if not tree.is_chain:
            paths = paths_of(tree)
            self.point(slots.PATHS, paths)
            self.slots[slots.PATH_WIDTH] = paths.shape[1]

    def set_place(self, row_set: int, first: int, count: int) -> None:
        """Write the index of the sequence's first row in a row set, ALL or WANTED, and their number."""
        self.slots[slots.FIRST_ROW + row_set] = first
        self.slots[slots.ROW_COUNT + row_set] = count

    def follow(self, caches: Mapping[AttentionKind, KVCache]) -> None:
        """Write the first position and the addresses of the caches, which may have slid or been reallocated."""
        for kind, cache in caches.items():
            self.slots[slots.BASE + KIND_NUMBERS[kind]] = cache.base
            if self._capacities.get(kind) != cache.capacity:
                for layer in cache.layers:
                    for offset, part in enumerate(cache.parts(layer)):
                        self.point(slots.CACHES + 2 * self._places[layer] + offset, part)
                self.most_keys = max(self.most_keys, cache.capacity)
                # last: after an interrupt above, the addresses are written again
                self._capacities[kind] = cache.capacity

    def follow_states(self, states: RecurrentStates) -> None:
        """Write the addresses of the present and the following states."""
        first = slots.CACHES + 2 * len(self._places)
        for layer, addresses in zip(states.layers, states.addresses, strict=True):
            place = first + 2 * self._places[layer]
            self.slots[place : place + 2] = addresses

    def follow_index(self, index: KeyIndex) -> None:
        """Write the addresses of the codes of keys and of their codebooks, or 0 for layers that have none."""
        if self._version == index.version:
            return
        for layer, place in self._places.items():
            parts = index.parts(layer)
            for offset in range(2):
                slot = slots.CACHES + 2 * (len(self._places) + place) + offset
                if parts is None:
                    self.slots[slot] = 0
                else:
                    self.point(slot, parts[offset])
        self._version = index.version


def paths_of(tree: TokenTree) -> NDArray[np.int64]:
    """int64[T, depths]: [row, depth] is the ancestor of `row` at `depth`, `row` itself at its own depth."""
    depths = tree.depths()
    paths = np.zeros((len(depths), int(depths.max()) + 1), np.int64)
    for row, parent in enumerate(tree.parents):
        if parent != ROOT:
            paths[row] = paths[parent]
        paths[row, depths[row]] = row
    return paths


_ALL_POSITIONS = 1 << 62


class ForwardState(SlotArray):
    """The slots of a forward.

    Its arrays are made once, with room for the most rows of a forward: asking numpy for the address of a new array
    takes longer than copying a few numbers.
    """

    def __init__(self, most_rows: int, rotary: Sequence[NDArray[np.float32]], cache_bits: int) -> None:
        """
        Args:
            most_rows: most rows of a forward.
            rotary: the model's rotary embeddings.
            cache_bits: bits of a number in the caches, 16 or 8.
        """
        super().__init__(slots.SLOTS)
        self.slots[slots.CACHE_BITS] = cache_bits
        self._tokens, self._wanted, *self._stop = np.zeros((2 + len(KIND_NUMBERS), most_rows), np.int64)
        self._addresses = np.zeros(MAX_SESSIONS, np.int64)
        self._verdicts = np.zeros((MAX_ROUNDS, len(DraftVerdict._fields)), np.int64)
        self._widths = np.zeros(MAX_DRAFTED, np.int64)
        self.point(slots.TOKENS, self._tokens)
        self.point(slots.WANTED_ROWS, self._wanted)
        for kind in KIND_NUMBERS.values():
            self.point(slots.STOP + kind, self._stop[kind])
        self.slots[slots.WINDOW + KIND_NUMBERS["full"]] = _ALL_POSITIONS
        self.point(slots.SEQUENCES, self._addresses)
        self._frequencies = np.concatenate([np.zeros(0, np.float32), *rotary])
        self._cosines, self._sines = np.zeros((2, most_rows, len(self._frequencies)), np.float32)
        self.point(slots.COSINES, self._cosines)
        self.point(slots.SINES, self._sines)
        self.slots[slots.ROTARY_STRIDE] = self._cosines.strides[0]
        self._of_positions = self.slots[slots.COSINES : slots.SINES + 1].copy()
        self._drafted_rotary = np.zeros((2, 1 + MAX_DRAFTED, len(self._frequencies)), np.float32)
        """Cosines and sines of a draft's rows, which siblings have in common."""
        self._of_drafts = np.array([rows.ctypes.data for rows in self._drafted_rotary])

    def set_rows(
        self,
        tokens: Int64Array,
        positions: Int64Array,
        stop: Int64Array,
        wanted: Int64Array,
        block_stop: Int64Array | None = None,
    ) -> None:
        """Write the rows of a forward, with the cosines and sines of their positions. The plan runs once.

        Args:
            tokens: int64[T]
            positions: int64[at least T], of the rows, and of those that follow them: see `set_continuation`.
            stop: int64[T], one more than the last position that a row sees.
            wanted: int64[R], the indices of the rows whose outputs are wanted.
            block_stop: the same as `stop`, in sliding layers; None if they are equal.
        """
        count, chosen = len(tokens), len(wanted)
        self.slots[slots.ALL], self.slots[slots.WANTED] = count, chosen
        self._tokens[:count] = tokens
        self._stop[KIND_NUMBERS["full"]][:count] = stop
        self._stop[KIND_NUMBERS["sliding"]][:count] = stop if block_stop is None else block_stop
        self._wanted[:chosen] = wanted
        # the angle is rounded to float32, as in the reference; cosine and sine are computed in float64 and then rounded
        angles = positions.astype(np.float32)[:, None] * self._frequencies
        np.cos(angles, out=self._cosines[: len(positions)], dtype=np.float64)
        np.sin(angles, out=self._sines[: len(positions)], dtype=np.float64)
        self.slots[slots.COSINES : slots.SINES + 1] = self._of_positions
        self.slots[slots.MOST_RUNS], self.slots[slots.DRAFTS] = 1, 0

    def set_continuation(self, continuation: MultiStep, logits_bytes: int, hidden_bytes: int) -> None:
        """Let the plan run once more for each token that is chosen. Call it after `set_rows`.

        Args:
            continuation: how tokens are chosen. The caller keeps it alive while the plan runs.
            logits_bytes, hidden_bytes: bytes of a row of logits, and of hidden states.
        """
        self.slots[slots.MOVED] = 0
        self.slots[slots.MOST_RUNS] = continuation.most
        self.slots[slots.NEXT_TOKEN] = continuation.choose
        self.slots[slots.NEXT_RECORD] = address_of(continuation.record)
        self.slots[slots.LOGITS_STRIDE], self.slots[slots.HIDDEN_STRIDE] = logits_bytes, hidden_bytes

    def set_drafting(self, drafting: EngineDrafts, drafts: DraftState, shapes: Int64Array, window: int | None) -> None:
        """Let a drafter's steps precede every run. Call it after `set_continuation`, and after `drafts.begin`.

        Args:
            drafting: the form of a draft, and where the first one begins.
            drafts: the drafter's state.
            shapes: int64[caches, 3], see `slots.CACHE_SHAPES`.
            window: positions that the target's sliding layers see.
        """
        drafts.hidden[:], drafts.token[0] = drafting.hidden, self._tokens[0]
        steps, guesses = len(drafting.widths), len(drafting.guesses)
        self._widths[:steps] = drafting.widths
        self.point(slots.GUESSED, np.zeros((steps, guesses), np.int64))
        self.slots[slots.DRAFTS], self.slots[slots.WIDTHS] = steps, address_of(self._widths)
        self.slots[slots.DEPTH] = self.slots[slots.DRAFTED] = 0
        self.slots[slots.GUESS_RECORD] = address_of(drafting.record)
        self.slots[slots.GUESSES], self.slots[slots.GUESS_COUNT] = address_of(drafting.guesses), guesses
        self.slots[slots.CACHE_SHAPES], self.slots[slots.CACHE_COUNT] = address_of(shapes), len(shapes)
        self.slots[slots.ROTARY : slots.ROTARY + 2] = self._of_positions
        self.slots[slots.COSINES : slots.SINES + 1] = self._of_drafts
        self.slots[slots.DRAFT_TOKEN] = address_of(drafts.token)
        self.slots[slots.DRAFT_HIDDEN] = address_of(drafts.hidden)
        self.slots[slots.DRAFT_FOLLOWING] = address_of(drafts.following)
        self.slots[slots.DRAFT_WINDOW] = 0 if window is None else window + 1
        self.slots[slots.VERDICTS] = address_of(self._verdicts)
        self.slots[slots.DRAFT_TICKS] = self.slots[slots.FORWARD_TICKS] = 0

    @property
    def runs(self) -> int:
        """Number of times that the plan was run."""
        return int(self.slots[slots.RAN])

    @property
    def last_row(self) -> int:
        """The last accepted row of the last run."""
        return int(self.slots[slots.LAST_ROW])

    def chosen(self) -> list[int]:
        """The tokens after the first that were accepted."""
        chosen: list[int] = self._tokens[1 : 1 + self.slots[slots.MOVED] + self.slots[slots.ACCEPTED]].tolist()
        return chosen

    def verdicts(self) -> list[DraftVerdict]:
        """The verdict on the draft of each run."""
        return [DraftVerdict(*numbers) for numbers in self._verdicts[: self.runs].tolist()]

    @property
    def draft_share(self) -> float:
        """Part of the time that went into drafts; 0 on processors without a clock."""
        drafts, forwards = int(self.slots[slots.DRAFT_TICKS]), int(self.slots[slots.FORWARD_TICKS])
        return drafts / (drafts + forwards) if drafts else 0.0

    def set_window(self, positions: int | None) -> None:
        """Set how many positions a row sees in sliding attention; None if no layer has it."""
        self.slots[slots.WINDOW + KIND_NUMBERS["sliding"]] = positions or 0

    def set_sequences(self, records: Sequence[SequenceRecord], scratch: AttentionScratch) -> None:
        """Write the records of the sequences that the rows belong to, and the working memory of their attention.

        Call it after `set_rows`: the memory depends on the number of rows.
        """
        for index, record in enumerate(records):
            self._addresses[index] = record.address
        rows, keys = int(self.slots[slots.ALL]), max(record.most_keys for record in records)
        scratch.reserve(rows, keys)
        self.slots[slots.SEQUENCE_COUNT] = len(records)
        self.slots[slots.SCRATCH] = scratch.address
        self.slots[slots.SCRATCH_STRIDE] = scratch.stride
        self.slots[slots.PARTIALS] = scratch.partials if rows <= SPLIT_ROWS else 0
        self.slots[slots.MAX_PARTS] = scratch.most_parts
        self.slots[slots.COUNTERS] = scratch.counters
        if (lookup := scratch.lookup) is not None:
            lookup.reserve(keys)
            self.slots[slots.LOOKUP_SCRATCH], self.slots[slots.LOOKUP_SCRATCH_STRIDE] = (
                lookup.work,
                lookup.work_bytes,
            )
            self.slots[slots.SHARES], self.slots[slots.SHARES_STRIDE] = lookup.shares, lookup.shares_bytes


_ONE_ROW = TokenTree.chain([0])
_NO_ROWS = np.zeros(0, np.int64)


class DraftState(ForwardState):
    """A session's slots for the drafter's plan, and the arrays that its steps write.

    Attributes:
        plan, hidden, token, following: see `DraftPlan`.
        answer: the result of the last step, in the same arrays every time.
    """

    def __init__(self, draft: DraftPlan, rotary: Sequence[NDArray[np.float32]], cache_bits: int) -> None:
        super().__init__(MAX_ROUNDS * (1 + MAX_DRAFTED), rotary, cache_bits)
        self.plan, self.hidden, self.token, self.following = draft.plan, draft.hidden, draft.token, draft.following
        logits = np.zeros(draft.logits_width, np.float32)
        candidates, hidden = _own_candidates(self, draft), np.zeros(len(draft.hidden), np.float32)
        self.point(slots.TOKENS, draft.token)
        self.point(slots.HIDDEN, draft.normed)
        self.point(slots.LOGITS, logits)
        self.answer = DraftStep(candidates, logits[: len(candidates)], hidden)

    def begin(
        self,
        record: SequenceRecord,
        caches: Mapping[AttentionKind, KVCache],
        length: int,
        window: int | None,
        following: int = 0,
        *,
        writes: bool = False,
    ) -> None:
        """Set up the steps of a round: all attend from the newest token's position, to committed rows only.

        following : further positions that steps of the same call may have, where rounds follow each other
        writes : whether this is a step of an MTP layer, after `length` tokens of which the last may be drafted: it
            attends to its own row too, and to all before it but the first, which follows no hidden state
        """
        for kind, cache in caches.items():
            if kind == "full" or not writes:
                cache.reserve(length, int(writes))
        record.set_rows(_ONE_ROW, length)
        record.set_place(slots.ALL, 0, 1)
        record.follow(caches)
        positions = np.arange(length, length + 1 + following)
        self.set_rows(_ONE_ROW.tokens, positions, positions[:1] + int(writes), _NO_ROWS)
        self.set_window(None if window is None else length - first_drafted(length, window))
        if writes:
            self.slots[slots.WINDOW + KIND_NUMBERS["full"]] = length


class HeadsState(SlotArray):
    """A session's slots for the plan of one kind of heads, and the arrays that a run writes.

    Attributes:
        plan, hidden: see `DraftPlan`.
        answer: the result of the last run, in the same arrays every time.
    """

    def __init__(self, draft: DraftPlan) -> None:
        super().__init__(slots.SLOTS)
        self.plan, self.hidden = draft.plan, draft.hidden
        candidates, (offsets, count) = _own_candidates(self, draft), draft.candidates.shape
        logits = np.zeros((offsets, draft.logits_width), np.float32)
        self.slots[slots.ALL], self.slots[slots.WANTED] = 1, offsets
        self.point(slots.HIDDEN, draft.normed)
        self.point(slots.LOGITS, logits)
        self.answer = Proposals(candidates, logits[:, :count])


def _own_candidates(state: SlotArray, draft: DraftPlan) -> NDArray[np.int64]:
    """A session's own copy of a plan's candidates, in its slot, or the array itself if the plan writes none."""
    if not draft.candidates.flags.writeable:
        return draft.candidates
    candidates = draft.candidates.copy()
    state.point(slots.CANDIDATES, candidates)
    return candidates
