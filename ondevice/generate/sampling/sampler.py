"""From a row of logits to a token: penalties, temperature, top-k, top-p, min-p, and a draw with Gumbel noise.

`Sampler` chooses the target's tokens (`choose`), predicts its choices for drafters (`guess`), and gives the
distribution that it draws from (`distribution`). In this order it applies `Adjustments` (bias and penalties), logits
processors, the constraint, and `RowDraw` (temperature, filters, noise). `Logprobs` reports the probabilities of emitted
tokens.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ondevice.arrays import Float32Array, Float64Array, Int64Array
from ondevice.engines.protocol import DraftStep, EngineDrafts, MultiStep
from ondevice.errors import BundleCorruptError, OndeviceError, UsageError
from ondevice.generate.request import Constraint, LogitsProcessor, SamplingOptions
from ondevice.generate.sampling.counts import TextCounts
from ondevice.generate.sampling.gumbel import Key, key_of
from ondevice.generate.sampling.masks import ConstraintMasks
from ondevice.generate.sampling.row_draw import NextToken, Penalties, RowDraw, next_token
from ondevice.generate.stats import TokenLogprob

GUESSES = 3
"""Tokens of a step that an engine may draft: `Sampler.drafting`."""

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
    is a function of seed, position and token id (`gumbel`), so a run with drafts, or one that continues where
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
        self.processors: tuple[LogitsProcessor, ...] = tuple(processors)
        self.constraint = constraint
        self._suppressed, self._begins = tuple(suppressed), begins
        self._adjustments = Adjustments(options, suppressed, begins)
        self._masks = None if constraint is None else ConstraintMasks(constraint)
        self._made_rng: np.random.Generator | None = None
        key: Key = np.zeros(1, np.uint64) if self.greedy else key_of(options.seed)
        self._row_draw = RowDraw(options, key)
        self._choice: NextToken | None = None
        """The arguments of `next_token`, once made."""
        self._guesses: tuple[DraftStep, NextToken] | None = None
        """The same for the results of a draft step."""

    def without_processors(self) -> Sampler:
        """A sampler that draws alike, for drafters: processors may have a state, and are not called for guesses."""
        return Sampler(self.options, suppressed=self._suppressed, begins=self._begins)

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token is always chosen."""
        return self.options.temperature == 0

    @property
    def reads_text(self) -> bool:
        """Whether a guess depends on the tokens before it, by penalties or a constraint."""
        return self._adjustments.read_context or self._masks is not None

    @property
    def rng(self) -> np.random.Generator:
        """Random numbers for the ratio rule, independent of the noise."""
        if self._made_rng is None:
            self._made_rng = np.random.default_rng(self.options.seed)
        return self._made_rng

    def choose(self, logits: Float32Array, context: Sequence[int], path: Sequence[int] = ()) -> int:
        """The token that follows `context` and then `path`.

        Context and path are two arguments because most generations read neither, and so never copy a long context.

        Args:
            logits: float32[V], the row that follows the last of these tokens.
            context: every token up to the newest one.
            path: drafted tokens after it.

        Raises:
            BundleCorruptError: the logits hold NaN or infinity.
            UsageError: every token is forbidden, or a logits processor returned NaN or infinity.
        """
        if self._masks is not None and (forced := self._masks.forced(context, path)) is not None:
            return forced
        scores = self._scores(logits, context, path)
        if self.greedy:
            return _argmax(scores, logits)
        tokens, _ = self._row_draw.best(scores, None, len(context) + len(path), 1)
        if not len(tokens):
            raise nothing_to_choose(logits)
        return int(tokens[0])

    def continuation(
        self, most: int, ends: frozenset[int], vocab_size: int, context: Sequence[int]
    ) -> MultiStep | None:
        """How an engine chooses tokens as `choose` does, until it would choose one of `ends`; None where that takes
        Python: with processors or a constraint.

        Args:
            most: most forwards.
            ends: tokens that end the reply.
            vocab_size: V of the rows of logits.
            context: every token up to the newest one, which penalties read.
        """
        if self.processors or self._masks is not None:
            return None
        penalties = self._adjustments.penalties(vocab_size, context)
        if self._choice is None:
            biased, biases = self._adjustments.biases
            if len(biased) and not 0 <= biased[0] <= biased[-1] < vocab_size:
                return None
            row = np.zeros(vocab_size, np.float32)
            changes = (biased, biases) if len(biased) else None
            self._choice = self._row_draw.record(row, None, 1, ends, biases=changes, penalties=penalties)
        return MultiStep(most, next_token.address, self._choice.record, self._choice)

    def drafting(self, step: DraftStep, widths: Sequence[int], hidden: Float32Array) -> EngineDrafts | None:
        """How an engine guesses as `guess` does, for the last `continuation`; None where that takes Python: where
        `continuation` is None too, and with biases for candidates that each step chooses anew. Penalties of the guesses
        of a draft do not count the guesses before them.

        Args:
            step: the arrays in which a draft step leaves its results.
            widths, hidden: see `EngineDrafts`; no width exceeds GUESSES.
        """
        adjust, is_list = self._adjustments, not step.candidates.flags.writeable
        if self._masks is not None or self.processors or not (is_list or not len(adjust.biases[0])):
            return None
        if self._guesses is None or self._guesses[0] is not step:
            biases = adjust.among(step.candidates) if is_list else None
            record = self._row_draw.record(
                step.logits, step.candidates, GUESSES, biases=biases, penalties=adjust.counted
            )
            self._guesses = step, record
        return EngineDrafts(widths, hidden, self._guesses[1].record, self._guesses[1].tokens)

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
        if self._masks is not None and (forced := self._masks.forced(context, path)) is not None:
            return [Guess(forced, 1.0)]
        scores, adjust, masks = logits, self._adjustments, self._masks
        if adjust:
            if candidates is None:
                scores = adjust.row(scores, context, path)
            else:
                scores = adjust.some(scores, candidates, context, path)
        if masks is not None and candidates is None:
            scores = masks.row(scores, context, path)
        elif masks is not None and candidates is not None:
            scores = masks.some(scores, candidates, context, path)
        tokens, values = self._row_draw.best(scores, candidates, len(context) + len(path), max(most, RIVALS))
        if not len(tokens):
            return []
        odds = [math.exp(value - values[0]) for value in values.tolist()]
        total = sum(odds)
        return [Guess(token, odd / total) for token, odd in zip(tokens.tolist()[:most], odds, strict=False)]

    def distribution(self, logits: Float32Array, context: Sequence[int], path: Sequence[int] = ()) -> Float64Array:
        """float64[V]: the probability of each token to be chosen by `choose`, which has the same errors."""
        scores = self._scores(logits, context, path)
        probs = np.zeros(len(scores))
        if self.greedy:
            probs[_argmax(scores, logits)] = 1.0
            return probs
        ids, weights = self._row_draw.kept(scores)
        if not len(ids):
            raise nothing_to_choose(logits)
        probs[ids] = weights / weights.sum()
        return probs

    def allowed_share(self, probs: Float64Array, context: Sequence[int], path: Sequence[int]) -> Float64Array:
        """float64[V]: a distribution without the tokens that the constraint forbids after `context` and `path`,
        renormalised.
        """
        return probs if self._masks is None else self._masks.share(probs, context, path)

    def _scores(self, logits: Float32Array, context: Sequence[int], path: Sequence[int]) -> Float32Array:
        """The logits after adjustments, processors and constraint."""
        scores = self._adjustments.row(logits, context, path) if self._adjustments else logits
        if self.processors:
            scores = self._processed(scores, [*context, *path])
        return scores if self._masks is None else self._masks.row(scores, context, path)

    def _processed(self, scores: Float32Array, tokens_before: Sequence[int]) -> Float32Array:
        scores = np.array(scores, np.float32)
        for processor in self.processors:
            scores = _checked_row(processor(scores, tokens_before), len(scores))
        return scores


