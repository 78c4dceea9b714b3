"""The tokens that a constraint allows to follow: its masks, applied to rows of scores."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ondevice.arrays import Float32Array, Float64Array, Int64Array
from ondevice.generate.request import Constraint, TokenMask
from ondevice.native.functions import entry, kernel

WORD = 32
"""Tokens of a word of a mask."""
FORBIDDEN = np.float32(-np.inf)
"""The score of a token that may not follow."""


class ConstraintMasks:
    """Applies a constraint to the rows of one generation. Positions are given as a context and a path after it."""

    def __init__(self, constraint: Constraint) -> None:
        self._constraint = constraint
        self._kept = np.empty(0, np.float32)

    def forced(self, context: Sequence[int], path: Sequence[int]) -> int | None:
        """The only token that may follow, where the constraint knows it; see `Constraint.forced`."""
        return self._constraint.forced(self._ahead(context, path))

    def row(self, scores: Float32Array, context: Sequence[int], path: Sequence[int]) -> Float32Array:
        """The scores, float32[V], with -inf for tokens that may not follow; valid until the next call."""
        if len(self._kept) != len(scores):
            self._kept = np.empty(len(scores), np.float32)
        keep_allowed(scores, self._constraint.mask(self._ahead(context, path)), self._kept)
        return self._kept

    def some(self, scores: Float32Array, ids: Int64Array, context: Sequence[int], path: Sequence[int]) -> Float32Array:
        """The same for the scores, float32[C], of some tokens, int64[C]; a new array."""
        return np.where(self._allowed(ids, context, path), scores, FORBIDDEN)

    def share(self, probs: Float64Array, context: Sequence[int], path: Sequence[int]) -> Float64Array:
        """float64[V]: a distribution without the tokens that may not follow, renormalised; zeros where none is left."""
        kept = np.where(self._allowed(np.arange(len(probs)), context, path), probs, 0.0)
        return kept / (kept.sum() or 1.0)

    def _allowed(self, ids: Int64Array, context: Sequence[int], path: Sequence[int]) -> NDArray[np.bool_]:
        mask = self._constraint.mask(self._ahead(context, path))
        words = ids >> 5
        known = np.where(words < len(mask), mask[np.minimum(words, len(mask) - 1)], np.uint32(0))
        return (known >> (ids & 31).astype(np.uint32) & np.uint32(1)).astype(np.bool_)

    def _ahead(self, context: Sequence[int], path: Sequence[int]) -> list[int]:
        return [*context[self._constraint.position :], *path]


@entry("tokens", "f32[] u32[] f32[]")
def keep_allowed(scores: Float32Array, mask: TokenMask, out: Float32Array) -> None:
    """out = scores where the mask's bit is set, -inf elsewhere; scores and out are float32[V]."""
    whole = len(scores) // WORD
    for word in range(whole):
        block, kept = scores[WORD * word : WORD * (word + 1)], out[WORD * word : WORD * (word + 1)]
        bits = word_of(mask, word)
        for at in range(WORD):  # not range(len(block)), so that it is vectorised
            kept[at] = block[at] if (bits >> np.uint32(at)) & np.uint32(1) else FORBIDDEN
    bits = word_of(mask, whole)
    for at in range(WORD * whole, len(scores)):
        out[at] = scores[at] if (bits >> np.uint32(at - WORD * whole)) & np.uint32(1) else FORBIDDEN


@kernel
def word_of(mask: TokenMask, word: int) -> np.uint32:
    """A word of a mask; those beyond its end allow nothing."""
    return mask[word] if word < len(mask) else np.uint32(0)
