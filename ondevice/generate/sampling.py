"""From a row of logits to a token: penalties, temperature, top-k, top-p, min-p, and a draw with Gumbel noise.

`Sampler` chooses the target's tokens (`choose`), predicts its choices for drafters (`guess`), and gives the
distribution that it draws from (`distribution`). In this order it applies `Adjustments` (bias and penalties), logits
processors, the constraint, and `Warp` (temperature and filters). `Logprobs` reports the probabilities of emitted
tokens. The kernels are in `sampling_kernels`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ondevice.arrays import Float32Array, Float64Array, IndexArray, Int64Array
from ondevice.errors import UsageError
from ondevice.generate.request import Constraint, LogitsProcessor, SamplingOptions
from ondevice.generate.sampling_kernels import (
    ConstraintMasks,
    Key,
    Nucleus,
    TopK,
    TopKDraw,
    gumbel_argmax,
    gumbel_argmax_all,
    key_of,
    weigh,
)
from ondevice.generate.stats import TokenLogprob

RIVALS = 4
"""Tokens that a guess is compared with, itself included: few tokens come near the winner, noise included."""


class Guess(NamedTuple):
    """A token that the target might choose.

    share : in (0, 1], weight of the token's score, noise included, among the RIVALS best. Near 1, the target will
        choose the token even if its logits differ a little
    """

    token: int
    share: float


class Sampler:
    """Chooses the tokens of one generation.

    A choice depends on options and seed, the row of logits, and the context, and on nothing else. The noise of a draw
    is a function of seed, position and token id (`sampling_kernels`), so a run with drafts, or one that continues where
    another was cut off, draws the same tokens as a plain run with the same seed.
    """

    def __init__(
        self,
        options: SamplingOptions,
        processors: Sequence[LogitsProcessor] = (),
        *,
        suppressed: Sequence[int] = (),
        begins: int = 0,
        constraint: Constraint | None = None,
    ) -> None:
        """
        Args:
            options: temperature, filters, penalties, biases, seed.
            processors: called in this order, after penalties and before temperature.
            suppressed: tokens that are never chosen.
            begins: number of prompt tokens, which presence and frequency penalty do not count.
            constraint: applied after the processors; where it leaves one token, that is chosen.
        """
        self.options = options
        self.processors = tuple(processors)
        self.constraint = constraint
        self._suppressed, self._begins = tuple(suppressed), begins
        self._adjustments = Adjustments(options, suppressed, begins)
        self._masks = None if constraint is None else ConstraintMasks(constraint)
        self._made_top_k_draw: TopKDraw | None = None
        self._made_rng: np.random.Generator | None = None
        self._key: Key = np.zeros(1, np.uint64)
        if self.greedy:
            return
        self._key = key_of(options.seed)
        self._best = np.empty(1, np.intp), np.empty(1)
        self._warp = Warp(options)

    def without_processors(self) -> Sampler:
        """A sampler that draws alike, for drafters: processors may have a state, and are not called for guesses."""
        return Sampler(self.options, suppressed=self._suppressed, begins=self._begins)

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token is always chosen."""
        return self.options.temperature == 0

    @property
    def reads_text(self) -> bool:
        """Whether a guess depends on the context, by penalties or a constraint."""
        return bool(self._adjustments) or self._masks is not None

    @property
    def rng(self) -> np.random.Generator:
        """Random numbers for the ratio rule, independent of the noise."""
        if self._made_rng is None:
            self._made_rng = np.random.default_rng(self.options.seed)
        return self._made_rng

    @property
    def _top_k_draw(self) -> TopKDraw:
        if self._made_top_k_draw is None:
            self._made_top_k_draw = TopKDraw(self.options, self._key)
        return self._made_top_k_draw

    def choose(self, logits: Float32Array, context: Sequence[int], path: Sequence[int] = ()) -> int:
        """The token that follows `context` and then `path`.

        Context and path are two arguments because most generations read neither, and so never copy a long context.

        Args:
            logits: float32[V], the row that follows the last of these tokens.
            context: every token up to the newest one.
            path: drafted tokens after it.

        Raises:
            UsageError: the logits hold NaN or infinity, or every token is forbidden.
        """
        if self._masks is not None and (forced := self._masks.forced(context, path)) is not None:
            return forced
        scores = self._scores(logits, context, path)
        if self.greedy:
            return _argmax(scores)
        if self.options.top_k:
            tokens, _ = self._top_k_draw.best(scores, None, len(context) + len(path), 1)
            return int(tokens[0]) if len(tokens) else int(_checked(math.nan))
        best, values = self._best
        self._draw(scores, None, len(context) + len(path), best, values)
        return int(best[0])

    def guess(
        self,
        logits: Float32Array,
        candidates: Int64Array | None,
        context: Sequence[int],
        path: Sequence[int],
        most: int = 1,
    ) -> list[Guess]:
        """The tokens that `choose` would choose, best first, if the target's logits were these.

        Drawn with the noise that `choose` will use at that position: where drafter and target have about the same
        distribution, they mostly draw the same token. Processors are not called, because they may have a state. Tokens
        that the constraint forbids are never guessed.

        Args:
            logits: float32[C], a drafter's logits of the candidates.
            candidates: int64[C], different token ids; None for the whole vocabulary, in order.
            context, path: every token up to the newest one, and those drafted after it.
            most: number of guesses.

        Returns:
            Up to `most` guesses; none where the logits hold NaN or infinity.
        """
        scores = logits
        if self._adjustments:
            tokens_before = [*context, *path]
            adjust = self._adjustments
            if candidates is None:
                scores = adjust.row(logits, tokens_before)
            else:
                scores = adjust.some(logits, candidates, tokens_before)
        if self._masks is not None:
            if (forced := self._masks.forced(context, path)) is not None:
                return [Guess(forced, 1.0)]
            scores = self._masks.some(scores, candidates, context, path)
        position, rivals = len(context) + len(path), max(most, RIVALS)
        if self.greedy or self.options.top_k:
            tokens, values = self._top_k_draw.best(scores, candidates, position, rivals)
        elif math.isfinite(scores.max(initial=-np.inf)):
            best, values = np.empty(rivals, np.intp), np.empty(rivals)
            count = self._draw(scores, candidates, position, best, values)
            best, values = best[:count], values[:count]
            tokens = best if candidates is None else candidates[best]
        else:
            return []
        if not len(tokens):
            return []
        odds = [math.exp(value - values[0]) for value in values.tolist()]
        total = sum(odds)
        return [Guess(token, odd / total) for token, odd in zip(tokens.tolist()[:most], odds, strict=False)]

    def distribution(self, logits: Float32Array, context: Sequence[int], path: Sequence[int] = ()) -> Float64Array:
        """float64[V]: the probability of each token to be chosen by `choose`."""
        scores = self._scores(logits, context, path)
        probs = np.zeros(len(scores))
        if self.greedy:
            probs[_argmax(scores)] = 1.0
            return probs
        peak = _peak(scores)
        ids, weights = self._warp.kept(scores, peak)
        if ids is None or weights is None:
            weights = self._warp.weights(scores, peak)
        probs[slice(None) if ids is None else ids] = weights / weights.sum()
        return probs

    def allowed_share(self, probs: Float64Array, context: Sequence[int], path: Sequence[int]) -> Float64Array:
        """float64[V]: a distribution without the tokens that the constraint forbids after `context` and `path`,
        renormalised.
        """
        return probs if self._masks is None else self._masks.share(probs, context, path)

    def _draw(
        self, scores: Float32Array, token_ids: Int64Array | None, position: int, best: IndexArray, values: Float64Array
    ) -> int:
        """Fill `best` with the indices of the winners in `scores`, and `values` with their log weight + noise, for rows
        without top-k.

        token_ids : int64[C], the token of each score; None where it is the index
        """
        peak = _peak(scores)
        ids, weights = self._warp.kept(scores, peak)
        temperature = self.options.temperature
        if ids is None and token_ids is None:
            return gumbel_argmax_all(scores, peak, temperature, self._key, position, best, values)
        if ids is None or weights is None:
            ids, weights = np.arange(len(scores)), self._warp.weights(scores, peak)
        kept_ids = ids if token_ids is None else token_ids[ids]
        return gumbel_argmax(scores, ids, weights, kept_ids, peak, temperature, self._key, position, best, values)

    def _scores(self, logits: Float32Array, context: Sequence[int], path: Sequence[int]) -> Float32Array:
        """The logits after adjustments, processors and constraint."""
        scores = logits
        if self._adjustments or self.processors:
            scores = self._changed(logits, [*context, *path])
        return scores if self._masks is None else self._masks.row(scores, context, path)

    def _changed(self, logits: Float32Array, tokens_before: Sequence[int]) -> Float32Array:
        scores = self._adjustments.row(logits, tokens_before) if self._adjustments else np.array(logits, np.float32)
        for processor in self.processors:
            scores = _checked_row(processor, processor(scores, tokens_before), len(scores))
        return scores


