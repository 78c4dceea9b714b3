"""What the target takes, learnt while it does: by confidence and by position in the draft. Recent text counts most."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from operator import mul

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
        self._weights = [start_weight] * knots
        self._hits = [start_weight * knot / (knots - 1) for knot in range(knots)]

    def probability(self, raw: float) -> float:
        low, beyond = self._place(raw)
        rate = self._hits[low] / self._weights[low]
        return rate + beyond * (self._hits[low + 1] / self._weights[low + 1] - rate)

    def observe(self, raw: float, taken: bool) -> None:
        """The target took, or refused, a token of this raw confidence, having taken all before it."""
        low, beyond = self._place(raw)
        for knot, share in ((low, 1.0 - beyond), (low + 1, beyond)):
            kept = self._keep**share
            self._weights[knot] = kept * self._weights[knot] + share
            self._hits[knot] = kept * self._hits[knot] + share * taken

    def _place(self, raw: float) -> tuple[int, float]:
        """The knot below, and how far beyond it, in steps between knots."""
        place = min(max(raw, 0.0), 1.0) * (len(self._weights) - 1)
        low = min(int(place), len(self._weights) - 2)
        return low, place - low


class PositionAcceptance:
    """The chance that the target takes the token at a position of the draft, given that it took those before.

    A position that is seldom reached leans on the one before it; the first leans on `start`, the more the longer
    nothing was drafted: a drafter that was poor long ago deserves another chance. Where its first token then turns out
    as remembered, what was known before the pause counts again: else a drafter that is never right, forgotten until it
    just seems to pay and hardly remembered after one more failure, drafts in every seventh round.

    start : the chance before anything was seen, worth `lean` events
    lean : events that the position before is worth
    keep : weight of a position's earlier events after a new draft; 0.96 remembers about 25
    idle : weight of all events after a token that came without a draft
    """

    def __init__(self, start: float = 0.7, lean: float = 3.0, keep: float = 0.96, idle: float = 0.98) -> None:
        self._start = start
        self._lean = lean
        self._keep = keep
        self._idle = idle
        self._tallies = [Tally(lean * start, lean)]
        self._before_pause: list[Tally] = []
        """The tallies at the last draft, where they have faded since."""
        self._passed_by = 0

    def observe(self, drafted: int, accepted: int) -> None:
        """A verified chain of `drafted` tokens, at least one, of which the first `accepted` were taken."""
        self._make_up()
        if self._before_pause:
            if (accepted > 0) == (self._before_pause[0].rate() > 0.5):
                self._tallies = self._before_pause
            self._before_pause = []
        reached = min(drafted, accepted + 1)
        self._tallies += [Tally() for _ in range(reached - len(self._tallies))]
        for position, tally in enumerate(self._tallies):
            # Positions not reached fade too, or a run of bad luck would keep one from ever being tried again.
            tally.fade(self._keep)
            if position < reached:
                tally.add(position < accepted)

    def observe_places(self, right: Sequence[bool]) -> None:
        """A draft of which it is known, place by place, whether the first guess was right."""
        self.observe(len(right), right.index(False) if False in right else len(right))

    def learn(self, drafted: int, accepted: int, emitted: int) -> None:
        """A round that emitted so many tokens, with such a chain or, where `drafted` is 0, without one."""
        if drafted:
            self.observe(drafted, accepted)
        else:
            self.pass_by(emitted)

    def pass_by(self, tokens: int) -> None:
        """So many tokens came without a draft."""
        self._passed_by += tokens  # made up for when somebody wants to know

    def _make_up(self) -> None:
        """Fade for the tokens since the last draft."""
        if not self._passed_by:
            return
        self._before_pause = self._before_pause or [replace(tally) for tally in self._tallies]
        keep = self._idle**self._passed_by
        self._passed_by = 0
        for tally in self._tallies:
            tally.fade(keep)
        renewed = self._lean * (1.0 - keep)
        self._tallies[0].hits += renewed * self._start
        self._tallies[0].weight += renewed

    def conditional(self, k: int) -> Floats:
        """float32[k]: the chance at each position, given that those before it were taken."""
        return np.array(self._rates(k), np.float32)

    def survival(self, k: int) -> Floats:
        """float32[k]: the chance that the target takes the first i tokens, i = 1..k; never rising."""
        return np.array(list(accumulate(self._rates(k), mul)), np.float32)

    def survival_with_siblings(self, nodes: int, second: float) -> Floats:
        """float32[nodes]: of a tree's likeliest nodes, best first: first children, and beside each a second one, which
        the target takes at the rate `second` where it took their parent.
        """
        best: list[float] = []
        # Two falling lists merged by hand, in every round: sorting them, or heapq, takes twice as long.
        firsts: list[float] = self.survival(nodes).tolist()
        at, beside, sibling = 0, 0, second
        while len(best) < nodes:
            if firsts[at] >= sibling:
                best.append(firsts[at])
                at += 1
            else:
                best.append(sibling)
                sibling = second * firsts[beside]
                beside += 1
        return np.array(best, np.float32)

    def _rates(self, k: int) -> list[float]:
        """The conditional chances. No arrays: the loop asks in every round, for a few numbers."""
        self._make_up()
        rates: list[float] = []
        rate, lean = 0.0, 0.0
        for tally in self._tallies[:k]:
            rate = (tally.hits + lean * rate) / (tally.weight + lean)
            rates.append(rate)
            lean = self._lean
        return rates + [rate] * (k - len(rates))
