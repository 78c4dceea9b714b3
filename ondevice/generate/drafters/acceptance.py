"""Learning what the target accepts while it generates; recent text counts most.

`PositionAcceptance` learns by position in the draft, `Calibration` by the drafter's own confidence: drafters make their
forecasts from these. `Tally` counts for both.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from operator import mul

import numpy as np

from ondevice.arrays import Float32Array

HOPELESS = 0.02
"""Survival below which a token of a tree is not forecast, as hardly any machine has rows that cost so little of a
forward: planning takes time in every round, for each token."""

LEAN = 3.0
"""Events that the rate of the position before is worth, as a prior."""

KEEP = 0.96
"""Weight of a position's earlier events after a new draft; remembers about 25."""


class PositionAcceptance:
    """The probability that the target accepts the token at a position of a draft, given that it accepted those before.

    A position that is seldom reached takes over the rate of the position before it, as a prior worth LEAN events. The
    prior of the first position is `start`, and it gains weight while nothing is drafted, so that a drafter that was
    poor long ago is tried again. How often that may fail is the controller's concern.

    start : probability before anything was seen, worth LEAN events
    idle : weight of all events after a token that came without a draft
    sure : events that `start` is worth besides, which do not fade: for one that was measured on other texts
    """

    def __init__(self, start: float = 0.7, *, idle: float = 0.98, sure: float = 0.0) -> None:
        self._start, self._idle, self._sure = start, idle, sure
        self._tallies = [Tally(LEAN * start, LEAN)]
        self._undrafted = 0
        """Tokens since the last draft that the tallies have not faded for yet."""

    def observe(self, drafted: int, accepted: int) -> None:
        """Learn from a verified chain of `drafted` >= 1 tokens, of which the first `accepted` were accepted."""
        self._catch_up()
        reached = min(drafted, accepted + 1)
        self._tallies += [Tally() for _ in range(reached - len(self._tallies))]
        for position, tally in enumerate(self._tallies):
            # Positions not reached fade too, or a run of rejections would keep a position from ever being tried again.
            tally.fade(KEEP)
            if position < reached:
                tally.add(position < accepted)

    def learn(self, drafted: int, accepted: int, emitted: int) -> None:
        """Learn from a round of `emitted` tokens, with a chain (see `observe`) or, if `drafted` is 0, without."""
        if drafted:
            self.observe(drafted, accepted)
        else:
            self.pass_by(emitted)

    def pass_by(self, tokens: int) -> None:
        """Count tokens that came without a draft."""
        self._undrafted += tokens  # applied when the rates are next needed

    def conditional(self, k: int) -> Float32Array:
        """float32[k]: the probability at each position, given that those before it were accepted."""
        return np.array(self._rates(k), np.float32)

    def survival(self, k: int) -> Float32Array:
        """float32[k]: the probability that the target accepts the first i tokens, i = 1..k; never rising."""
        return np.array(list(accumulate(self._rates(k), mul)), np.float32)

    def survival_with_siblings(self, nodes: int, second: float) -> tuple[Float32Array, list[int]]:
        """float32[<=nodes]: survival of a tree's likeliest nodes, best first; and the depth of the first 1, 2, ...
        nodes. The tree is the chain of first children and, next to each of them, a second child, which the target
        accepts at the rate `second` given its parent. Nodes after the first whose survival is below HOPELESS are left
        out.
        """
        best: list[float] = []
        depths: list[int] = []
        # Merges two falling lists, in every round: sorting them, or heapq, takes twice as long.
        firsts: list[float] = self.survival(nodes).tolist()
        first, parent, sibling = 0, 0, second
        while len(best) < nodes and (not best or max(firsts[first], sibling) >= HOPELESS):
            if firsts[first] >= sibling:
                best.append(firsts[first])
                first += 1
            else:
                best.append(sibling)
                sibling = second * firsts[parent]
                parent += 1
            depths.append(max(first, 1))
        return np.array(best, np.float32), depths

    def _rates(self, k: int) -> list[float]:
        """The conditional probabilities. No arrays: the loop needs a few numbers in every round."""
        self._catch_up()
        rates: list[float] = []
        rate, lean = self._start, self._sure
        for tally in self._tallies[:k]:
            rate = (tally.hits + lean * rate) / (tally.weight + lean)
            rates.append(rate)
            lean = LEAN
        return rates + [rate] * (k - len(rates))

    def _catch_up(self) -> None:
        """Fade the tallies for the tokens since the last draft."""
        if not self._undrafted:
            return
        keep = self._idle**self._undrafted
        self._undrafted = 0
        for tally in self._tallies:
            tally.fade(keep)
        renewed = LEAN * (1.0 - keep)
        self._tallies[0].hits += renewed * self._start
        self._tallies[0].weight += renewed


KNOTS = 17
"""Knots of a calibration."""

KNOT_KEEP = 0.98
"""Weight of a knot's earlier events after a new one; remembers about 50."""

KNOT_PRIOR = 4.0
"""Events that the identity is worth at first, per knot."""


class Calibration:
    """Maps a drafter's raw confidence in [0, 1] to the probability that the target accepts the token.

    Piecewise linear between evenly spaced knots. It starts as the identity, worth a few events per knot; each event
    moves the two knots next to its raw value.
    """

    def __init__(self) -> None:
        self._weights = [KNOT_PRIOR] * KNOTS
        self._hits = [KNOT_PRIOR * knot / (KNOTS - 1) for knot in range(KNOTS)]

    def probability(self, raw: float) -> float:
        """The calibrated probability for a raw confidence."""
        low, beyond = self._locate(raw)
        rate = self._hits[low] / self._weights[low]
        return rate + beyond * (self._hits[low + 1] / self._weights[low + 1] - rate)

    def observe(self, raw: float, taken: bool) -> None:
        """Learn whether the target accepted a token of this raw confidence, having accepted all before it."""
        low, beyond = self._locate(raw)
        for knot, share in ((low, 1.0 - beyond), (low + 1, beyond)):
            kept = KNOT_KEEP**share
            self._weights[knot] = kept * self._weights[knot] + share
            self._hits[knot] = kept * self._hits[knot] + share * taken

    def _locate(self, raw: float) -> tuple[int, float]:
        """The knot below `raw`, and the distance to it in steps between knots."""
        place = min(max(raw, 0.0), 1.0) * (KNOTS - 1)
        low = min(int(place), KNOTS - 2)
        return low, place - low


@dataclass
class Tally:
    """A success rate whose earlier events fade."""

    hits: float = 0.0
    weight: float = 0.0

    def fade(self, keep: float) -> None:
        """Multiply the weight of all events so far by `keep`."""
        self.hits *= keep
        self.weight *= keep

    def add(self, hit: bool, keep: float = 1.0) -> None:
        """Count one event, after which earlier ones have `keep` of their weight."""
        self.hits = keep * self.hits + hit
        self.weight = keep * self.weight + 1.0

    def rate(self) -> float:
        """The share of hits; a prior is one that the tally began with."""
        return self.hits / self.weight