def _argmax(scores: Float32Array) -> int:
    best = int(scores.argmax())
    _checked(scores[best])
    return best


def _peak(scores: Float32Array) -> float:
    return _checked(scores.max(initial=-np.inf))


def _checked(peak: float) -> float:
    """The largest logit, unchanged. It is NaN where any logit is. Raises UsageError unless it is finite."""
    if not math.isfinite(peak):
        raise UsageError("no token can be chosen: the logits hold NaN or infinity, or every token is forbidden")
    return float(peak)


def _checked_row(processor: LogitsProcessor, scores: object, vocab_size: int) -> Float32Array:
    """The value that a processor returned, as float32[V].

    Raises:
        UsageError: it is not such a row, for example the context, which transformers' processors have first.
    """
    if isinstance(scores, np.ndarray) and scores.shape == (vocab_size,) and scores.dtype.kind == "f":
        return np.ascontiguousarray(scores, np.float32)
    found = f"{scores.dtype}{list(scores.shape)}" if isinstance(scores, np.ndarray) else type(scores).__name__
    raise UsageError(
        f"a logits processor returned {found} and not the row of {vocab_size} floats that it was given: "
        "it is called with (logits, context), in this order"
    )


# Biases, suppressed tokens and penalties.


class Adjustments:
    """Changes of logits that depend on the token, its own logit and the context only, so that the few candidates of a
    drafter are changed exactly as the target's whole row is.

    In this order: bias, repetition penalty (over the whole context, as in transformers), presence and frequency penalty
    (over what was generated, as in OpenAI's API and vLLM).
    """

    def __init__(self, options: SamplingOptions, suppressed: Sequence[int] = (), begins: int = 0) -> None:
        """
        Args:
            options: `logit_bias` and the penalties are read.
            suppressed: tokens that are never chosen.
            begins: index in the context of the first generated token.
        """
        biases = {**(options.logit_bias or {}), **dict.fromkeys(suppressed, -np.inf)}
        self._biased = np.array(sorted(biases), np.int64)
        self._biases = np.array([biases[token] for token in sorted(biases)], np.float32)
        self._repetition = np.float32(options.repetition_penalty)
        self._presence, self._frequency = options.presence_penalty, options.frequency_penalty
        self._begins = begins
        self._any = bool(biases or options.repetition_penalty != 1 or self._presence or self._frequency)

    def __bool__(self) -> bool:
        """Whether anything is changed."""
        return self._any

    def row(self, logits: Float32Array, context: Sequence[int]) -> Float32Array:
        """A changed copy of a row of the whole vocabulary, float32[V]."""
        scores = np.array(logits, np.float32)
        scores[self._biased] += self._biases
        if self._repetition != 1:
            seen = np.asarray(context, np.int64)
            seen = seen[(seen >= 0) & (seen < len(scores))]  # soft tokens are negative
            scores[seen] = self._repeated(scores[seen])  # a token seen twice is written twice, with the same value
        if self._presence or self._frequency:
            tokens, penalties = self._penalties(context)
            scores[tokens] -= penalties
        return scores

    def some(self, logits: Float32Array, tokens: Int64Array, context: Sequence[int]) -> Float32Array:
        """A changed copy of the logits, float32[C], of some tokens, int64[C]."""
        scores = np.array(logits, np.float32)
        scores += _values_of(tokens, self._biased, self._biases)
        if self._repetition != 1:
            scores = np.where(np.isin(tokens, np.asarray(context, np.int64)), self._repeated(scores), scores)
        if self._presence or self._frequency:
            scores -= _values_of(tokens, *self._penalties(context))
        return scores

    def _repeated(self, scores: Float32Array) -> Float32Array:
        return np.where(scores < 0, scores * self._repetition, scores / self._repetition)

    def _penalties(self, context: Sequence[int]) -> tuple[Int64Array, Float32Array]:
        """The generated tokens, ascending, and the penalty of each."""
        tokens, counts = np.unique(np.asarray(context[self._begins :], np.int64), return_counts=True)
        return tokens, (self._presence + self._frequency * counts).astype(np.float32)


