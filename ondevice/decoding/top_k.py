"""The k likeliest tokens of a vocabulary in one pass over it."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ondevice.jit import kernel

Ids = NDArray[np.intp]
Floats = NDArray[np.float32]

LOWEST = np.finfo(np.float32).min
BLOCK = 64
"""Logits compared at a time: few blocks hold any that is among the k largest so far."""


class TopK:
    """The k largest, and with them all that tie with the k-th, as in transformers' `TopKLogitsWarper`.

    -inf is never among them, because it cannot be drawn; NaN always is, for the caller to find.
    """

    def __init__(self, top_k: int) -> None:
        self._top_k = top_k
        self._largest = np.empty(0, np.float32)
        self._kept = np.empty(0, np.intp)
        self.of(np.zeros(1, np.float32))  # so that no kernel is compiled, or loaded, while tokens wait for it

    def of(self, scores: Floats) -> Ids:
        """Their indices in `scores`, float32[V], ascending; valid until the next call."""
        if len(self._kept) != len(scores):
            self._largest = np.empty(min(self._top_k, len(scores)), np.float32)
            self._kept = np.empty(len(scores), np.intp)
        return self._kept[: select(scores, self._largest, self._kept)]


@kernel
def select(scores: Floats, largest: Floats, kept: Ids) -> int:
    """Fill `kept`; how many there are. `largest` float32[k] is scratch: a heap of the k largest so far, smallest first,
    whose first entry is what a logit has to reach.
    """
    largest[:] = LOWEST
    count = 0
    for start in range(0, len(scores), BLOCK):
        block = scores[start : start + BLOCK]
        below = 0
        for at in range(len(block)):
            below += block[at] < largest[0]
        if below == len(block):
            continue
        for at in range(len(block)):
            score = block[at]
            if not score < largest[0]:
                kept[count] = start + at
                count += 1
                if score > largest[0]:
                    replace_first(largest, score)
    size = 0
    for at in range(count):
        kept[size] = kept[at]
        size += not scores[kept[at]] < largest[0]
    return size


@kernel
def replace_first(heap: Floats, value: float) -> None:
    """Put a larger value in the place of the smallest."""
    at = 0
    while 2 * at + 1 < len(heap):
        child = 2 * at + 1
        if child + 1 < len(heap) and heap[child + 1] < heap[child]:
            child += 1
        if value <= heap[child]:
            break
        heap[at] = heap[child]
        at = child
    heap[at] = value
