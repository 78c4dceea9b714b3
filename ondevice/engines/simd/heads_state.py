"""What a session's proposals need beside the plan of the heads: where their answer goes."""

from __future__ import annotations

import numpy as np

from ondevice.engines.protocol import Proposals
from ondevice.engines.simd.kernels import slots
from ondevice.engines.simd.plan.heads import HeadsPlan


class HeadsState:
    """
    Attributes:
        slots: to run the plan with.
        answer: where every run leaves its results.
    """

    def __init__(self, plan: HeadsPlan) -> None:
        self.slots = np.zeros(slots.SLOTS, np.int64)
        self._logits = np.zeros((plan.offsets, plan.logits_width), np.float32)
        shape = plan.offsets, plan.candidates
        candidates = np.zeros(shape, np.int64)
        if not plan.shortlisted:
            candidates = np.broadcast_to(np.arange(plan.candidates), shape)
        self.slots[slots.ALL], self.slots[slots.WANTED] = 1, plan.offsets
        self.slots[slots.HIDDEN] = plan.normed.ctypes.data
        self.slots[slots.LOGITS] = self._logits.ctypes.data
        self.slots[slots.CANDIDATES] = candidates.ctypes.data if plan.shortlisted else 0
        self.answer = Proposals(candidates, self._logits[:, : plan.candidates])
