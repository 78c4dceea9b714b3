"""The cost model: seconds of a target forward by rows, and of a draft by depth, on this machine now.

`Costs` learns them from the rounds of all generations of a model, and the controller reads them. A forward of n rows
takes `scale * forwards[n]`: how much dearer n rows are than one depends on machine and bundle, and is learnt from
forwards that followed each other (`Curve`); how long one row takes depends on other programs, heat and context, and is
taken from the last rounds. So a slow moment makes no number of rows look dearer than another. There are two such
curves: a forward that one call of the engine runs among others (`MultiStep`) costs less than one with a call of its
own, which bears all the Python of a round. A round of one MTP draft takes 4.9 ms among twelve, and 6.3 ms alone
(SmolLM2-135M, AMD Zen 3; benchmarks/results/forwards.md). For models with experts, `ExpertReads` separates the cost of
rows from the cost of the experts that they happen to choose.

`measure` times an engine once, when a bundle is prepared, and `CostsFile` keeps costs on disk, so that the first
generation of a process plans as well as the last one of another.
"""

from __future__ import annotations

import hashlib
import json
import math
import sys
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path
from statistics import median, median_low
from time import monotonic, perf_counter, time
from typing import Any, NamedTuple

from ondevice.engines.protocol import Engine, ExpertShare, Rows, TokenTree
from ondevice.files import make_cache_directory, replace_json, trusted
from ondevice.forks import ReentrantLock
from ondevice.generate.stats import Round

PRIOR_ROW = 0.1
"""Cost of one more row in a forward, as a share of a forward of one row, until it was measured."""

PRIOR_DRAFT = 0.05
"""Cost of a drafted token, as a share of a forward of one row, until it was measured."""

RECENT = 8
"""Rounds whose median gives the present time of a forward of one row: after half of them a change is believed."""

MEMORY = 16
"""Measurements of a count that its cost is the median of: forwards that another program slowed are outliers. With the
mean of 48, relative to the last eight forwards with other numbers of rows, drafts that gained a fifth lost their credit
on a virtual machine (`test_auto_does_so_where_other_programs_run_at_times`)."""

KNOWN_WEIGHT = 2
"""A cost is saved for other processes after this many measurements. A process that loads it weighs it as this many, and
as one after its first own measurement."""

TIMINGS = 3
"""Drafts that a process times before it believes that their cost is too high: the first one bears the reading of the
drafter's weights, and a cost of another process may be of a busy moment."""

STALE = 256
"""Rounds after which a count that was not measured is dropped. A cost that is far too high, such as one from a busy
moment, would keep such drafts from being made, and so never be corrected."""

SWEEP = 16
"""Rounds between two searches for stale counts."""

NOTICED = 0.005
"""Share by which a cost must change for the costs between measured counts to be computed again."""

LIMIT = 2.0
"""Factor by which a measurement may exceed the expected cost at most: the rest is taken for a disturbance, such as a
first draft's allocations."""


class KnownCosts(NamedTuple):
    """Measured costs, as they are exchanged with a `CostsFile`.

    measured_at : Unix time of the last measurement
    row_s : seconds of a forward of one row
    forwards : by rows, the cost of a forward relative to one of one row
    drafts : by drafter, the cost of a draft by depth, relative to a forward of one row
    shared : as `forwards`, for those of which one call of the engine runs several
    """

    measured_at: float
    row_s: float
    forwards: dict[int, float]
    drafts: dict[str, dict[int, float]]
    shared: dict[int, float]


