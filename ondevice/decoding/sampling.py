"""From a row of logits to a token: penalties, temperature, top-k, top-p, min-p, a draw with the noise of its place."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ondevice.decoding.adjustments import Adjustments
from ondevice.decoding.logits_processor import LogitsProcessor, checked_row
from ondevice.decoding.sampling_options import SamplingOptions
from ondevice.decoding.warp import Warp
from ondevice.errors import UsageError

if TYPE_CHECKING:
    from ondevice.decoding.constraint import Constraint
    from ondevice.decoding.masks import Masks
    from ondevice.decoding.noise import Key
    from ondevice.decoding.shortlist import Shortlist

Floats = NDArray[np.float32]
Ids = NDArray[np.intp]
Tokens = NDArray[np.int64]
Probabilities = NDArray[np.float64]

RIVALS = 4
"""Tokens that a guess is compared with: noise leaves few in the running."""


class Guess(NamedTuple):
    """A token that the target might choose.

    share : in (0, 1], how it compares with those next best, the noise included: near 1, and the target chooses it even
        if it sees the tokens a little differently
    """

    token: int
    share: float


class Sampler:
    """Chooses tokens for one generation. What it chooses depends on options and seed, the row and its context, and on
    nothing else: a draw takes the noise of the place where the token will stand (`decoding.noise`), so a run with
    drafts, or one that goes on where another was cut off, draws as a plain run with that seed does.
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
            options: see there.
            processors: asked in this order, after penalties and before temperature.
            suppressed: tokens never to be chosen.
            begins: tokens of the prompt, which presence and frequency penalty do not count.
            constraint: the last to forbid tokens; where it leaves one, that is chosen.
        """
        self.options = options
        self.processors = tuple(processors)
        self.constraint = constraint
        self._suppressed, self._begins = tuple(suppressed), begins
        self._adjustments = Adjustments(options, suppressed, begins)
        # Imported where they are needed, because they bring numba.
        self._masks: Masks | None = None
        if constraint is not None:
            from ondevice.decoding.masks import Masks

            self._masks = Masks(constraint)
        self._made_shortlist: Shortlist | None = None
        self._made_rng: np.random.Generator | None = None
        self._key: Key = np.zeros(1, np.uint64)
        if self.greedy:
            return
        from ondevice.decoding import noise

        self._key = noise.key_of(options.seed)
        self._race, self._race_all = noise.race, noise.race_all
        self._own = np.empty(1, np.intp), np.empty(1)
        self._warp = Warp(options)
        if options.top_k:
            _ = self._shortlist  # made now, and its kernels loaded

    def without_processors(self) -> Sampler:
        """One that draws alike, for whoever guesses: processors may have a state."""
        return Sampler(self.options, suppressed=self._suppressed, begins=self._begins)

    @property
    def greedy(self) -> bool:
        return self.options.temperature == 0

    @property
    def reads_text(self) -> bool:
        """Whether a guess depends on what was said before it, by penalties or a constraint."""
        return bool(self._adjustments) or self._masks is not None

    # Not functools.cached_property: before Python 3.12 it has one lock for all samplers, held while kernels are loaded,
    # and a process that was forked meanwhile waits for it for ever.
    @property
    def _shortlist(self) -> Shortlist:
        if self._made_shortlist is None:
            from ondevice.decoding.shortlist import Shortlist

            self._made_shortlist = Shortlist(self.options, self._key)
        return self._made_shortlist

    @property
    def rng(self) -> np.random.Generator:
        """Random numbers for the ratio rule, which must not see the noise."""
        if self._made_rng is None:
            self._made_rng = np.random.default_rng(self.options.seed)
        return self._made_rng

    def choose(self, logits: Floats, context: Sequence[int], path: Sequence[int] = ()) -> int:
        """The token that follows `context` and then `path`, whose logits are float32[V].

        In two parts, so that nobody joins them who does not look at them: a round copies no long context.
        """
        if self._masks is not None and (forced := self._masks.forced(context, path)) is not None:
            return forced
        scores = self._processed(logits, context, path)
        if self.greedy:
            return _likeliest(scores)
        if self.options.top_k:
            winners, _ = self._shortlist.winners(scores, None, len(context) + len(path), 1)
            return int(winners[0]) if len(winners) else int(_finite(math.nan))
        best, values = self._own
        self._draw(scores, None, len(context) + len(path), best, values)
        return int(best[0])

    def guess(
        self, logits: Floats, candidates: Tokens | None, context: Sequence[int], path: Sequence[int], most: int = 1
    ) -> list[Guess]:
        """The tokens that `choose` would come to, best first, if a drafter's opinion were the target's.

        Drawn with the very noise that `choose` will take at that place: where drafter and target see about the same
        chances, they mostly draw the same token. Processors are left out: they may have a state, and this is a guess.
        What the constraint forbids is never guessed.

        Args:
            logits: float32[C], of these tokens.
            candidates: int64[C], different token ids; None for all of the vocabulary, in order.
            context, path: every token up to the newest one, and those drafted after it.
            most: how many.

        Returns:
            Up to `most`; none where the logits hold NaN or infinity.
        """
        scores = logits
        if self._adjustments:
            said = [*context, *path]
            adjust = self._adjustments
            scores = adjust.row(logits, said) if candidates is None else adjust.some(logits, candidates, said)
        if self._masks is not None:
            if (forced := self._masks.forced(context, path)) is not None:
                return [Guess(forced, 1.0)]
            scores = self._masks.some(scores, candidates, context, path)
        position, rivals = len(context) + len(path), max(most, RIVALS)
        if self.greedy or self.options.top_k:
            tokens, values = self._shortlist.winners(scores, candidates, position, rivals)
        elif math.isfinite(scores.max(initial=-np.inf)):
            best, values = np.empty(rivals, np.intp), np.empty(rivals)
            count = self._draw(scores, candidates, position, best, values)
            tokens = best[:count] if candidates is None else candidates[best[:count]]
        else:
            return []
        if not len(tokens):
            return []
        odds = [math.exp(value - values[0]) for value in values.tolist()]
        total = sum(odds)
        return [Guess(token, odd / total) for token, odd in zip(tokens.tolist()[:most], odds, strict=False)]

    def distribution(self, logits: Floats, context: Sequence[int], path: Sequence[int] = ()) -> Probabilities:
        """float64[V]: the chance of each token to be what `choose` returns."""
        scores = self._processed(logits, context, path)
        probs = np.zeros(len(scores))
        if self.greedy:
            probs[_likeliest(scores)] = 1.0
            return probs
        peak = _peak(scores)
        ids, weights = self._warp.kept(scores, peak)
        if ids is None or weights is None:
            weights = self._warp.weights(scores, peak)
        probs[slice(None) if ids is None else ids] = weights / weights.sum()
        return probs

    def allowed_share(self, probs: Probabilities, context: Sequence[int], path: Sequence[int]) -> Probabilities:
        """float64[V]: what is left of a distribution behind `context` and then `path`, renormalised."""
        return probs if self._masks is None else self._masks.share(probs, context, path)

    def _draw(self, scores: Floats, names: Tokens | None, position: int, best: Ids, values: Probabilities) -> int:
        """Fill `best` with where the winners lie in `scores`, and `values` with their log weight + noise.

        For rows that no top-k cuts: there numpy's exponentials, which are vectorised, are worth its overheads.

        names : of the scores, token ids; None where their place is their name
        """
        peak = _peak(scores)
        ids, weights = self._warp.kept(scores, peak)
        temperature = self.options.temperature
        if ids is None and names is None:
            return self._race_all(scores, peak, temperature, self._key, position, best, values)
        if ids is None or weights is None:
            ids, weights = np.arange(len(scores)), self._warp.weights(scores, peak)
        named = ids if names is None else names[ids]
        return self._race(scores, ids, weights, named, peak, temperature, self._key, position, best, values)

    def _processed(self, logits: Floats, context: Sequence[int], path: Sequence[int]) -> Floats:
        scores = logits
        if self._adjustments or self.processors:
            scores = self._changed(logits, [*context, *path])
        return scores if self._masks is None else self._masks.row(scores, context, path)

    def _changed(self, logits: Floats, said: Sequence[int]) -> Floats:
        scores = self._adjustments.row(logits, said) if self._adjustments else np.array(logits, np.float32)
        for processor in self.processors:
            scores = checked_row(processor, processor(scores, said), len(scores))
        return scores


def _peak(scores: Floats) -> float:
    return _finite(scores.max(initial=-np.inf))


def _finite(peak: float) -> float:
    """The largest logit as it is: NaN where there is any."""
    if not math.isfinite(peak):
        raise UsageError("no token can be chosen: the logits hold NaN or infinity, or every token is forbidden")
    return float(peak)


def _likeliest(scores: Floats) -> int:
    best = int(scores.argmax())
    _finite(scores[best])
    return best
