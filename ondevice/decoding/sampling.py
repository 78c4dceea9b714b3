"""From a row of logits to a token: penalty, temperature, top-k, top-p, min-p, and one draw."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

from ondevice.errors import UsageError

if TYPE_CHECKING:
    from ondevice.decoding.nucleus import Nucleus
    from ondevice.decoding.top_k import TopK

Floats = NDArray[np.float32]
Ids = NDArray[np.intp]
Probabilities = NDArray[np.float64]

BLOCK = 512
"""Weights summed at a time in search of a draw: sums of a block are vectorised, a cumulative sum is not."""


MOST_PENALTY = 1e6
"""Beyond this, and below one over this, a logit of float32 could become infinite."""

LEAST_TEMPERATURE = 1e-30
"""Below, differences of logits become infinite, which is as good as large."""


@dataclass(frozen=True)
class SamplingOptions:
    """How to choose a token. The names and their meaning are those of transformers' `GenerationConfig`.

    temperature : 0 chooses the likeliest token, always
    top_k, top_p, min_p : None keeps every token, and so do 0, 1 and 0
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
        for name, value in vars(self).items():
            if value is not None:
                object.__setattr__(self, name, _number(name, value, whole=name in ("top_k", "seed")))
        if not self.temperature >= 0:
            raise UsageError(f"temperature must be 0 (always the likeliest token) or more, not {self.temperature}")
        if self.top_k is not None and self.top_k < 0:
            raise UsageError(f"top_k must be at least 1, or 0 to keep every token, not {self.top_k}")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise UsageError(f"top_p must be over 0 and at most 1, not {self.top_p}")
        if self.min_p is not None and not 0 <= self.min_p <= 1:
            raise UsageError(f"min_p must be between 0 and 1, not {self.min_p}")
        if not 1 / MOST_PENALTY <= self.repetition_penalty <= MOST_PENALTY:
            raise UsageError(
                f"repetition_penalty must be over 0 and at most {MOST_PENALTY:.0f}, not {self.repetition_penalty}; "
                "1 changes nothing"
            )
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
        # Imported where they are needed: with numba, and `ondevice --help` needs the options above.
        self._top_k: TopK | None = None
        if options.top_k and not self.greedy:
            from ondevice.decoding.top_k import TopK

            self._top_k = TopK(options.top_k)
        self._nucleus: Nucleus | None = None
        if options.top_p is not None and options.top_p < 1.0 and not self.greedy:
            from ondevice.decoding.nucleus import Nucleus

            self._nucleus = Nucleus(options.top_p)
        self._scratch: Probabilities = np.empty(0)

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
            seen = np.asarray(context, np.int64)
            seen = seen[seen < len(scores)]
            taken = scores[seen]  # a token seen twice is written twice, with the same value
            scores[seen] = np.where(taken < 0, taken * np.float32(penalty), taken / np.float32(penalty))
        for processor in self.processors:
            scores = _row(processor, processor(scores, context), len(scores))
        return scores

    def _warped(self, scores: Floats) -> tuple[Ids | None, Probabilities]:
        """Temperature, top-k, top-p and min-p in turn.

        Returns:
            The ids that are left, ascending, None for all; the weight of each, that of the likeliest being 1. Valid
            until the next call.
        """
        ids = None
        if self._top_k is not None:
            ids = self._top_k.of(scores)
            scores = scores[ids]
        weights = self._weights(scores)
        if self._nucleus is not None:
            ids, weights = _narrowed(ids, weights, self._nucleus.of(weights))
        if self.options.min_p is not None:
            ids, weights = _narrowed(ids, weights, np.flatnonzero(weights >= self.options.min_p))
        return ids, weights

    def _weights(self, scores: Floats) -> Probabilities:
        """float64[n], 1 for a token as likely as the likeliest."""
        peak = _finite(scores.max(initial=-np.inf))
        if len(self._scratch) < len(scores):
            self._scratch = np.empty(len(scores))
        weights = self._scratch[: len(scores)]
        np.copyto(weights, scores)
        weights -= peak
        if self.options.temperature < LEAST_TEMPERATURE:
            with np.errstate(over="ignore"):
                weights /= self.options.temperature
        elif self.options.temperature != 1.0:
            weights /= self.options.temperature
        return np.exp(weights, out=weights)


def draw(weights: Probabilities, rng: np.random.Generator) -> int:
    """An index drawn in proportion to `weights`, by inverting the cumulative sum at one uniform number."""
    if len(weights) <= BLOCK:
        return _crossing(weights, rng.random() * float(weights.sum()))[0]
    sums = np.add.reduceat(weights, np.arange(0, len(weights), BLOCK))
    block, mass = _crossing(sums, rng.random() * float(sums.sum()))
    index, _ = _crossing(weights[block * BLOCK : (block + 1) * BLOCK], mass)
    return block * BLOCK + index


def _crossing(weights: Probabilities, mass: float) -> tuple[int, float]:
    """The index at which the cumulative sum comes to exceed `mass`, and what of `mass` is left for it."""
    cumulative = np.cumsum(weights)
    index = int(np.searchsorted(cumulative, mass, side="right"))
    # Rounding can carry the mass up to the sum itself, past every index that has a weight.
    index = min(index, int(np.searchsorted(cumulative, cumulative[-1], side="left")))
    return index, mass - float(cumulative[index - 1]) if index else mass


def _number(name: str, value: object, *, whole: bool) -> float:
    """An option as Python's own int or float."""
    kind = "whole number" if whole else "number"
    if isinstance(value, bool) or not isinstance(value, Integral if whole else Real):
        raise UsageError(f"{name} must be a {kind}, not {value!r:.99}")
    if isinstance(value, Integral) and whole:
        return int(value)
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise UsageError(f"{name} must be a finite number, not {value!r:.99}")
    return number


def _row(processor: LogitsProcessor, scores: object, vocab_size: int) -> Floats:
    """What a processor returned, as float32[V].

    Raises:
        UsageError: it is something else, such as the context: in transformers that comes first.
    """
    if isinstance(scores, np.ndarray) and scores.shape == (vocab_size,) and scores.dtype.kind == "f":
        return np.ascontiguousarray(scores, np.float32)
    found = f"{scores.dtype}{list(scores.shape)}" if isinstance(scores, np.ndarray) else type(scores).__name__
    raise UsageError(
        f"a logits processor returned {found} and not the row of {vocab_size} floats that it was given: "
        "it is called with (logits, context), in this order"
    )


def _finite(peak: float) -> float:
    """The largest logit as it is: NaN where there is any."""
    if not math.isfinite(peak):
        raise UsageError("no token can be chosen: the logits hold NaN or infinity, or a processor forbids every token")
    return float(peak)


def _likeliest(scores: Floats) -> int:
    best = int(scores.argmax())
    _finite(scores[best])
    return best


def _narrowed(ids: Ids | None, weights: Probabilities, kept: Ids) -> tuple[Ids, Probabilities]:
    return kept if ids is None else ids[kept], weights[kept]
