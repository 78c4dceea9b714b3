"""What a round costs on this machine, learnt from the rounds themselves."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Mapping
from itertools import accumulate
from statistics import median_low
from time import time
from typing import Any, NamedTuple, TypeVar

from ondevice.decoding.costs_file import KnownCosts
from ondevice.decoding.record import Round

Key = TypeVar("Key", int, str)

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

SWEEP = 16
"""Rounds between two looks for what is stale."""

RECALLED = 3
"""Measurements that one from another process is worth."""

UNCONFIRMED = 64
"""Rounds after which a recalled cost that was not measured here is forgotten: one that is far too high would see to it
that no such draft is made, and so never be corrected."""

CERTAIN = 4
"""Measurements behind a cost that is written down: a median of fewer may be a neighbour's burst."""

CHANGE = 1.2
"""Times as long, or as short, as was expected: then the machine has changed, and what is new is written down."""

IN_A_ROW = 3
"""Rounds that must all have changed, and by then tell by how much."""


class Costs:
    """Seconds of a target forward by its number of rows, of all sequences in it, and of a drafted token by its drafter.

    Shared by the generations of a model, which may run in several threads.

    A row count's cost is the median of its recent rounds, blended with a straight line through the single row's cost;
    the line alone stands in for row counts never run. Its slope is a weighted median too, so that no row count measured
    at a bad moment bends it.

    When the machine changes, because others want its cores, or no longer, or it is hot, all costs change with it, and
    with them those of row counts that are not run just then: else the one that is run would look dear, or cheap, beside
    the others for as long as their windows hold.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._round = 0
        self._measured_at: float | None = None
        self._kept: KnownCosts | None = None
        self._forwards: dict[int, _Recent] = {}
        self._drafts: dict[str, _Recent] = {}
        self._assumed: dict[str, float] = {}
        self._latest: deque[_Measured] = deque(maxlen=IN_A_ROW)
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
            recent = _entry(self._forwards, forward.rows)
            change = forward.seconds / recent.median if recent.measured > 1 else 1.0
            if recent.add(forward.seconds, self._round):
                self._table = []
            if recent.contradicts:
                self._drop_recalled()
            touched = [recent]
            if this.drafted:
                touched.append(_entry(self._drafts, this.source))
                touched[1].add(this.draft_seconds / this.drafted, self._round)
            self._latest.append(_Measured(change, touched))
            if change > CHANGE or change < 1 / CHANGE:
                self._follow()
            if self._round % SWEEP == 0:
                self._drop_stale()

    def recall(self, known: KnownCosts) -> None:
        """Start from what another process measured.

        All of it goes as soon as the measurements of any row count leave it by CHANGE: the machine is throttled, or
        busy with something else, or the context is longer.
        """
        with self._lock:
            forwards, drafts = _plausible(known)
            self._forwards = {rows: _Recent(seconds) for rows, seconds in forwards.items()}
            self._drafts = {source: _Recent(seconds) for source, seconds in drafts.items()}
            self._measured_at, self._kept, self._table = known.measured_at, known, []

    def news(self) -> KnownCosts | None:
        """What another process should start from; None while that is what was recalled or kept already."""
        with self._lock:
            forwards = {rows: recent.median for rows, recent in self._forwards.items() if recent.certain}
            drafts = {source: recent.median for source, recent in self._drafts.items() if recent.certain}
            if self._measured_at is None or not forwards:
                return None
            known = KnownCosts(self._measured_at, forwards, {name: cost for name, cost in drafts.items() if cost > 0})
        kept = self._kept
        if kept and not _changed(known.forwards, kept.forwards) and not _changed(known.drafts, kept.drafts):
            return None
        return known

    def keep(self, known: KnownCosts) -> None:
        """This is what another process will find."""
        self._kept = known

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
        return 0 if recent is None else recent.weight

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
        if recent is None:
            return self._assumed.get(source, PRIOR_DRAFT) * self.forwards(1)[0]
        return recent.median

    def assume(self, source: str, share: float) -> None:
        """What a token drafted by `source` costs, as a share of a single row's forward, until it was measured."""
        self._assumed[source] = share

    def _follow(self) -> None:
        """Where the latest rounds have all changed, take what was measured before them as changed by as much.

        That is a guess, which goes as something recalled does when measurements contradict it.
        """
        changes = sorted(measured.change for measured in self._latest)
        if len(changes) < IN_A_ROW or not (changes[0] > CHANGE or changes[-1] < 1 / CHANGE):
            return
        factor = changes[len(changes) // 2]
        touched = [id(recent) for measured in self._latest for recent in measured.touched]
        for recent in (*self._forwards.values(), *self._drafts.values()):
            recent.change(factor, newest=touched.count(id(recent)))
        self._latest.clear()
        self._table = []

    def _drop_stale(self) -> None:
        for rows in [rows for rows, recent in self._forwards.items() if self._round - recent.round >= STALE]:
            del self._forwards[rows]
            self._table = []

    def _drop_recalled(self) -> None:
        self._forwards = {rows: recent for rows, recent in self._forwards.items() if recent.drop_recalled()}
        self._drafts = {source: recent for source, recent in self._drafts.items() if recent.drop_recalled()}
        self._table = []

    def _blended(self, most: int) -> list[float]:
        single = _single(self._forwards)
        slope = _slope(self._forwards, single)
        costs = [single * (1.0 + slope * extra) for extra in range(most)]
        for rows, recent in self._forwards.items():
            if rows <= most:
                line, count = costs[rows - 1], recent.weight
                seconds = recent.median if count > 1 else min(recent.median, LONE_LIMIT * line)
                costs[rows - 1] = (line + count * seconds) / (1 + count)
        return list(accumulate(costs, max))


class _Measured(NamedTuple):
    """A round: how many times as long as expected its forward took, and what it was a measurement of."""

    change: float
    touched: list[_Recent]


class _Recent:
    """The last few measurements of one thing, the first of which may be recalled, and the round of the latest."""

    def __init__(self, recalled: float | None = None) -> None:
        self.round = 0 if recalled is None else UNCONFIRMED - STALE
        self.median = recalled or 0.0
        self._recalled = recalled
        self._seconds: deque[float] = deque([] if recalled is None else [recalled], maxlen=WINDOW)

    @property
    def measured(self) -> int:
        """How many measurements this has of its own."""
        return len(self._seconds) - (self._recalled is not None)

    @property
    def certain(self) -> bool:
        """Whether another process may go by it."""
        return self._recalled is not None or len(self._seconds) >= CERTAIN

    @property
    def contradicts(self) -> bool:
        """Whether what was measured since is something else than what was recalled."""
        return self._recalled is not None and _far(self.median, self._recalled)

    @property
    def weight(self) -> int:
        """How many measurements this stands for."""
        return len(self._seconds) + (0 if self._recalled is None else RECALLED - 1)

    def add(self, seconds: float, this_round: int) -> bool:
        """Whether this changed anything."""
        before = len(self._seconds), self.median
        self.round = this_round
        self._seconds.append(seconds)
        if len(self._seconds) == WINDOW:
            self._recalled = None
        # The lower one of two: what disturbs a measurement makes it longer.
        self.median = median_low(self._seconds)
        return (len(self._seconds), self.median) != before

    def change(self, factor: float, newest: int) -> None:
        """Keep the newest measurements; where there are none, recall what is known, times a factor."""
        if not newest:
            self._recalled = self.median * factor
            self._seconds.clear()
            self._seconds.append(self._recalled)
        elif newest < len(self._seconds):
            self._recalled = None
            kept = list(self._seconds)[-newest:]
            self._seconds.clear()
            self._seconds.extend(kept)
        self.median = median_low(self._seconds)

    def drop_recalled(self) -> bool:
        """Forget what was recalled; whether anything is left."""
        if self._recalled is not None:
            if self._recalled in self._seconds:
                self._seconds.remove(self._recalled)
            self._recalled = None
            self.median = median_low(self._seconds) if self._seconds else 0.0
        return bool(self._seconds)


def _entry(known: dict[Key, _Recent], key: Key) -> _Recent:
    """The one of that key, a new one where there is none."""
    if (recent := known.get(key)) is None:
        recent = known[key] = _Recent()
    return recent


def _plausible(known: KnownCosts) -> tuple[dict[int, float], dict[str, float]]:
    """Forwards and drafts that take no more than LONE_LIMIT times what is expected where nothing is known: what a busy
    machine made dear may not keep drafts from being tried on an idle one.
    """
    least = min(known.forwards)
    single = known.forwards[least] / (1.0 + PRIOR_SLOPE * (least - 1))
    return (
        {
            rows: seconds
            for rows, seconds in known.forwards.items()
            if seconds <= LONE_LIMIT * single * (1.0 + PRIOR_SLOPE * (rows - 1))
        },
        {source: seconds for source, seconds in known.drafts.items() if seconds <= LONE_LIMIT * PRIOR_DRAFT * single},
    )


def _far(seconds: float, other: float) -> bool:
    return not 1.0 / CHANGE <= seconds / other <= CHANGE


def _changed(now: Mapping[Any, float], before: Mapping[Any, float]) -> bool:
    """Whether something was measured that was not before, or is far from it."""
    return now.keys() != before.keys() or any(_far(seconds, before[name]) for name, seconds in now.items())


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
            slopes.append((max(recent.median / single - 1.0, 0.0) / (rows - 1), recent.weight * (rows - 1)))
    slopes.sort()
    half = sum(weight for _, weight in slopes) / 2
    for slope, weight in slopes:
        half -= weight
        if half <= 0:
            return slope
    return PRIOR_SLOPE