class Costs:
    """Seconds of a target forward by its number of rows, those of all sequences together, and of a draft by its drafter
    and depth: a step of a drafter may bring siblings at no cost. Shared by the generations of a model, which may run in
    several threads.

    The unit of all curves is a forward of one row. Where two forwards in succession have different numbers of rows, the
    larger number is measured by the ratio of their times: only these ran at nearly the same moment. Of two with equal
    numbers the one that had a call of its own is measured by the other.

    For a model with experts, forwards are stored as if all rows chose the same experts, and reported with the number of
    experts that rows like the recent ones choose. So text whose rows choose different experts makes all row counts
    dearer at once.

    experts : the model's experts; None where it has none
    """

    def __init__(self, experts: ExpertShare | None = None) -> None:
        self._lock = ReentrantLock()  # reentrant: garbage collected under it may end a generation
        self._round = 0
        self._measured_at: float | None = None
        self._forwards = {alone: Curve(1.0, PRIOR_ROW, weight=1) for alone in (True, False)}
        """By whether a forward has a call of the engine of its own."""
        self._sharing: set[str] = set()
        """Drafters of which one call of the engine has run several rounds."""
        self._drafts: dict[str, Curve] = {}
        self._recent: deque[tuple[int, bool, float]] = deque(maxlen=RECENT)
        """Rows of the last forwards, whether they were alone in their calls, and seconds."""
        self._runs = Counter[int]()
        """By rows, the number of forwards."""
        self._row_s = 1.0
        """Seconds of a forward of one row; an arbitrary unit before the first round."""
        self._experts = None if experts is None else ExpertReads(experts)
        self._continues = False
        """Whether the engine runs several plain forwards in one call."""

    def observe(self, this: Round) -> None:
        """Learn from a decoding round. Of the rounds of one call of the engine, which all have their mean time, one is
        given.

        Ignored are forwards in which a sequence was prefilling, because they have rows whose outputs nothing needs, and
        forwards too short for the clock. Where plain decoding runs several forwards in one call (`MultiStep`), one
        that was called alone does not tell what a plain one costs.
        """
        forward = this.forward
        if forward is None or forward.rows != forward.wanted or forward.seconds <= 0:
            return
        with self._lock.lock:
            alone = this.is_alone
            self._continues |= this.forwards > 1
            if self._continues and forward.rows == this.forwards == 1:
                return
            self._round += 1
            self._measured_at = time()
            rows, seconds = forward.rows, forward.seconds
            if self._experts is not None:
                seconds = self._experts.without_experts(seconds, forward.experts)
                self._experts.observe(rows, forward.experts)
            self._runs[rows] += 1
            if self._round % SWEEP == 0:
                for curve in (*self._forwards.values(), *self._drafts.values()):
                    curve.drop_before(self._round - STALE)
            self._compare(rows, alone, seconds)
            self._recent.append((rows, alone, seconds))
            self._row_s = self._row_seconds()
            if this.depth:
                if not alone:
                    self._sharing.add(this.source)
                row_s = seconds / self._cost(rows, alone)
                self._curve_of(this.source).observe(this.depth, max(this.draft_seconds, 0.0) / row_s, self._round)

    def recall(self, known: KnownCosts) -> None:
        """Start from the measurements of another process, which own ones soon outweigh."""
        with self._lock.lock:
            self._row_s = known.row_s
            # A forward of n rows costs no more than n forwards, whatever a file says.
            for alone, found in ((True, known.forwards), (False, known.shared)):
                limited = {rows: min(max(cost, 0.5), float(rows)) for rows, cost in found.items()}
                self._forwards[alone].recall(limited, self._round)
            self._runs[1] = 1  # so it soon runs again
            for source, drafts in known.drafts.items():
                limited = {count: min(cost, float(count)) for count, cost in drafts.items()}
                self._curve_of(source).recall(limited, self._round)
            self._measured_at = known.measured_at

    def known(self) -> KnownCosts | None:
        """The costs that another process should start from; None before any were measured several times."""
        with self._lock.lock:
            forwards, shared = (self._forwards[key].measured() for key in (True, False))
            if self._measured_at is None or not (forwards or shared):
                return None
            drafts = {source: each for source, curve in self._drafts.items() if (each := curve.measured())}
            return KnownCosts(self._measured_at, self._row_s, {1: 1.0} | forwards, drafts, shared)

    @property
    def age_s(self) -> float | None:
        """Seconds since the last measurement; None before the first."""
        return None if self._measured_at is None else max(time() - self._measured_at, 0.0)

    def knows(self, source: str) -> bool:
        """Whether this process has timed drafts by `source` often enough to know what they cost."""
        return source in self._drafts and self._drafts[source].timed >= TIMINGS

    def runs(self, rows: int) -> int:
        """Number of forwards of this many rows that were observed."""
        return self._runs[rows]

    def measurements(self, rows: int, *, alone: bool = True) -> int:
        """How many measurements the cost of a forward of this many rows is worth."""
        return self._forwards[alone].weight(rows)

    def charge(self, this: Round) -> float:
        """The cost of an observed round's forwards and draft, relative to a forward of one row.

        It is their usual cost: time that another program took is no loss by the draft. While the cost of that many rows
        is uncertain, it is what they took, a disturbance excepted.
        """
        forward = this.forward
        assert forward is not None
        with self._lock.lock:
            forwards = self._seconds(this.rows, forward.rows - this.rows, this.is_alone)
            plain, rows = forwards[0], forwards[-1]
            if self.measurements(forward.rows, alone=this.is_alone) <= KNOWN_WEIGHT:
                rows = min(forward.seconds, LIMIT * rows)
            draft = self.drafts(this.source, this.depth)[-1] if this.depth else 0.0
            return (this.forwards * rows + draft) / plain

    def forwards(self, most: int, other_rows: int = 0, source: str = "") -> list[float]:
        """Seconds of a forward of 1, 2, ..., `most` rows plus the rows of other sequences, which verifies a draft by
        `source`; never falling.
        """
        with self._lock.lock:
            return self._seconds(most, other_rows, other_rows > 0 or source not in self._sharing)

    def _seconds(self, most: int, other_rows: int, alone: bool) -> list[float]:
        costs = self._forwards[alone].costs(most + other_rows)
        if self._experts is not None:
            costs = self._experts.expected(costs)
        return [self._row_s * cost for cost in costs[other_rows : most + other_rows]]

    def drafts(self, source: str, most: int) -> list[float]:
        """Seconds of a draft by `source` whose longest path has 1, 2, ..., `most` tokens; never falling."""
        with self._lock.lock:
            return [self._row_s * cost for cost in self._curve_of(source).costs(most)[:most]]

    def assume(self, source: str, share: float) -> None:
        """Set the cost of a token drafted by `source`, as a share of a forward of one row, until it was measured."""
        with self._lock.lock:
            if source not in self._drafts or not self._drafts[source].measured():
                self._drafts[source] = Curve(share, share)

    def _curve_of(self, source: str) -> Curve:
        if (curve := self._drafts.get(source)) is None:
            curve = self._drafts[source] = Curve(PRIOR_DRAFT, PRIOR_DRAFT)
        return curve

    def _compare(self, rows: int, alone: bool, seconds: float) -> None:
        """Learn from a forward and the one before it what the larger of their numbers of rows costs; of equal ones,
        what the one costs that was alone:

            cost(many) = cost(few) * seconds(many) / seconds(few)

        Two neighbours, because what disturbs one forward disturbs the next one too.
        """
        if rows == 1:
            for curve in self._forwards.values():
                curve.observe(1, 1.0, self._round)
        if not self._recent or self._recent[-1][:2] == (rows, alone):
            return
        (few, few_alone, few_s), (many, many_alone, many_s) = sorted([self._recent[-1], (rows, alone, seconds)])
        self._forwards[many_alone].observe(many, self._cost(few, few_alone) * many_s / few_s, self._round)

    def _cost(self, rows: int, alone: bool) -> float:
        """The cost of a forward, relative to one of one row."""
        return self._forwards[alone].costs(rows)[rows - 1]

    def _row_seconds(self) -> float:
        """Seconds of a forward of one row, by the median of the recent ones; the lower one of two, as disturbances add
        time.
        """
        return median_low([seconds / self._cost(rows, alone) for rows, alone, seconds in self._recent])


