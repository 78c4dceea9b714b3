"""What the target takes, learnt while it does: by confidence and by position in the draft. Recent text counts most."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]


@dataclass
class Tally:
    """A rate of successes that can forget."""

    hits: float = 0.0
    weight: float = 0.0

    def fade(self, keep: float) -> None:
        self.hits *= keep
        self.weight *= keep

    def add(self, hit: bool) -> None:
        self.hits += hit
        self.weight += 1.0

    def rate(self, prior: float = 0.0, prior_weight: float = 0.0) -> float:
        """The share of hits, with a prior that is worth `prior_weight` events."""
        return (self.hits + prior_weight * prior) / (self.weight + prior_weight)


class Calibration:
    """From a raw confidence in [0, 1] to the chance that the target takes the token.

    A line through evenly spaced knots. It starts as the identity, which is worth a few events per knot; each event then
    moves the two knots next to its raw value.

    knots : how finely raw values are told apart
    keep : weight of a knot's earlier events after a new one; 0.98 remembers about 50
    start_weight : events that trusting the raw value is worth at first
    """

    def __init__(self, knots: int = 17, keep: float = 0.98, start_weight: float = 4.0) -> None:
        self._keep = keep
        self._knots = np.linspace(0.0, 1.0, knots)
        self._weights = np.full(knots, start_weight)
        self._hits = start_weight * self._knots

    def probability(self, raw: float) -> float:
        return float(self.probabilities(np.array(raw)))

    def probabilities(self, raw: NDArray[np.float64]) -> NDArray[np.float64]:
        """The chances of several raw confidences."""
        chances: NDArray[np.float64] = np.interp(raw, self._knots, self._hits / self._weights)
        return chances

    def observe(self, raw: float, taken: bool) -> None:
        """The target took, or refused, a token of this raw confidence, having taken all before it."""
        place = min(max(raw, 0.0), 1.0) * (len(self._knots) - 1)
        low = min(int(place), len(self._knots) - 2)
        for knot, share in ((low, low + 1 - place), (low + 1, place - low)):
            kept = self._keep**share
            self._weights[knot] = kept * self._weights[knot] + share
            self._hits[knot] = kept * self._hits[knot] + share * taken


class PositionAcceptance:
    """The chance that the target takes the token at a position of the draft, given that it took those before.

    A position that is seldom reached leans on the one before it; the first leans on `start`, the more the longer
    nothing was drafted: a drafter that was poor long ago deserves another chance.

    start : the chance before anything was seen, worth `lean` events
    lean : events that the position before is worth
    keep : weight of a position's earlier events after a new draft; 0.96 remembers about 25
    idle : weight of all events after a round without a draft
    """

    def __init__(self, start: float = 0.7, lean: float = 3.0, keep: float = 0.96, idle: float = 0.98) -> None:
        self._start = start
        self._lean = lean
        self._keep = keep
        self._idle = idle
        self._tallies = [Tally(lean * start, lean)]

    def observe(self, drafted: int, accepted: int) -> None:
        """A verified chain of `drafted` tokens, 0 in an idle round, of which the first `accepted` were taken."""
        reached = min(drafted, accepted + 1)
        self._tallies += [Tally() for _ in range(reached - len(self._tallies))]
        for position, tally in enumerate(self._tallies):
            # Positions not reached fade too, or a run of bad luck would keep one from ever being tried again.
            tally.fade(self._keep if drafted else self._idle)
            if position < reached:
                tally.add(position < accepted)
        if not drafted:
            renewed = self._lean * (1.0 - self._idle)
            self._tallies[0].hits += renewed * self._start
            self._tallies[0].weight += renewed

    def conditional(self, k: int) -> Floats:
        """float32[k]: the chance at each position, given that those before it were taken."""
        rates = np.empty(k, np.float32)
        rate = self._tallies[0].rate()
        for position in range(k):
            if 0 < position < len(self._tallies):
                rate = self._tallies[position].rate(rate, self._lean)
            rates[position] = rate
        return rates

    def survival(self, k: int) -> Floats:
        """float32[k]: the chance that the target takes the first i tokens, i = 1..k; never rising."""
        return np.cumprod(self.conditional(k), dtype=np.float32)
