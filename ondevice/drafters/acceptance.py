"""What the target takes, learnt while it does: by confidence and by position in the draft. Recent text counts most."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]


@dataclass
class Tally:
    """A rate of successes that forgets: each new event shrinks the weight of all earlier ones by `keep`."""

    keep: float
    hits: float = 0.0
    weight: float = 0.0

    def add(self, hit: bool) -> None:
        self.hits = self.keep * self.hits + hit
        self.weight = self.keep * self.weight + 1.0

    def rate(self, prior: float, prior_weight: float) -> float:
        """The rate, with a prior that is worth `prior_weight` events."""
        return (self.hits + prior_weight * prior) / (self.weight + prior_weight)


class Calibration:
    """From a raw confidence in [0, 1] to the chance that the target takes the token.

    Bins of equal width over the raw value; each starts by trusting it and moves to what was seen.

    bins : how finely raw values are told apart
    keep : weight of a bin's earlier events after a new one; 0.98 remembers about 50
    prior_weight : events that the raw value itself is worth
    """

    def __init__(self, bins: int = 16, keep: float = 0.98, prior_weight: float = 4.0) -> None:
        self._tallies = [Tally(keep) for _ in range(bins)]
        self._prior_weight = prior_weight

    def probability(self, raw: float) -> float:
        return self._tally(raw).rate(raw, self._prior_weight)

    def observe(self, raw: float, taken: bool) -> None:
        """The target took, or refused, a token of this raw confidence, having taken all before it."""
        self._tally(raw).add(taken)

    def _tally(self, raw: float) -> Tally:
        return self._tallies[min(int(raw * len(self._tallies)), len(self._tallies) - 1)]


@dataclass
class PositionAcceptance:
    """The chance that the target takes the token at a position of the draft, given that it took those before.

    A position that was seldom reached leans on the one before it.

    prior : the chance at the first position before anything was seen
    prior_weight : events that the prior, or the position before, is worth
    keep : weight of a position's earlier events after a new one; 0.96 remembers about 25
    """

    prior: float = 0.7
    prior_weight: float = 2.0
    keep: float = 0.96
    _tallies: list[Tally] = field(default_factory=list, init=False, repr=False)

    def observe(self, drafted: int, accepted: int) -> None:
        """A verified chain of `drafted` tokens of which the first `accepted` were taken."""
        reached = min(drafted, accepted + 1)
        self._tallies += [Tally(self.keep) for _ in range(reached - len(self._tallies))]
        for position in range(reached):
            self._tallies[position].add(position < accepted)

    def conditional(self, k: int) -> Floats:
        """float32[k]: the chance at each position, given that those before it were taken."""
        rates = np.empty(k, np.float32)
        rate = self.prior
        for position in range(k):
            if position < len(self._tallies):
                rate = self._tallies[position].rate(rate, self.prior_weight)
            rates[position] = rate
        return rates

    def survival(self, k: int) -> Floats:
        """float32[k]: the chance that the target takes the first i tokens, i = 1..k; never rising."""
        return np.cumprod(self.conditional(k), dtype=np.float32)