@dataclass
class Point:
    """The measured costs of a count, the round of the last one, and whether another process measured them."""

    costs: deque[float]
    round: int
    recalled: bool = False

    @property
    def cost(self) -> float:
        return median(self.costs)


class Curve:
    """A cost by count, rows of a forward or depth of a draft, relative to a forward of one row.

    A count's cost is the median of its measurements, and of the line before them. Between measured counts costs lie on
    straight lines, and beyond the largest on one with the average slope so far, but at least the prior's.

    first : prior cost of one
    slope : prior cost of one more
    weight : measurements of a count that the line is worth
    timed : measurements that were made here, and not recalled
    """

    def __init__(self, first: float, slope: float, weight: int = 0) -> None:
        self._first, self._slope, self._weight = first, slope, weight
        self._known: dict[int, Point] = {}
        self._costs: list[float] = []
        """Result of `costs`; empty where it must be computed again."""
        self._computed: dict[int, float] = {}
        """The costs of counts that it was computed from."""
        self.timed = 0

    def observe(self, count: int, cost: float, now: int = 0) -> None:
        """Add a measurement of round `now`."""
        point = self._known.get(count)
        expected = self.costs(count)[count - 1] if point is None else point.cost
        if point is None or point.recalled:
            weight = self._weight if point is None else 1
            point = self._known[count] = Point(deque([expected] * weight, MEMORY), now)
        point.costs.append(min(cost, LIMIT * expected) if expected > 0 else cost)
        point.round = now
        self.timed += 1
        change = abs(point.cost - self._computed.get(count, 0.0))
        if len(point.costs) < MEMORY or change > NOTICED * expected:  # to compute the costs again takes 20 us
            self._costs = []

    def recall(self, costs: Mapping[int, float], now: int) -> None:
        """Start from these costs."""
        self._known = {
            count: Point(deque([cost] * KNOWN_WEIGHT, MEMORY), now, recalled=True) for count, cost in costs.items()
        }
        self._costs = []

    def drop_before(self, round_number: int) -> None:
        """Drop counts that were not measured since this round."""
        if any(point.round < round_number for point in self._known.values()):
            self._known = {count: point for count, point in self._known.items() if point.round >= round_number}
            self._costs = []

    def weight(self, count: int) -> int:
        """How many measurements a count's cost is worth; 0 for none."""
        return len(self._known[count].costs) if count in self._known else 0

    def measured(self) -> dict[int, float]:
        """The costs of counts that were measured several times."""
        certain = {count: point.cost for count, point in self._known.items() if len(point.costs) >= KNOWN_WEIGHT}
        return {count: cost for count, cost in certain.items() if cost > 0}

    def costs(self, most: int) -> list[float]:
        """The costs of 1, 2, ..., at least up to `most`; never falling."""
        if len(self._costs) < most:
            self._costs = self._line(max(most, 2 * len(self._costs)))
        return self._costs

    def _line(self, most: int) -> list[float]:
        if not self._known:
            return [self._first + self._slope * extra for extra in range(most)]
        counts = sorted(self._known)
        self._computed = {count: self._known[count].cost for count in counts}
        costs = rising([(self._computed[count], len(self._known[count].costs)) for count in counts])
        least, largest = counts[0], counts[-1]
        if least > 1:
            counts.insert(0, 1)
            costs.insert(0, costs[0] * self._first / (self._first + self._slope * (least - 1)))
        line = [costs[0]]
        for (count, cost), (later, next_cost) in pairwise(zip(counts, costs, strict=True)):
            slope = (next_cost - cost) / (later - count)
            line += [cost + slope * extra for extra in range(1, later - count + 1)]
        beyond = max((costs[-1] - costs[0]) / (largest - 1) if largest > 1 else 0.0, self._slope)
        return line + [costs[-1] + beyond * extra for extra in range(1, most - largest + 1)]


