"""Rows of logits without the tokens that a constraint does not allow."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ondevice.decoding.constraint import Constraint, Mask
from ondevice.jit import kernel

Floats = NDArray[np.float32]
Ids = NDArray[np.int64]
Probabilities = NDArray[np.float64]

ALL = np.uint32(0xFFFFFFFF)
"""A word of a mask that allows its 32 tokens."""


class Masks:
    """A constraint's masks, on the rows of one generation."""

    def __init__(self, constraint: Constraint) -> None:
        self._constraint = constraint
        self._kept = np.empty(0, np.float32)
        keep_allowed(self._kept, np.zeros(0, np.uint32), self._kept)  # loaded before tokens wait for it

    def forced(self, context: Sequence[int], path: Sequence[int]) -> int | None:
        """The token that must follow a context and then a path."""
        return self._constraint.forced(self._ahead(context, path))

    def row(self, scores: Floats, context: Sequence[int], path: Sequence[int]) -> Floats:
        """float32[V]: -inf where a token may not follow; valid until the next call."""
        if len(self._kept) != len(scores):
            self._kept = np.empty(len(scores), np.float32)
        keep_allowed(scores, self._constraint.mask(self._ahead(context, path)), self._kept)
        return self._kept

    def some(self, scores: Floats, ids: Ids | None, context: Sequence[int], path: Sequence[int]) -> Floats:
        """The same for the scores of some tokens, behind a path; None for all tokens, in order."""
        ids = np.arange(len(scores)) if ids is None else ids
        return np.where(self._allowed(ids, context, path), scores, np.float32(-np.inf))

    def share(self, probs: Probabilities, context: Sequence[int], path: Sequence[int]) -> Probabilities:
        """float64[V]: a distribution without the tokens that may not follow, renormalised; zeros where all are such."""
        kept = np.where(self._allowed(np.arange(len(probs)), context, path), probs, 0.0)
        return kept / (kept.sum() or 1.0)

    def _allowed(self, ids: Ids, context: Sequence[int], path: Sequence[int]) -> NDArray[np.bool_]:
        mask = self._constraint.mask(self._ahead(context, path))
        words = ids >> 5
        known = np.where(words < len(mask), mask[np.minimum(words, len(mask) - 1)], np.uint32(0))
        return (known >> (ids & 31).astype(np.uint32) & np.uint32(1)).astype(np.bool_)

    def _ahead(self, context: Sequence[int], path: Sequence[int]) -> list[int]:
        return [*context[self._constraint.position :], *path]


@kernel
def keep_allowed(scores: Floats, mask: Mask, out: Floats) -> None:
    """out = scores where a bit is set, -inf elsewhere; float32[V] both. Word by word: in a string nearly all tokens are
    allowed, elsewhere a few.
    """
    for word in range((len(scores) + 31) // 32):
        start = 32 * word
        stop = min(start + 32, len(scores))
        bits = mask[word] if word < len(mask) else np.uint32(0)
        if bits == np.uint32(0):
            out[start:stop] = -np.inf
        elif bits == ALL:
            out[start:stop] = scores[start:stop]
        else:
            for at in range(start, stop):
                out[at] = scores[at] if (bits >> np.uint32(at - start)) & np.uint32(1) else -np.inf