def _values_of(tokens: Int64Array, known: Int64Array, values: Float32Array) -> Float32Array:
    """float32[C]: `values` of those tokens that are in `known`, which is ascending; 0 for the others."""
    if not len(known):
        return np.zeros(len(tokens), np.float32)
    at = np.minimum(np.searchsorted(known, tokens), len(known) - 1)
    return np.where(known[at] == tokens, values[at], np.float32(0))


# Temperature and filters.


MARGIN = 1e-5
"""Relative margin on logits that is larger than the rounding of float32."""

LOWEST = float(np.finfo(np.float32).min)


class Kept(NamedTuple):
    """The tokens that the filters keep.

    ids : intp[n], ascending; None for all tokens
    weights : float64[n], about exp((score - peak) / temperature): 1 for the likeliest; None where `ids` is
    """

    ids: IndexArray | None
    weights: Float64Array | None


class Warp:
    """Temperature, top-k, top-p and min-p, in this order, for one generation that samples."""

    def __init__(self, options: SamplingOptions) -> None:
        self._options = options
        self._top_k: TopK | None = None
        self._nucleus: Nucleus | None = None
        self._scratch: Float64Array = np.empty(0)
        if options.top_k:
            self._top_k = TopK(options.top_k)
        if options.top_p is not None and options.top_p < 1.0:
            self._nucleus = Nucleus(options.top_p)

    def kept(self, scores: Float32Array, peak: float) -> Kept:
        """Apply temperature and filters to a row, float32[V], whose largest score is `peak`. Valid until the next
        call.
        """
        ids = None
        if self._top_k is not None:
            ids = self._top_k.select(scores)
            scores = scores[ids]
        elif self._nucleus is None and self._options.min_p is None:
            return Kept(None, None)
        if ids is None and self._nucleus is None and self._options.min_p:
            ids = self._above(scores, peak, self._options.min_p)
            scores = scores[ids]
        weights = self.weights(scores, peak)
        if self._nucleus is not None:
            ids, weights = _narrowed(ids, weights, self._nucleus.select(weights))
        if self._options.min_p is not None:
            ids, weights = _narrowed(ids, weights, np.flatnonzero(weights >= self._options.min_p))
        return Kept(ids, weights)

    def weights(self, scores: Float32Array, peak: float) -> Float64Array:
        """float64[n]: exp((score - peak) / temperature)."""
        if len(self._scratch) < len(scores):
            self._scratch = np.empty(len(scores))
        weights = self._scratch[: len(scores)]
        weigh(scores, peak, self._options.temperature, weights)
        return weights

    def _above(self, scores: Float32Array, peak: float, min_p: float) -> IndexArray:
        """The tokens whose weight can be `min_p` or more, and a few others, without taking exponentials."""
        below = self._options.temperature * math.log(min_p)
        threshold = peak + below - MARGIN * (abs(peak) + abs(below))
        return np.flatnonzero(scores >= np.float32(max(threshold, LOWEST)))


