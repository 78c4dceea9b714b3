"""Drafts from the text itself: what followed the longest earlier match."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import accumulate
from operator import mul
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ondevice.drafters.acceptance import Calibration
from ondevice.drafters.protocol import Draft, DraftRequest, Forecast
from ondevice.drafters.suffix_automaton import SuffixAutomaton, warm_up
from ondevice.engines.protocol import Outputs, Session

SOURCE = "ngram"

LEAST_SURVIVAL = 0.1
"""A draft ends before a token less likely to survive than this; SuffixDecoding's minimum (arXiv 2411.04975)."""

LEAST_GUESS = 4
"""Tokens guessed in every round, so that the calibration learns from rounds in which somebody else drafts."""


class Guess(NamedTuple):
    """A continuation of the text: tokens int64[n], and how sure the counts are of each, float64[n] in [0, 1].

    asked : how many were asked for
    """

    tokens: NDArray[np.int64]
    raw: NDArray[np.float64]
    asked: int


class NgramDrafter:
    """Follows the likeliest continuation of the longest suffix seen before, in the prompt, in what was generated since,
    and in what was generated in earlier turns.

    It costs microseconds, so it guesses whenever it is asked what it expects, and learns from each guess, drafted or
    not, how far to trust one.

    Chains, no trees: on the reference pair the second-best continuation is right in 0.036 of the rounds with a match at
    temperature 1, and in 0.005 at 0, which pays for no row (`benchmarks/ngram_siblings.py`).

    keep_turns : earlier turns whose generated tokens are kept
    """

    name = SOURCE

    def __init__(self, keep_turns: int = 16) -> None:
        self._turns: deque[list[int]] = deque(maxlen=keep_turns)
        self._prompt: list[int] = []
        self._generated: list[int] = []
        self._pending: list[int] = []
        """Of these, the last ones, which the automaton does not have yet."""
        warm_up()
        self._automaton = SuffixAutomaton()
        self._calibration = Calibration()
        self._guess: Guess | None = None
        self._calibrated: tuple[int, list[float]] | None = None

    def begin(self, prompt_ids: Sequence[int], session: Session) -> None:
        """Start a sequence. One that continues the last, as a chat's next turn does, is only appended to."""
        self._guess = self._calibrated = None
        self._automaton.extend(self._pending)
        self._pending.clear()
        before = self._prompt + self._generated
        if self._generated:
            self._turns.append(self._generated)
        self._prompt, self._generated = list(prompt_ids), []
        if before and self._prompt[: len(before)] == before:
            self._automaton.extend(self._prompt[len(before) :])
            return
        self._automaton = SuffixAutomaton()
        for turn in self._turns:
            self._automaton.extend(turn)
            self._automaton.end_text()
        self._automaton.extend(self._prompt)

    def forget(self) -> None:
        self._turns.clear()
        self._prompt, self._generated = [], []
        self._pending.clear()
        self._automaton = SuffixAutomaton()
        self._guess = self._calibrated = None

    def forecast(self, nodes: int) -> Forecast:
        return Forecast(np.array(list(accumulate(self._confidence(nodes), mul)), np.float32), SOURCE)

    def draft(self, request: DraftRequest) -> Draft:
        confidence = self._confidence(request.nodes)
        count = sum(survival >= request.floor for survival in accumulate(confidence, mul))
        return Draft.chain(self._guessed(request.nodes).tokens[:count].tolist(), confidence[:count], SOURCE)

    def observe(self, emitted: Sequence[int], outputs: Outputs, path: Sequence[int]) -> None:
        if self._guess is not None:
            guess = self._guess
            for token, raw, own in zip(guess.tokens.tolist(), guess.raw.tolist(), emitted, strict=False):
                self._calibration.observe(raw, token == own)
                if token != own:
                    break
            self._guess = self._calibrated = None
        self._generated.extend(emitted)
        self._pending.extend(emitted)

    def _guessed(self, k: int) -> Guess:
        """At least the next `k` tokens, as far as anything matches."""
        if self._pending:  # nobody asked in the rounds before
            self._automaton.extend(self._pending)
            self._pending.clear()
        if self._guess is None or self._guess.asked < k:
            self._guess = Guess(*self._automaton.continuation(max(k, LEAST_GUESS)), max(k, LEAST_GUESS))
        return self._guess

    def _confidence(self, k: int) -> list[float]:
        """Calibrated confidence of up to `k` guessed tokens, up to where a draft should end."""
        guess = self._guessed(k)
        if self._calibrated is None or self._calibrated[0] < k:  # a forecast and its draft ask for the same
            self._calibrated = k, self._calibrate(guess.raw[:k].tolist())
        return self._calibrated[1][:k]

    def _calibrate(self, raws: Sequence[float]) -> list[float]:
        confidence: list[float] = []
        survival = 1.0
        for raw in raws:
            chance = self._calibration.probability(raw)
            survival *= chance
            if survival < LEAST_SURVIVAL:
                break
            confidence.append(chance)
        return confidence
