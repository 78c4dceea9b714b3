"""What a round costs on this machine, learnt from the rounds themselves."""

from __future__ import annotations

import threading
from collections import deque
from itertools import accumulate
from statistics import median_low
from time import time

from ondevice.decoding.record import Round

WINDOW = 9
"""Rounds remembered per row count. Their median shrugs off up to four slow ones and follows a growing context."""

STALE = 512
"""Rounds after which a row count that was not run is forgotten: the machine may have been busy at the time."""

PRIOR_SLOPE = 0.1
"""What one more row adds to a forward, as a share of a single row's, until it was measured."""

PRIOR_SLOPE_WEIGHT = 4
"""Extra rows measured that the prior slope is worth."""

LONE_LIMIT = 2.0
"""A row count's first measurement may pay for allocation: it counts for this many times the expected cost at most."""

PRIOR_DRAFT = 0.05
"""What a drafted token costs, as a share of a single row's forward, until it was measured."""


class Costs:
    """Seconds of a target forward by its number of rows, of all sequences in it, and of a drafted token by its drafter.

    Shared by the generations of a model, which may run in several threads.

    A row count's cost is the median of its recent rounds, blended with a straight line through the single row's cost;
    the line alone stands in for row counts never run. Its slope is a weighted median too, so that no row count measured
    at a bad moment bends it.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._round = 0
        self._measured_at: float | None = None
        self._forwards: dict[int, _Recent] = {}
        self._drafts: dict[str, _Recent] = {}
        self._table: list[float] = []

    def observe(self, this: Round) -> None:
        """Learn from a decoding round.

        A forward in which a sequence was prefilling has rows that nobody wanted, and teaches nothing; nor does one too
        short for the clock.
        """
        forward = this.forward
        if forward is None or forward.rows != forward.wanted or forward.seconds <= 0:
            return
        with self._lock:
            self._round += 1
            self._measured_at = time()
            recent = self._forwards.setdefault(forward.rows, _Recent())
            if recent.add(forward.seconds, self._round):
                self._table = []
            if this.drafted:
                recent = self._drafts.setdefault(this.source, _Recent())
                recent.add(this.draft_seconds / this.drafted, self._round)
            for rows in [rows for rows, recent in self._forwards.items() if self._round - recent.round > STALE]:
                del self._forwards[rows]
                self._table = []

    @property
    def age_s(self) -> float | None:
        """Seconds since the last measurement; None before the first."""
        return None if self._measured_at is None else max(time() - self._measured_at, 0.0)

    @property
    def most_rows(self) -> int:
        """The largest recent forward; 0 before the first."""
        with self._lock:
            return max(self._forwards, default=0)

    def measurements(self, rows: int) -> int:
        """How many recent forwards of this many rows were timed."""
        recent = self._forwards.get(rows)
        return 0 if recent is None else len(recent)

    def forwards(self, most: int, beside: int = 0) -> list[float]:
        """Seconds of a forward of 1, 2, ..., `most` rows beside those of other sequences; never falling."""
        most += beside
        with self._lock:
            if len(self._table) < most:
                self._table = self._blended(most)
            return self._table[beside:most]

    def draft(self, source: str) -> float:
        """Seconds per token drafted by `source`."""
        recent = self._drafts.get(source)
        return PRIOR_DRAFT * self.forwards(1)[0] if recent is None else recent.median

    def price(self, source: str) -> float:
        """Seconds per token drafted by `source`, as a share of a forward of one row."""
        return self.draft(source) / self.forwards(1)[0]

    def _blended(self, most: int) -> list[float]:
        single = _single(self._forwards)
        slope = _slope(self._forwards, single)
        costs = [single * (1.0 + slope * extra) for extra in range(most)]
        for rows, recent in self._forwards.items():
            if rows <= most:
                line, count = costs[rows - 1], len(recent)
                seconds = recent.median if count > 1 else min(recent.median, LONE_LIMIT * line)
                costs[rows - 1] = (line + count * seconds) / (1 + count)
        return list(accumulate(costs, max))


class _Recent:
    """The last few measurements of one thing, and the round of the latest."""

    def __init__(self) -> None:
        self.round = 0
        self.median = 0.0
        self._seconds: deque[float] = deque(maxlen=WINDOW)

    def __len__(self) -> int:
        return len(self._seconds)

    def add(self, seconds: float, this_round: int) -> bool:
        """Whether this changed anything."""
        before = len(self), self.median
        self.round = this_round
        self._seconds.append(seconds)
        # The lower one of two: what disturbs a measurement makes it longer.
        self.median = median_low(self._seconds)
        return (len(self), self.median) != before


def _single(known: dict[int, _Recent]) -> float:
    """Seconds of a forward of one row; an arbitrary unit while nothing was timed."""
    if not known:
        return 1.0
    rows = min(known)
    return known[rows].median / (1.0 + PRIOR_SLOPE * (rows - 1))


def _slope(known: dict[int, _Recent], single: float) -> float:
    """The weighted median of the slopes from the single row to each row count measured, and of the prior slope."""
    slopes = [(PRIOR_SLOPE, PRIOR_SLOPE_WEIGHT)]
    for rows, recent in known.items():
        if rows > 1:
            slopes.append((max(recent.median / single - 1.0, 0.0) / (rows - 1), len(recent) * (rows - 1)))
    slopes.sort()
    half = sum(weight for _, weight in slopes) / 2
    for slope, weight in slopes:
        half -= weight
        if half <= 0:
            return slope
    return PRIOR_SLOPE