def _narrowed(ids: IndexArray | None, weights: Float64Array, kept: IndexArray) -> tuple[IndexArray, Float64Array]:
    return kept if ids is None else ids[kept], weights[kept]


# Log probabilities of emitted tokens.


MAX_TOP_LOGPROBS = 20
"""Alternatives per token at most, as in OpenAI's API."""


class Logprobs:
    """Log probabilities of emitted tokens and their alternatives, from the rows of logits that they were chosen from.

    Neither the rows nor the order in which a row is summed depend on drafts, so the results do not either.
    """

    def __init__(self, top: int = 0) -> None:
        """
        Args:
            top: number of alternatives, 0 to MAX_TOP_LOGPROBS.
        """
        self._top = top

    def of(self, logits: Float32Array, token_id: int) -> TokenLogprob:
        """The log probability of one token in a row of logits, float32[V]."""
        scores = logits.astype(np.float64)
        peak = scores.max()
        total = peak + np.log(np.exp(scores - peak).sum())
        top = self._likeliest(logits)
        return TokenLogprob(
            token_id,
            float(scores[token_id] - total),
            tuple((token, float(scores[token] - total)) for token in top),
        )

    def _likeliest(self, logits: Float32Array) -> list[int]:
        if not self._top:
            return []
        least = np.partition(logits, -min(self._top, len(logits)))[-min(self._top, len(logits))]
        found = np.flatnonzero(logits >= least)
        return [int(token) for token in found[np.argsort(-logits[found], kind="stable")][: self._top]]
