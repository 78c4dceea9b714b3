"""The cost model: seconds of a target forward by rows, and of a draft by tokens, on this machine.

`Costs` learns them from the rounds of all generations of a model, and the controller reads them. It is built of one
`CostTable` for forwards and one per drafter, each of `Measurements` by count. For models with experts, `ExpertReads`
separates the cost of rows from the cost of the experts that they happen to choose. `CostsFile` keeps costs on disk, so
that the first generation of a process plans as well as the last one of another.
"""

from __future__ import annotations

import hashlib
import json
import math
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from statistics import median_low
from time import monotonic, time
from typing import Any, NamedTuple

from ondevice.bundle import replace_json
from ondevice.engines.protocol import ExpertShare
from ondevice.generate.stats import Round

PRIOR_ROW = 0.1
"""Cost of one more row in a forward, as a share of a forward of one row, until it was measured."""

PRIOR_DRAFT = 0.05
"""Cost of a drafted token, as a share of a forward of one row, until it was measured."""

PRIOR_TOKEN = 0.5
"""Cost of one more token in a draft, as a share of a draft of one token, until it was measured. A drafter that is asked
for a token now and then has cold weights and sleeping threads: on the reference pair that token takes three times as
long as each of the next ones, and at its price no draft would seem to pay, where those of four tokens pay 1.45x."""

SWEEP = 16
"""Rounds between two searches for stale measurements."""

IN_A_ROW = 3
"""Consecutive rounds whose costs must all have changed before all other costs are taken to have changed as well."""

CHANGE = 1.2
"""Factor from which two times are taken to differ because the machine has changed, and new costs are saved."""


class KnownCosts(NamedTuple):
    """Measured costs, as they are exchanged with a `CostsFile`.

    measured_at : Unix time of the last measurement
    forwards : seconds of a forward by rows
    drafts : by drafter, seconds of a draft by tokens
    """

    measured_at: float
    forwards: dict[int, float]
    drafts: dict[str, dict[int, float]]


