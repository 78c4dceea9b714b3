"""What a session's draft steps need beside the plan: what they see, and where their answers go."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from ondevice.contract import AttentionKind
from ondevice.engines.kv_cache import KVCache, first_drafted
from ondevice.engines.protocol import DraftStep, TokenTree
from ondevice.engines.simd.attention_scratch import AttentionScratch
from ondevice.engines.simd.forward_state import ForwardState, Frequencies
from ondevice.engines.simd.kernels import slots
from ondevice.engines.simd.lookup_scratch import LookupScratch
from ondevice.engines.simd.plan.drafter import DrafterPlan
from ondevice.engines.simd.sequence_record import SequenceRecord

_ONE_ROW = TokenTree.chain([0])
_NOTHING = np.zeros(0, np.int64)


class DraftState:
    """
    Attributes:
        slots: to run the plan with.
        answer: where every step leaves its results.
    """

    def __init__(self, plan: DrafterPlan, rotary: Frequencies, cache_bits: int) -> None:
        self._state = state = ForwardState(1, rotary, cache_bits)
        self.slots = state.slots
        logits = np.zeros(plan.logits_width, np.float32)
        candidates, hidden = plan.candidates.copy(), np.zeros(len(plan.target_hidden), np.float32)
        state.point(slots.TOKENS, plan.token)
        state.point(slots.HIDDEN, plan.normed)
        state.point(slots.LOGITS, logits)
        state.point(slots.CANDIDATES, candidates)
        state.point(slots.NEXT_HIDDEN, hidden)
        self.answer = DraftStep(candidates, logits[: len(candidates)], hidden)

    def begin(self, record: SequenceRecord, caches: Mapping[AttentionKind, KVCache], length: int, window: int) -> None:
        """What all steps of a round share: they attend from the newest token's position to verified rows only."""
        for cache in caches.values():
            cache.reserve(length, 0)
        record.set_rows(_ONE_ROW, length)
        record.set_place(slots.ALL, 0, 1)
        record.follow(caches)
        position = np.array([length])
        self._state.set_rows(_ONE_ROW.tokens, position, position, _NOTHING)
        self._state.set_window(length - first_drafted("sliding", length, window))

    def use(self, record: SequenceRecord, scratch: AttentionScratch, lookup: LookupScratch | None) -> None:
        """Attend in this memory, which forwards of other sessions may have moved since the last step."""
        self._state.set_sequences((record,), scratch, lookup)
