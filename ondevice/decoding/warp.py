"""What temperature, top-k, top-p and min-p make of a row of scores: the tokens that are left, and their weights."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ondevice.decoding.sampling_options import SamplingOptions

if TYPE_CHECKING:
    from ondevice.decoding.nucleus import Nucleus
    from ondevice.decoding.top_k import TopK

Floats = NDArray[np.float32]
Ids = NDArray[np.intp]
Probabilities = NDArray[np.float64]

MARGIN = 1e-5
"""Share of a logit that is more than float32 rounds away."""

LOWEST = float(np.finfo(np.float32).min)

LEAST_TEMPERATURE = 1e-30
"""Below, differences of logits become infinite, which is as good as large."""


class Kept(NamedTuple):
    """What temperature, top-k, top-p and min-p leave of a row.

    ids : ascending; None for all
    weights : float64, about exp((score - peak) / temperature): 1 for the likeliest; None where `ids` is
    """

    ids: Ids | None
    weights: Probabilities | None


class Warp:
    """Temperature, top-k, top-p and min-p, in this order, of one generation that samples."""

    def __init__(self, options: SamplingOptions) -> None:
        self._options = options
        self._top_k: TopK | None = None
        self._nucleus: Nucleus | None = None
        self._scratch: Probabilities = np.empty(0)
        # Imported where they are needed, because they bring numba.
        if options.top_k:
            from ondevice.decoding.top_k import TopK

            self._top_k = TopK(options.top_k)
        if options.top_p is not None and options.top_p < 1.0:
            from ondevice.decoding.nucleus import Nucleus

            self._nucleus = Nucleus(options.top_p)

    def kept(self, scores: Floats, peak: float) -> Kept:
        """Temperature, top-k, top-p and min-p in turn; valid until the next call."""
        ids = None
        if self._top_k is not None:
            ids = self._top_k.of(scores)
            scores = scores[ids]
        elif self._nucleus is None and self._options.min_p is None:
            return Kept(None, None)
        if ids is None and self._nucleus is None and self._options.min_p:
            ids = self._above(scores, peak, self._options.min_p)
            scores = scores[ids]
        weights = self.weights(scores, peak)
        if self._nucleus is not None:
            ids, weights = _narrowed(ids, weights, self._nucleus.of(weights))
        if self._options.min_p is not None:
            ids, weights = _narrowed(ids, weights, np.flatnonzero(weights >= self._options.min_p))
        return Kept(ids, weights)

    def weights(self, scores: Floats, peak: float) -> Probabilities:
        """float64[n], 1 for a token as likely as the likeliest."""
        if len(self._scratch) < len(scores):
            self._scratch = np.empty(len(scores))
        weights = self._scratch[: len(scores)]
        np.copyto(weights, scores)
        weights -= peak
        if self._options.temperature < LEAST_TEMPERATURE:
            with np.errstate(over="ignore"):
                weights /= self._options.temperature
        elif self._options.temperature != 1.0:
            weights /= self._options.temperature
        return np.exp(weights, out=weights)

    def _above(self, scores: Floats, peak: float, least: float) -> Ids:
        """Where weights of at least `least` can be, and a few more, before their exponentials are taken."""
        below = self._options.temperature * math.log(least)
        threshold = peak + below - MARGIN * (abs(peak) + abs(below))
        return np.flatnonzero(scores >= np.float32(max(threshold, LOWEST)))


def _narrowed(ids: Ids | None, weights: Probabilities, kept: Ids) -> tuple[Ids, Probabilities]:
    return kept if ids is None else ids[kept], weights[kept]
