"""From a row of logits to a token: penalty, temperature, top-k, top-p, min-p, and one draw."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from ondevice.errors import UsageError

Floats = NDArray[np.float32]
Ids = NDArray[np.intp]
Probabilities = NDArray[np.float64]

BINS_PER_NAT = 64
BINS = 4096
"""Of the histogram that finds a top-p set; its last bin holds what is 64 nats or more below the likeliest token."""


@dataclass(frozen=True)
class SamplingOptions:
    """How to choose a token. The names and their meaning are those of transformers' `GenerationConfig`.

    temperature : 0 chooses the likeliest token, always
    top_k, top_p, min_p : None keeps every token
    repetition_penalty : 1.0 changes nothing
    seed : None takes one from the operating system

    Raises:
        UsageError: a value that makes no sense.
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float = 1.0
    seed: int | None = None

    def __post_init__(self) -> None:
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise UsageError(f"temperature must be 0 (always the likeliest token) or more, not {self.temperature}")
        if self.top_k is not None and self.top_k < 1:
            raise UsageError(f"top_k must be at least 1, not {self.top_k}; leave it out to keep every token")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise UsageError(f"top_p must be over 0 and at most 1, not {self.top_p}")
        if self.min_p is not None and not 0 <= self.min_p <= 1:
            raise UsageError(f"min_p must be between 0 and 1, not {self.min_p}")
        if not (math.isfinite(self.repetition_penalty) and self.repetition_penalty > 0):
            raise UsageError(f"repetition_penalty must be over 0, not {self.repetition_penalty}; 1 changes nothing")
        if self.seed is not None and self.seed < 0:
            raise UsageError(f"seed must be 0 or more, not {self.seed}")


class LogitsProcessor(Protocol):
    """Changes a row of logits before a token is chosen, for a grammar say; -inf forbids a token."""

    def __call__(self, logits: Floats, context: Sequence[int]) -> Floats:
        """The changed row, float32[V].

        Args:
            logits: float32[V], the processor's own to write to.
            context: every token before the one to be chosen, the draft path included.
        """
        ...


class Sampler:
    """Chooses tokens for one generation. Its result depends on the row, the context and the draws before, on nothing
    else; `choose` takes one uniform number per token, so a run with drafts draws as a plain run with that seed does.
    """

    def __init__(self, options: SamplingOptions, processors: Sequence[LogitsProcessor] = ()) -> None:
        self.options = options
        self.processors = tuple(processors)
        self.rng = np.random.default_rng(options.seed)

    @property
    def greedy(self) -> bool:
        return self.options.temperature == 0

    def choose(self, logits: Floats, context: Sequence[int]) -> int:
        """The token that follows `context`, whose logits are float32[V]."""
        scores = self._processed(logits, context)
        if self.greedy:
            return _likeliest(scores)
        ids, weights = self._warped(scores)
        index = draw(weights, self.rng)
        return index if ids is None else int(ids[index])

    def distribution(self, logits: Floats, context: Sequence[int]) -> Probabilities:
        """float64[V]: the chance of each token to be what `choose` returns."""
        scores = self._processed(logits, context)
        probs = np.zeros(len(scores))
        if self.greedy:
            probs[_likeliest(scores)] = 1.0
            return probs
        ids, weights = self._warped(scores)
        probs[slice(None) if ids is None else ids] = weights / weights.sum()
        return probs

    def _processed(self, logits: Floats, context: Sequence[int]) -> Floats:
        penalty = self.options.repetition_penalty
        if penalty == 1.0 and not self.processors:
            return logits
        scores = np.array(logits, np.float32)
        if penalty != 1.0:
            seen = np.unique(np.asarray(context, np.int64))
            seen = seen[seen < len(scores)]
            taken = scores[seen]
            scores[seen] = np.where(taken < 0, taken * np.float32(penalty), taken / np.float32(penalty))
        for processor in self.processors:
            scores = processor(scores, context)
        return scores

    def _warped(self, scores: Floats) -> tuple[Ids | None, Probabilities]:
        """Temperature, top-k, top-p and min-p in turn.

        Returns:
            The ids that top-k leaves, ascending, None for all; the weight of each, 0 where it cannot be drawn.
        """
        options = self.options
        peak = _peak(scores, int(scores.argmax()))
        ids = _top_k(scores, options.top_k)
        depths = (peak - (scores if ids is None else scores[ids]).astype(np.float64)) / options.temperature
        weights = np.exp(-depths)
        dropped = np.zeros(len(weights), np.bool_)
        if options.top_p is not None and options.top_p < 1.0:
            dropped |= ~_top_p(depths, weights, options.top_p)
        if options.min_p is not None:
            # The likeliest token's weight is 1, and top-p never drops it.
            dropped |= weights < options.min_p
        weights[dropped] = 0.0
        return ids, weights


def draw(weights: Probabilities, rng: np.random.Generator) -> int:
    """An index drawn in proportion to `weights`, by inverting the cumulative sum at one uniform number."""
    cumulative = np.cumsum(weights)
    index = int(np.searchsorted(cumulative, rng.random() * cumulative[-1], side="right"))
    # Rounding can carry the product up to the sum itself, past every token that has a weight.
    return min(index, int(np.searchsorted(cumulative, cumulative[-1], side="left")))


def _likeliest(scores: Floats) -> int:
    best = int(scores.argmax())
    _peak(scores, best)
    return best


def _peak(scores: Floats, best: int) -> float:
    """The largest logit, which argmax found: NaN where there is any."""
    peak = float(scores[best])
    if not math.isfinite(peak):
        raise UsageError("no token can be chosen: the logits hold NaN or infinity, or a processor forbids every token")
    return peak


def _top_k(scores: Floats, top_k: int | None) -> Ids | None:
    """The ids of the k largest, ascending; like transformers, with everything that ties with the k-th. None: all."""
    if top_k is None or top_k >= len(scores):
        return None
    cut = len(scores) - top_k
    return np.flatnonzero(scores >= np.partition(scores, cut)[cut])


def _top_p(depths: Probabilities, weights: Probabilities, top_p: float) -> NDArray[np.bool_]:
    """Which tokens are in the smallest set that holds `top_p` of the mass, likeliest first, lowest id first in a tie.

    A histogram finds the bin in which the set ends, so that only this bin is sorted.

    depths : float64[n], distance below the likeliest token, in nats; weights : float64[n], exp(-depths)
    """
    bins = np.minimum(depths * BINS_PER_NAT, BINS - 1).astype(np.intp)
    mass = np.cumsum(np.bincount(bins, weights))
    needed = top_p * mass[-1]
    last = int(np.searchsorted(mass, needed, side="left"))
    keep = bins < last
    edge = np.flatnonzero(bins == last)
    edge = edge[np.argsort(depths[edge], kind="stable")]
    # A token stays while what comes before it falls short.
    before = np.concatenate([[mass[last - 1] if last else 0.0], weights[edge[:-1]]]).cumsum()
    keep[edge[before < needed]] = True
    return keep
