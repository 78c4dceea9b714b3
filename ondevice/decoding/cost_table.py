"""What work takes by how much of it is done at once: rows of a forward, tokens of a draft."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import accumulate

from ondevice.decoding.recent import STALE, Recent

PRIOR_WEIGHT = 4
"""Units measured beyond the first that the prior slope is worth."""

LONE_LIMIT = 2.0
"""A count's first measurement may pay for allocation: it counts for this many times the expected cost at most."""


class CostTable:
    """Seconds by count, from the rounds that had such a count.

    A count's cost is the median of its recent rounds, blended with a straight line through the cost of one; the line
    alone stands in for counts never met. Its slope is a weighted median too, so that no count measured at a bad moment
    bends it.

    slope : what one more adds, as a share of the cost of one, until it was measured
    """

    def __init__(self, slope: float) -> None:
        self._prior = slope
        self._known: dict[int, Recent] = {}
        self._table: list[float] = []

    def __bool__(self) -> bool:
        return bool(self._known)

    @property
    def most(self) -> int:
        """The largest count met lately; 0 before the first."""
        return max(self._known, default=0)

    def of(self, count: int) -> Recent | None:
        """What is known of this count by itself."""
        return self._known.get(count)

    def observe(self, count: int, seconds: float, this_round: int) -> Recent:
        """Learn from a round; returns what is now known of its count."""
        if (recent := self._known.get(count)) is None:
            recent = self._known[count] = Recent()
        if recent.add(seconds, this_round):
            self._table = []
        return recent

    def costs(self, most: int) -> list[float]:
        """Seconds for 1, 2, ..., `most`, or some more; never falling. In an arbitrary unit before the first round."""
        if len(self._table) < most:
            self._table = self._blended(most)
        return self._table

    def recall(self, known: Mapping[int, float]) -> None:
        """Start from what another process measured."""
        self._known = {count: Recent(seconds) for count, seconds in known.items()}
        self._table = []

    def certain(self) -> dict[int, float]:
        """What another process may start from."""
        return {count: recent.median for count, recent in self._known.items() if recent.certain and recent.median > 0}

    def change(self, factor: float, touched: list[int]) -> None:
        """The machine has changed: all costs have, by a factor.

        touched : `id` of what was measured since, once for each time
        """
        for recent in self._known.values():
            recent.change(factor, newest=touched.count(id(recent)))
        self._table = []

    def drop_recalled(self) -> None:
        self._known = {count: recent for count, recent in self._known.items() if recent.drop_recalled()}
        self._table = []

    def drop_stale(self, this_round: int) -> None:
        for count in [count for count, recent in self._known.items() if this_round - recent.round >= STALE]:
            del self._known[count]
            self._table = []

    def _blended(self, most: int) -> list[float]:
        one = self._one()
        slope = self._slope(one)
        costs = [one * (1.0 + slope * extra) for extra in range(most)]
        for count, recent in self._known.items():
            if count <= most:
                line, weight = costs[count - 1], recent.weight
                seconds = recent.median if weight > 1 else min(recent.median, LONE_LIMIT * line)
                costs[count - 1] = (line + weight * seconds) / (1 + weight)
        return list(accumulate(costs, max))

    def _one(self) -> float:
        if not self._known:
            return 1.0
        least = min(self._known)
        return self._known[least].median / (1.0 + self._prior * (least - 1))

    def _slope(self, one: float) -> float:
        """The weighted median of the slopes from the first to each count measured, and of the prior slope."""
        slopes = [(self._prior, PRIOR_WEIGHT)]
        for count, recent in self._known.items():
            if count > 1 and one > 0:
                slopes.append((max(recent.median / one - 1.0, 0.0) / (count - 1), recent.weight * (count - 1)))
        slopes.sort()
        half = sum(weight for _, weight in slopes) / 2
        for slope, weight in slopes:
            half -= weight
            if half <= 0:
                return slope
        return self._prior