def rising(costs: Sequence[tuple[float, float]]) -> list[float]:
    """The sequence that never falls and is closest to costs with weights: where one falls, neighbours get their mean
    (pool adjacent violators). The running maximum would follow whatever disturbance was largest.
    """
    pools: list[tuple[float, float, int]] = []
    for each in costs:
        pools.append((*each, 1))
        while len(pools) > 1 and pools[-2][0] > pools[-1][0]:
            (one, weight, count), (other, other_weight, other_count) = pools.pop(), pools.pop()
            both = weight + other_weight
            pools.append(((one * weight + other * other_weight) / both, both, count + other_count))
    return [cost for cost, _, count in pools for _ in range(count)]


# Measuring an engine.


MEASURED_ROWS = (1, 3, 5, 6, 8, 12, 17)
MEASURED_TOKENS = 64  # in the cache, or half of a shorter context
MEASURED_STEPS = 4
TURNS = 5


def measure(engine: Engine) -> KnownCosts:
    """Time forwards of several numbers of rows and drafts, in the time of about 55 forwards of one row.

    The tokens and the hidden state are arbitrary: they change no time but that of experts, which rows of real text
    share more often. So costs of models with experts are only learnt from rounds.
    """
    session = engine.open_session()
    length = min(MEASURED_TOKENS, engine.context_length // 2)
    room = engine.context_length - length
    forwards: dict[int, list[float]] = {rows: [] for rows in MEASURED_ROWS if rows <= room}
    drafts: dict[str, list[list[float]]] = {}
    try:
        tokens = [number % engine.target.vocab_size for number in range(2, 2 + MEASURED_TOKENS)]
        prompt = Rows(session, TokenTree.chain(tokens[:length]), [length - 1])
        hidden = engine.forward([prompt])[0].hidden[0].copy()
        session.commit(range(length))
        for _ in range(TURNS):
            for rows, times in forwards.items():
                tree = Rows(session, TokenTree.chain(tokens[:rows]), range(rows))
                times.append(_timed(engine.forward, [tree]))
            if engine.drafter is not None:
                steps = [_timed(session.draft_step, tokens[0], hidden) for _ in range(MEASURED_STEPS)]
                drafts.setdefault("mtp", []).append(list(accumulate(steps)))
            for kind in engine.heads:
                if kind != "exit":
                    once = _timed(session.propose, kind, hidden)
                    drafts.setdefault(kind, []).append([once] * MEASURED_STEPS)
    finally:
        session.close()
    row_s = median(forwards[1])
    costs = {rows: median(times) / row_s for rows, times in forwards.items()}
    by_tokens = {
        source: {count: median(column) / row_s for count, column in enumerate(zip(*turns, strict=True), 1)}
        for source, turns in drafts.items()
    }
    return KnownCosts(time(), row_s, costs, by_tokens, {})


def _timed(work: Callable[..., object], *arguments: object) -> float:
    """The seconds that a call takes."""
    started = perf_counter()
    work(*arguments)
    return perf_counter() - started


# Experts: how many a forward reads.


EXPERTS_RATE = 0.2
"""Weight of the latest forward in the running estimate of the pool of experts."""


class ExpertReads:
    """Converts between the time of a forward and its time without the extra experts that its rows happened to choose.

    Rows that chose independently out of `pool` experts would read pool * (1 - (1 - top / pool)**rows) of them. The pool
    is all experts where rows have nothing in common, and `top` where all choose alike; neighbouring tokens are in
    between, depending on the text. The pool learnt from forwards of any number of rows predicts all others.

    share : the number of experts of the model, and the cost of reading one
    pool : number of experts that recent rows seem to have chosen from
    """

    def __init__(self, share: ExpertShare) -> None:
        self._share = share
        self.pool = float(share.count)

    def observe(self, rows: int, experts: float) -> None:
        """Learn from a forward that read `experts` distinct experts, averaged over its layers."""
        if rows > 1:
            self.pool += EXPERTS_RATE * (self._pool_of(rows, experts) - self.pool)

    def without_experts(self, seconds: float, experts: float) -> float:
        """The time that a forward would have taken if all its rows had chosen the same experts."""
        return seconds / self._factor(experts)

    def expected(self, costs: list[float]) -> list[float]:
        """From such times of 1, 2, ... rows, the times with the experts that as many rows will probably choose."""
        return [cost * self._factor(self._distinct(self.pool, rows)) for rows, cost in enumerate(costs, 1)]

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


FILE_VERSION = 4
MAX_FILE_BYTES = 1 << 16
MAX_COUNT = 1024
MIN_SECONDS, MAX_SECONDS = 1e-12, 3600.0
"""Bounds of the times and costs in a file: prices are divided by them, and no clock measures beyond."""

MIN_WRITE_INTERVAL_S = 60.0
"""Seconds between two writes of one process."""


class CostsFile:
    """The costs of one bundle, machine, engine and number of threads.

    The file is a cache. One that is missing, damaged, of another version or key, or that another user may have written,
    is ignored, and so are errors when writing. It is replaced as a whole, so that several processes may write it; the
    last one wins.
    """

    def __init__(self, directory: Path, key: Sequence[str]) -> None:
        """
        Args:
            directory: created when something is written, in the cache directory.
            key: identifies bundle, machine, engine and number of threads.
        """
        self._key = list(key)
        digest = hashlib.sha256("\0".join(key).encode()).hexdigest()
        self.path: Path = directory / f"{digest[:32]}.json"
        self._written: float | None = None

    def read(self) -> KnownCosts | None:
        """The costs in the file; None where any part of it is not valid."""
        if not trusted(self.path):
            return None
        try:
            with self.path.open("rb") as file:
                content = file.read(MAX_FILE_BYTES + 1)
            if len(content) > MAX_FILE_BYTES:
                return None
            return self._parse(json.loads(content))
        except (OSError, ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError):
            return None

    def write(self, known: KnownCosts) -> bool:
        """Replace the file, unless it was written less than MIN_WRITE_INTERVAL_S ago; whether it was replaced."""
        if sys.is_finalizing():  # a generation that was left open ends with the interpreter, which has no `open` then
            return False
        if self._written is not None and monotonic() - self._written < MIN_WRITE_INTERVAL_S:
            return False
        self._written = monotonic()  # before writing: an unwritable file is not tried after every generation either
        entry = {
            "version": FILE_VERSION,
            "key": self._key,
            "measured_at": known.measured_at,
            "row_s": known.row_s,
            "forwards": known.forwards,
            "drafts": known.drafts,
            "shared": known.shared,
        }
        try:
            make_cache_directory(self.path.parent)
            replace_json(self.path, entry)
        except OSError:
            return False
        return True

    def _parse(self, entry: Mapping[str, Any]) -> KnownCosts | None:
        if entry["version"] != FILE_VERSION or entry["key"] != self._key:
            return None
        forwards = _by_count(entry["forwards"])
        shared = {} if entry["shared"] == {} else _by_count(entry["shared"])
        drafts = {str(source): _by_count(counts) for source, counts in entry["drafts"].items()}
        measured_at, row_s = float(entry["measured_at"]), _time(entry["row_s"])
        return KnownCosts(measured_at, row_s, forwards, drafts, shared) if math.isfinite(measured_at) else None


def _by_count(entry: Mapping[str, Any]) -> dict[int, float]:
    """Costs by count from JSON. Raises ValueError for counts and costs that are not possible."""
    costs = {int(count): _time(cost) for count, cost in entry.items()}
    if not costs or min(costs) < 1 or max(costs) > MAX_COUNT:
        raise ValueError("not counts")
    return costs


def _time(value: object) -> float:
    if not isinstance(value, float) or not MIN_SECONDS < value < MAX_SECONDS:
        raise ValueError("not a time")
    return value
