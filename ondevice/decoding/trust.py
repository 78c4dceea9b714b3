"""How far a drafter's forecasts come true."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from ondevice.drafters.acceptance import Tally

KEEP = 0.97
"""Weight of the earlier rounds after a new one; remembers about 30."""

REST = 0.995
"""Weight of what a drafter failed to bring, after a round in which it was not asked."""

START = 3.0
"""Accepted tokens, all as forecast, that a drafter starts with."""

FAR_BELOW = 0.25
"""Share of its forecast that a drafter which has drifted is supposed to reach."""

ALARM = 5.3
"""Log of how much likelier drift must make the last rounds. A drafter that promised half or more and is never right now
is dropped after 10 rounds; one that keeps its word, once in 200 rounds at most."""


class Trust:
    """A second opinion on one drafter, from what its drafts came to.

    Drafters learn their acceptance themselves, so mostly this changes nothing; it is what keeps one that boasts, or
    that has not yet noticed how the text changed, from costing more than it brings.

    The share of its forecasts that came true over some 30 rounds is too slow for a text that changes from one line to
    the next. So first tokens are also summed up as evidence for drift, never below 0 (CUSUM, Page 1954); at the alarm
    earlier merits are forgotten.
    """

    def __init__(self) -> None:
        self._expected = START
        self._accepted = START
        self._empty = Tally(weight=START)
        self._first = Tally(START, START)
        self._first_expected = START
        self._evidence = 0.0
        self.drifted = False
        """Whether the drafter was dropped, and has not come back to half its forecast since."""

    @property
    def empty(self) -> float:
        """The chance that the drafter, asked for tokens, finds none worth proposing."""
        return self._empty.rate()

    @property
    def share(self) -> float:
        """Of what was promised lately, what came true: forecasts are scaled down by it."""
        return min(self._accepted / self._expected, 1.0)

    def observe(self, survival: NDArray[np.float32], drafted: int, accepted: int) -> None:
        """A round of a forecast, the number of tokens then drafted and of those the target took."""
        self._empty.fade(KEEP)
        self._empty.add(drafted == 0)
        if not drafted:
            return
        promised = survival.tolist()[:drafted]  # a handful of numbers, in every round: arrays would take longer
        kept = min(self._first.hits / self._first_expected, 1.0)
        self._evidence = max(self._evidence + _evidence(kept * promised[0], accepted > 0), 0.0)
        self._first.fade(KEEP)
        self._first.add(accepted > 0)
        self._first_expected = KEEP * self._first_expected + promised[0]
        self._expected = KEEP * self._expected + sum(promised)
        self._accepted = KEEP * self._accepted + accepted
        if self._evidence > ALARM:
            # Not to nothing: one that is still right once in four may pay, and one that never is comes here again.
            self._accepted, self._expected = START * FAR_BELOW * self.share, START
            self._evidence, self.drifted = 0.0, True
            self._first, self._first_expected = Tally(START, START), START
        elif self.drifted:
            self.drifted = self._accepted < self._expected / 2

    def rest(self) -> None:
        """A round in which the drafter was not asked: what it was blamed for is a little longer ago."""
        self._accepted += (1.0 - REST) * max(self._expected - self._accepted, 0.0)


def _evidence(forecast: float, taken: bool) -> float:
    """How much likelier this outcome of a first token is after drift, as a logarithm."""
    forecast = min(max(forecast, 0.05), 0.95)
    drifted = FAR_BELOW * forecast
    return math.log(drifted / forecast) if taken else math.log((1.0 - drifted) / (1.0 - forecast))
