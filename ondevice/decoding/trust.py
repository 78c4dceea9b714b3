"""How far a drafter's forecasts come true."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ondevice.drafters.acceptance import Tally

KEEP = 0.97
"""Weight of the earlier rounds after a new one; remembers about 30."""

START = 3.0
"""Accepted tokens, all as forecast, that a drafter starts with."""


class Trust:
    """A second opinion on one drafter, from what its drafts came to.

    Drafters learn their acceptance themselves, so mostly this changes nothing; it is what keeps one that boasts, or
    that has not yet noticed how the text changed, from costing more than it brings.
    """

    def __init__(self) -> None:
        self._expected = START
        self._accepted = START
        self._empty = Tally(weight=START)

    @property
    def empty(self) -> float:
        """The chance that the drafter, asked for tokens, finds none worth proposing."""
        return self._empty.rate()

    def discount(self, survival: NDArray[np.float32]) -> list[float]:
        """A forecast's survival, scaled down by the share of earlier forecasts that came true."""
        share = min(self._accepted / self._expected, 1.0)
        return [share * chance for chance in survival.tolist()]

    def observe(self, survival: NDArray[np.float32], drafted: int, accepted: int) -> None:
        """A round of a forecast, the number of tokens then drafted and of those the target took."""
        self._empty.fade(KEEP)
        self._empty.add(drafted == 0)
        if drafted:
            self._expected = KEEP * self._expected + float(survival[:drafted].sum())
            self._accepted = KEEP * self._accepted + accepted