def nothing_to_choose(logits: Float32Array) -> OndeviceError:
    """The error where no token has a finite score: the model's fault if its logits are none, else the options'.

    logits : float32[V], as the model computed them
    """
    if not math.isfinite(logits.max()):  # NaN where any logit is
        return BundleCorruptError(
            "the model computed NaN or infinity in place of logits: its weights, or the saved prefix that was loaded, "
            "are damaged: export the bundle again"
        )
    return UsageError(
        "no token can be chosen: every token is forbidden, or a logits processor returned NaN or infinity"
    )


def _argmax(scores: Float32Array, logits: Float32Array) -> int:
    """The token with the largest score, the first of equal ones; `logits` are what the scores were made from."""
    best = int(scores.argmax())
    if not math.isfinite(scores[best]):  # NaN where any score is
        raise nothing_to_choose(logits)
    return best


def _checked_row(scores: object, vocab_size: int) -> Float32Array:
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
        self._counts = TextCounts(begins)
        self.counted: Penalties | None = None
        """The last result of `penalties`."""
        self._any = bool(biases or options.repetition_penalty != 1 or self._presence or self._frequency)

    def __bool__(self) -> bool:
        """Whether anything is changed."""
        return self._any

    @property
    def read_context(self) -> bool:
        """Whether a change depends on the context."""
        return bool(self._repetition != 1 or self._presence or self._frequency)

    @property
    def biases(self) -> tuple[Int64Array, Float32Array]:
        """int64[b] and float32[b]: tokens, ascending, and what is added to their logits."""
        return self._biased, self._biases

    def among(self, tokens: Int64Array) -> tuple[Int64Array, Float32Array] | None:
        """int64[b] and float32[b]: the places of biased tokens among different ones, ascending, and what is added to
        their logits; None where there are none.
        """
        places = np.flatnonzero(np.isin(tokens, self._biased))
        return (places, _values_of(tokens[places], self._biased, self._biases)) if len(places) else None

    def penalties(self, vocab_size: int, context: Sequence[int]) -> Penalties | None:
        """The penalties with the numbers of a text's tokens, in the same arrays for every call; None without any."""
        if not self.read_context:
            return None
        if self.counted is None:
            numbers = np.zeros(vocab_size, np.int32), np.zeros(vocab_size, np.int32)
            self.counted = Penalties(*numbers, float(self._repetition), self._presence, self._frequency)
        self._counts.read(context, ())
        self._counts.seen.write(self.counted.seen)
        self._counts.generated.write(self.counted.generated)
        return self.counted

    def row(self, logits: Float32Array, context: Sequence[int], path: Sequence[int] = ()) -> Float32Array:
        """A changed copy of a row of the whole vocabulary, float32[V], that follows `context` and then `path`."""
        scores = np.array(logits, np.float32)
        scores[self._biased] += self._biases
        if self.read_context:
            self._counts.read(context, path)
        if self._repetition != 1:
            seen = self._counts.seen.distinct
            seen = seen[seen < len(scores)]
            scores[seen] = self._repeated(scores[seen])
        if self._presence or self._frequency:
            tokens = self._counts.generated.distinct
            scores[tokens] -= self._penalties(tokens)
        return scores

    def some(
        self, logits: Float32Array, tokens: Int64Array, context: Sequence[int], path: Sequence[int] = ()
    ) -> Float32Array:
        """A changed copy of the logits, float32[C], of some tokens, int64[C]."""
        scores = np.array(logits, np.float32)
        scores += _values_of(tokens, self._biased, self._biases)
        if self.read_context:
            self._counts.read(context, path)
        if self._repetition != 1:
            scores = np.where(self._counts.seen.of(tokens) > 0, self._repeated(scores), scores)
        if self._presence or self._frequency:
            scores -= self._penalties(tokens)
        return scores

    def _repeated(self, scores: Float32Array) -> Float32Array:
        return np.where(scores < 0, scores * self._repetition, scores / self._repetition)

    def _penalties(self, tokens: Int64Array) -> Float32Array:
        """float32[C]: the presence and frequency penalty of tokens, 0 for those that were not generated."""
        counts = self._counts.generated.of(tokens)
        return np.where(counts > 0, self._presence + self._frequency * counts, 0.0).astype(np.float32)


def _values_of(tokens: Int64Array, known: Int64Array, values: Float32Array) -> Float32Array:
    """float32[C]: `values` of those tokens that are in `known`, which is ascending; 0 for the others."""
    if not len(known):
        return np.zeros(len(tokens), np.float32)
    at = np.minimum(np.searchsorted(known, tokens), len(known) - 1)
    return np.where(known[at] == tokens, values[at], np.float32(0))


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