class Costs:
    """Seconds of a target forward by its number of rows, those of all sequences together, and of a draft by its drafter
    and number of tokens. Shared by the generations of a model, which may run in several threads.

    For a model with experts, forwards are stored as if all rows chose the same experts, and reported with the number of
    experts that rows like the recent ones choose. So text whose rows choose different experts makes all row counts
    dearer at once.

    When the machine changes, because other programs start or stop using its cores or because it gets hot, all costs
    change, including those of row counts that are not being run. If only the measured counts were updated, they would
    look dear or cheap next to the others until the windows of measurements had passed. `_follow` updates the others.

    experts : the model's experts; None where it has none
    """

    def __init__(self, experts: ExpertShare | None = None) -> None:
        self._lock = threading.Lock()
        self._round = 0
        self._measured_at: float | None = None
        self._saved: KnownCosts | None = None
        self._forwards = CostTable(PRIOR_ROW)
        self._drafts: dict[str, CostTable] = {}
        self._assumed: dict[str, float] = {}
        self._latest: deque[_Observation] = deque(maxlen=IN_A_ROW)
        self._experts = None if experts is None else ExpertReads(experts)

    def observe(self, this: Round) -> None:
        """Learn from a decoding round.

        Ignored are forwards in which a sequence was prefilling, because they have rows whose outputs nothing needs, and
        forwards too short for the clock.
        """
        forward = this.forward
        if forward is None or forward.rows != forward.wanted or forward.seconds <= 0:
            return
        with self._lock:
            self._round += 1
            self._measured_at = time()
            seconds = forward.seconds
            if self._experts is not None:
                seconds = self._experts.without_experts(seconds, forward.experts)
                self._experts.observe(forward.rows, forward.experts)
            before = self._forwards.at(forward.rows)
            change = seconds / before.median if before is not None and before.measured > 1 else 1.0
            measurements = self._forwards.observe(forward.rows, seconds, self._round)
            if measurements.contradict_recalled:
                self._drop_recalled()
            updated = [measurements]
            if this.drafted:
                if (table := self._drafts.get(this.source)) is None:
                    table = self._drafts[this.source] = CostTable(PRIOR_TOKEN)
                updated.append(table.observe(this.drafted, this.draft_seconds, self._round))
            self._latest.append(_Observation(change, updated))
            if change > CHANGE or change < 1 / CHANGE:
                self._follow()
            if self._round % SWEEP == 0:
                for each in (self._forwards, *self._drafts.values()):
                    each.drop_stale(self._round)

    def recall(self, known: KnownCosts) -> None:
        """Start from the measurements of another process.

        All of them are dropped as soon as own measurements of any row count differ from them by CHANGE: the machine is
        throttled or busy, or the context is longer.
        """
        with self._lock:
            forwards, drafts = _plausible(known)
            self._forwards.recall(forwards)
            self._drafts = {source: CostTable(PRIOR_TOKEN) for source in drafts}
            for source, table in self._drafts.items():
                table.recall(drafts[source])
            self._measured_at, self._saved = known.measured_at, known

    def unsaved(self) -> KnownCosts | None:
        """The costs that another process should start from; None while they are about those recalled or saved."""
        with self._lock:
            forwards = self._forwards.certain()
            if self._measured_at is None or not forwards:
                return None
            drafts = {source: table.certain() for source, table in self._drafts.items()}
            known = KnownCosts(self._measured_at, forwards, {source: each for source, each in drafts.items() if each})
        return known if self._saved is None or _changed(known, self._saved) else None

    def mark_saved(self, known: KnownCosts) -> None:
        """Note that these costs were written to disk."""
        self._saved = known

    @property
    def age_s(self) -> float | None:
        """Seconds since the last measurement; None before the first."""
        return None if self._measured_at is None else max(time() - self._measured_at, 0.0)

    @property
    def most_rows(self) -> int:
        """Rows of the largest recent forward; 0 before the first."""
        with self._lock:
            return self._forwards.most

    def measurements(self, rows: int) -> int:
        """How many recent measurements of a forward of this many rows there are."""
        known = self._forwards.at(rows)
        return 0 if known is None else known.weight

    def knows(self, source: str) -> bool:
        """Whether a draft by `source` was ever timed, in this process or in the one recalled from."""
        return bool(self._drafts.get(source))

    def forwards(self, most: int, other_rows: int = 0) -> list[float]:
        """Seconds of a forward of 1, 2, ..., `most` rows plus the rows of other sequences; never falling."""
        with self._lock:
            costs = self._forwards.costs(most + other_rows)[: most + other_rows]
            return (costs if self._experts is None else self._experts.expected(costs))[other_rows:]

    def drafts(self, source: str, most: int) -> list[float]:
        """Seconds of a draft of 1, 2, ... tokens by `source`, at least up to `most`; never falling."""
        with self._lock:
            table = self._drafts.get(source)
            if table:
                return table.costs(most)
            token = self._assumed.get(source, PRIOR_DRAFT) * self._forwards.costs(1)[0]
        return [count * token for count in range(1, most + 1)]

    def assume(self, source: str, share: float) -> None:
        """Set the cost of a token drafted by `source`, as a share of a forward of one row, until it was measured."""
        self._assumed[source] = share

    def _follow(self) -> None:
        """If the costs of the latest rounds have all changed, change all older measurements by the same factor.

        The changed values are guesses. Like recalled ones, they are dropped when measurements contradict them.
        """
        changes = sorted(latest.change for latest in self._latest)
        if len(changes) < IN_A_ROW or not (changes[0] > CHANGE or changes[-1] < 1 / CHANGE):
            return
        factor = changes[len(changes) // 2]
        updated = [id(measurements) for latest in self._latest for measurements in latest.updated]
        for table in (self._forwards, *self._drafts.values()):
            table.change(factor, updated)
        self._latest.clear()

    def _drop_recalled(self) -> None:
        for table in (self._forwards, *self._drafts.values()):
            table.drop_recalled()


class _Observation(NamedTuple):
    """One round: the factor between its forward's time and the expected one, and the measurements that it added to."""

    change: float
    updated: list[Measurements]


def _plausible(known: KnownCosts) -> tuple[dict[int, float], dict[str, dict[int, float]]]:
    """The forwards and drafts that take at most LONE_LIMIT times the prior cost: times from a busy machine must not
    keep drafts from being tried on an idle one.
    """
    least = min(known.forwards)
    one = known.forwards[least] / (1.0 + PRIOR_ROW * (least - 1))
    forwards = {
        rows: seconds
        for rows, seconds in known.forwards.items()
        if seconds <= LONE_LIMIT * one * (1.0 + PRIOR_ROW * (rows - 1))
    }
    drafts = {
        source: {
            count: seconds for count, seconds in counts.items() if seconds <= LONE_LIMIT * PRIOR_DRAFT * one * count
        }
        for source, counts in known.drafts.items()
    }
    return forwards, drafts


def _changed(now: KnownCosts, before: KnownCosts) -> bool:
    """Whether there is a count that was not measured before, or one whose time is far from before."""
    if now.drafts.keys() != before.drafts.keys():
        return True
    pairs = [(now.forwards, before.forwards), *((now.drafts[name], before.drafts[name]) for name in now.drafts)]
    return any(_differs(one, other) for one, other in pairs)


def _differs(now: Mapping[int, float], before: Mapping[int, float]) -> bool:
    return now.keys() != before.keys() or any(far(seconds, before[count]) for count, seconds in now.items())


# Seconds by count: rows of a forward, or tokens of a draft.


PRIOR_WEIGHT = 4
"""Weight of the prior slope, in units measured beyond the first."""

LONE_LIMIT = 2.0
"""A count's only measurement, which may include allocation, counts for at most this many times the expected cost."""


class CostTable:
    """Seconds by count, from the rounds that had such a count.

    A count's cost is the median of its recent rounds, blended with a straight line through the cost of one; counts
    without measurements get the line alone. The line's slope is a weighted median too, so that no count measured at a
    bad moment bends it.

    slope : cost of one more, as a share of the cost of one, until it was measured
    """

    def __init__(self, slope: float) -> None:
        self._prior = slope
        self._known: dict[int, Measurements] = {}
        self._table: list[float] = []
        """Result of `costs`; empty where it must be computed again."""

    def __bool__(self) -> bool:
        return bool(self._known)

    @property
    def most(self) -> int:
        """The largest count that was measured recently; 0 before the first."""
        return max(self._known, default=0)

    def at(self, count: int) -> Measurements | None:
        """The measurements of this count; None where there are none."""
        return self._known.get(count)

    def observe(self, count: int, seconds: float, this_round: int) -> Measurements:
        """Add a measurement; returns all of its count."""
        if (known := self._known.get(count)) is None:
            known = self._known[count] = Measurements()
        if known.add(seconds, this_round):
            self._table = []
        return known

    def costs(self, most: int) -> list[float]:
        """Seconds for 1, 2, ..., at least up to `most`; never falling. In an arbitrary unit before the first round."""
        if len(self._table) < most:
            self._table = self._blended(most)
        return self._table

    def recall(self, known: Mapping[int, float]) -> None:
        """Start from the measurements of another process."""
        self._known = {count: Measurements(seconds) for count, seconds in known.items()}
        self._table = []

    def certain(self) -> dict[int, float]:
        """Seconds by count, where they are certain enough for another process to start from."""
        return {count: known.median for count, known in self._known.items() if known.certain and known.median > 0}

    def change(self, factor: float, updated: list[int]) -> None:
        """Change all costs by a factor, except the newest measurements, which show the change already.

        updated : `id` of the `Measurements` that were added to since the change, once for each added time
        """
        for known in self._known.values():
            known.change(factor, newest=updated.count(id(known)))
        self._table = []

    def drop_recalled(self) -> None:
        """Drop recalled values."""
        self._known = {count: known for count, known in self._known.items() if known.drop_recalled()}
        self._table = []

    def drop_stale(self, this_round: int) -> None:
        """Drop counts that were not measured for STALE rounds."""
        for count in [count for count, known in self._known.items() if this_round - known.round >= STALE]:
            del self._known[count]
            self._table = []

    def _blended(self, most: int) -> list[float]:
        one = self._one()
        slope = self._slope(one)
        costs = [one * (1.0 + slope * extra) for extra in range(most)]
        for count, known in self._known.items():
            if count <= most:
                line, weight = costs[count - 1], known.weight
                seconds = known.median if weight > 1 else min(known.median, LONE_LIMIT * line)
                costs[count - 1] = (line + weight * seconds) / (1 + weight)
        return list(accumulate(costs, max))

    def _one(self) -> float:
        """The cost of a count of one, extrapolated from the smallest count measured."""
        if not self._known:
            return 1.0
        least = min(self._known)
        return self._known[least].median / (1.0 + self._prior * (least - 1))

    def _slope(self, one: float) -> float:
        """The weighted median of the slopes from one to each count measured, and of the prior slope."""
        slopes = [(self._prior, PRIOR_WEIGHT)]
        for count, known in self._known.items():
            if count > 1 and one > 0:
                slopes.append((max(known.median / one - 1.0, 0.0) / (count - 1), known.weight * (count - 1)))
        slopes.sort()
        half = sum(weight for _, weight in slopes) / 2
        for slope, weight in slopes:
            half -= weight
            if half <= 0:
                return slope
        return self._prior


WINDOW = 9
"""Measurements kept per count. Their median ignores up to four slow ones and follows a growing context."""

STALE = 512
"""Rounds after which a count that was not measured is dropped: the machine may have been busy when it was."""

UNCONFIRMED = 64
"""Rounds after which a recalled cost that was not measured again is dropped. One that is far too high would keep such
drafts from being made, and so never be corrected."""

RECALLED = 3
"""Measurements that one from another process is worth."""

CERTAIN = 4
"""Measurements behind a cost that is saved: a median of fewer may be a burst of another program."""


class Measurements:
    """The last times of one count. The first of them may be recalled from another process.

    round : round of the latest one
    median : median of them, the lower one of two
    """

    def __init__(self, recalled: float | None = None) -> None:
        self.round = 0 if recalled is None else UNCONFIRMED - STALE
        self.median = recalled or 0.0
        self._recalled = recalled
        self._seconds: deque[float] = deque([] if recalled is None else [recalled], maxlen=WINDOW)

    @property
    def measured(self) -> int:
        """How many of them were measured by this process."""
        return len(self._seconds) - (self._recalled is not None)

    @property
    def certain(self) -> bool:
        """Whether another process may start from the median."""
        return self._recalled is not None or len(self._seconds) >= CERTAIN

    @property
    def contradict_recalled(self) -> bool:
        """Whether what was measured since differs from what was recalled."""
        return self._recalled is not None and far(self.median, self._recalled)

    @property
    def weight(self) -> int:
        """How many measurements the median is worth."""
        return len(self._seconds) + (0 if self._recalled is None else RECALLED - 1)

    def add(self, seconds: float, this_round: int) -> bool:
        """Add a measurement; whether weight or median changed."""
        before = len(self._seconds), self.median
        self.round = this_round
        self._seconds.append(seconds)
        if len(self._seconds) == WINDOW:
            self._recalled = None
        # The lower one of two, because disturbances make a measurement longer.
        self.median = median_low(self._seconds)
        return (len(self._seconds), self.median) != before

    def change(self, factor: float, newest: int) -> None:
        """Keep the `newest` measurements only; for 0, recall the median times `factor` instead."""
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
        """Drop the recalled value; whether any measurement is left."""
        if self._recalled is not None:
            if self._recalled in self._seconds:
                self._seconds.remove(self._recalled)
            self._recalled = None
            self.median = median_low(self._seconds) if self._seconds else 0.0
        return bool(self._seconds)


def far(seconds: float, other: float) -> bool:
    """Whether two times differ by more than CHANGE."""
    return not 1.0 / CHANGE <= seconds / other <= CHANGE


# Experts: how many a forward reads.


EXPERTS_RATE = 0.2
"""Weight of the latest forward in the running estimate of the pool of experts."""


class ExpertReads:
    """Converts between the time of a forward and its time without the extra experts that its rows happened to choose.

    Rows that chose independently out of `pool` experts would read pool * (1 - (1 - top / pool)**rows) of them. The pool
    is all experts where rows have nothing in common, and `top` where all choose alike; neighbouring tokens are in
    between, depending on the text. The pool learnt from forwards of any number of rows predicts all others.

    share : the number of experts of the model, and the cost of reading one
    """

    def __init__(self, share: ExpertShare) -> None:
        self._share = share
        self._pool = float(share.count)

    @property
    def pool(self) -> float:
        """Number of experts that recent rows seem to have chosen from."""
        return self._pool

    def observe(self, rows: int, experts: float) -> None:
        """Learn from a forward that read `experts` distinct experts, averaged over its layers."""
        if rows > 1:
            self._pool += EXPERTS_RATE * (self._pool_of(rows, experts) - self._pool)

    def without_experts(self, seconds: float, experts: float) -> float:
        """The time that a forward would have taken if all its rows had chosen the same experts."""
        return seconds / self._factor(experts)

    def expected(self, costs: list[float]) -> list[float]:
        """From such times of 1, 2, ... rows, the times with the experts that as many rows will probably choose."""
        return [cost * self._factor(self._distinct(self._pool, rows)) for rows, cost in enumerate(costs, 1)]

    def _factor(self, experts: float) -> float:
        return 1.0 + self._share.of_a_row * max(experts - self._share.top, 0.0)

    def _distinct(self, pool: float, rows: int) -> float:
        return float(pool * (1.0 - (1.0 - self._share.top / pool) ** rows))

    def _pool_of(self, rows: int, experts: float) -> float:
        """The pool of which `rows` rows would read `experts` experts, by bisection: more are read of a larger pool."""
        low, high = float(self._share.top), float(self._share.count)
        for _ in range(12):  # to a thirtieth of an expert
            middle = (low + high) / 2
            low, high = (middle, high) if self._distinct(middle, rows) < experts else (low, middle)
        return high


# Costs on disk.


FILE_VERSION = 2
MAX_FILE_BYTES = 1 << 16
MAX_COUNT = 1024
MAX_SECONDS = 3600.0

MIN_WRITE_INTERVAL_S = 60.0
"""Seconds between two writes of one process."""


class CostsFile:
    """The costs of one bundle, machine, engine and number of threads.

    The file is a cache. One that is missing, damaged, or of another version or key is ignored, and so are errors when
    writing. It is replaced as a whole, so that several processes may write it; the last one wins.
    """

    def __init__(self, directory: Path, key: Sequence[str]) -> None:
        """
        Args:
            directory: created when something is written.
            key: identifies bundle, machine, engine and number of threads.
        """
        self._key = list(key)
        digest = hashlib.sha256("\0".join(key).encode()).hexdigest()
        self.path = directory / f"{digest[:32]}.json"
        self._written: float | None = None

    def read(self) -> KnownCosts | None:
        """The costs in the file; None where any part of it is not valid."""
        try:
            with self.path.open("rb") as file:
                content = file.read(MAX_FILE_BYTES + 1)
            if len(content) > MAX_FILE_BYTES:
                return None
            return self._parse(json.loads(content))
        except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
            return None

    def write(self, known: KnownCosts) -> bool:
        """Replace the file, unless it was written less than MIN_WRITE_INTERVAL_S ago; whether it was replaced."""
        if self._written is not None and monotonic() - self._written < MIN_WRITE_INTERVAL_S:
            return False
        self._written = monotonic()  # before writing: an unwritable file is not tried after every generation either
        entry = {
            "version": FILE_VERSION,
            "key": self._key,
            "measured_at": known.measured_at,
            "forwards": known.forwards,
            "drafts": known.drafts,
        }
        try:
            replace_json(self.path, entry)
        except OSError:
            return False
        return True

    def _parse(self, entry: Mapping[str, Any]) -> KnownCosts | None:
        if entry["version"] != FILE_VERSION or entry["key"] != self._key:
            return None
        forwards = _by_count(entry["forwards"])
        drafts = {str(source): _by_count(counts) for source, counts in entry["drafts"].items()}
        measured_at = float(entry["measured_at"])
        return KnownCosts(measured_at, forwards, drafts) if math.isfinite(measured_at) else None


def _by_count(entry: Mapping[str, Any]) -> dict[int, float]:
    """Seconds by count from JSON. Raises ValueError for counts and times that are not possible."""
    times = {int(count): seconds for count, seconds in entry.items()}
    if not times or min(times) < 1 or max(times) > MAX_COUNT:
        raise ValueError("not counts")
    if not all(isinstance(seconds, float) and 0.0 < seconds < MAX_SECONDS for seconds in times.values()):
        raise ValueError("not times")
    return times
