"""What a round costs on this machine, learnt from the rounds themselves."""

from __future__ import annotations

from collections import deque

import numpy as np
from numpy.typing import NDArray

from ondevice.decoding.record import Round

Seconds = NDArray[np.float64]

WINDOW = 9
"""Rounds remembered per row count. Their median shrugs off up to four slow ones and follows a growing context."""

PRIOR_SLOPE = 0.1
"""What one more row adds to a forward, as a share of a single row's, until it was measured."""

PRIOR_SLOPE_WEIGHT = 4.0
"""Squared rows that the prior slope is worth in the least-squares fit."""

PRIOR_DRAFT = 0.05
"""What a drafted token costs, as a share of a single row's forward, until it was measured."""


class Costs:
    """Seconds of a target forward by its number of rows, and of a drafted token by its drafter.

    A row count's cost is the median of its recent rounds, blended with a straight line through the single row's cost
    whose slope is fitted to all that was measured; the line alone stands in for counts never run. The first round of a
    row count is left out: it pays for allocation and for compiling.
    """

    def __init__(self) -> None:
        self._forwards: dict[int, deque[float]] = {}
        self._drafts: dict[str, deque[float]] = {}

    def observe(self, this: Round) -> None:
        """Learn from a decoding round. A prefill, which has rows that nobody drafted, teaches nothing."""
        if this.rows != this.drafted + 1:
            return
        seconds = this.seconds - this.draft_seconds
        if this.rows in self._forwards:
            self._forwards[this.rows].append(seconds)
        else:
            self._forwards[this.rows] = deque(maxlen=WINDOW)
        if this.drafted:
            recent = self._drafts.setdefault(this.source, deque(maxlen=WINDOW))
            recent.append(this.draft_seconds / this.drafted)

    def measured(self, rows: int) -> bool:
        """Whether forwards of this many rows were timed."""
        return bool(self._forwards.get(rows))

    def forwards(self, most: int) -> Seconds:
        """float64[most]: seconds of a forward of 1, 2, ..., `most` rows; never falling."""
        known = {rows: (len(times), float(np.median(times))) for rows, times in self._forwards.items() if times}
        single = self._single(known)
        extra = np.arange(most, dtype=np.float64)
        costs = single * (1.0 + self._slope(known, single) * extra)
        for rows, (count, median) in known.items():
            if rows <= most:
                costs[rows - 1] = (costs[rows - 1] + count * median) / (1 + count)
        return np.maximum.accumulate(costs)

    def draft(self, source: str) -> float:
        """Seconds per token drafted by `source`."""
        times = self._drafts.get(source)
        return float(np.median(times)) if times else PRIOR_DRAFT * float(self.forwards(1)[0])

    @staticmethod
    def _single(known: dict[int, tuple[int, float]]) -> float:
        """Seconds of a forward of one row; an arbitrary unit while nothing was timed."""
        if not known:
            return 1.0
        rows = min(known)
        return known[rows][1] / (1.0 + PRIOR_SLOPE * (rows - 1))

    @staticmethod
    def _slope(known: dict[int, tuple[int, float]], single: float) -> float:
        """Least squares through the single row's cost, leaning on the prior slope."""
        weight = PRIOR_SLOPE_WEIGHT
        total = PRIOR_SLOPE_WEIGHT * PRIOR_SLOPE
        for rows, (count, median) in known.items():
            weight += count * (rows - 1) ** 2
            total += count * (rows - 1) * (median / single - 1.0)
        return max(total / weight, 0.0)
