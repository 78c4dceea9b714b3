"""What a round costs on this machine, learnt from the rounds themselves."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Mapping
from time import time
from typing import NamedTuple

from ondevice.decoding.cost_table import LONE_LIMIT, CostTable
from ondevice.decoding.costs_file import KnownCosts
from ondevice.decoding.expert_reads import ExpertReads
from ondevice.decoding.recent import CHANGE, Recent, far
from ondevice.decoding.record import Round
from ondevice.engines.protocol import ExpertShare

PRIOR_ROW = 0.1
"""What one more row adds to a forward, as a share of a single row's, until it was measured."""

PRIOR_DRAFT = 0.05
"""What a drafted token costs, as a share of a single row's forward, until it was measured."""

PRIOR_TOKEN = 0.5
"""What one more token adds to a draft, as a share of a draft of one, until it was measured. A drafter that is asked
for a token now and then has cold weights and sleeping threads: on the reference pair that token takes three times as
long as each of the next ones, and at its price no draft would seem to pay, where those of four tokens pay 1.45x."""

SWEEP = 16
"""Rounds between two looks for what is stale."""

IN_A_ROW = 3
"""Rounds that must all have changed, and by then tell by how much."""


class Costs:
    """Seconds of a target forward by its number of rows, of all sequences in it, and of a draft by its drafter and
    number of tokens.

    Shared by the generations of a model, which may run in several threads.

    Where a model has experts, forwards are kept as if all rows chose the same, and told with those that rows like the
    recent ones choose: text of which each row takes others makes a row dear, at once and for every number of rows.

    When the machine changes, because others want its cores, or no longer, or it is hot, all costs change with it, and
    with them those of row counts that are not run just then: else the one that is run would look dear, or cheap, beside
    the others for as long as their windows hold.
    """

    def __init__(self, experts: ExpertShare | None = None) -> None:
        self._lock = threading.Lock()
        self._round = 0
        self._measured_at: float | None = None
        self._kept: KnownCosts | None = None
        self._forwards = CostTable(PRIOR_ROW)
        self._drafts: dict[str, CostTable] = {}
        self._assumed: dict[str, float] = {}
        self._latest: deque[_Measured] = deque(maxlen=IN_A_ROW)
        self._experts = None if experts is None else ExpertReads(experts)

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
            seconds = forward.seconds
            if self._experts is not None:
                seconds = self._experts.freed(seconds, forward.experts)
                self._experts.observe(forward.rows, forward.experts)
            before = self._forwards.of(forward.rows)
            change = seconds / before.median if before is not None and before.measured > 1 else 1.0
            recent = self._forwards.observe(forward.rows, seconds, self._round)
            if recent.contradicts:
                self._drop_recalled()
            touched = [recent]
            if this.drafted:
                if (table := self._drafts.get(this.source)) is None:
                    table = self._drafts[this.source] = CostTable(PRIOR_TOKEN)
                touched.append(table.observe(this.drafted, this.draft_seconds, self._round))
            self._latest.append(_Measured(change, touched))
            if change > CHANGE or change < 1 / CHANGE:
                self._follow()
            if self._round % SWEEP == 0:
                for each in (self._forwards, *self._drafts.values()):
                    each.drop_stale(self._round)

    def recall(self, known: KnownCosts) -> None:
        """Start from what another process measured.

        All of it goes as soon as the measurements of any row count leave it by CHANGE: the machine is throttled, or
        busy with something else, or the context is longer.
        """
        with self._lock:
            forwards, drafts = _plausible(known)
            self._forwards.recall(forwards)
            self._drafts = {source: CostTable(PRIOR_TOKEN) for source in drafts}
            for source, table in self._drafts.items():
                table.recall(drafts[source])
            self._measured_at, self._kept = known.measured_at, known

    def news(self) -> KnownCosts | None:
        """What another process should start from; None while that is what was recalled or kept already."""
        with self._lock:
            forwards = self._forwards.certain()
            if self._measured_at is None or not forwards:
                return None
            drafts = {source: table.certain() for source, table in self._drafts.items()}
            known = KnownCosts(self._measured_at, forwards, {source: each for source, each in drafts.items() if each})
        return known if self._kept is None or _changed(known, self._kept) else None

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
            return self._forwards.most

    def measurements(self, rows: int) -> int:
        """How many recent forwards of this many rows were timed."""
        recent = self._forwards.of(rows)
        return 0 if recent is None else recent.weight

    def knows(self, source: str) -> bool:
        """Whether a draft by `source` was ever timed, here or where this was recalled from."""
        return bool(self._drafts.get(source))

    def forwards(self, most: int, beside: int = 0) -> list[float]:
        """Seconds of a forward of 1, 2, ..., `most` rows beside those of other sequences; never falling."""
        with self._lock:
            costs = self._forwards.costs(most + beside)[: most + beside]
            return (costs if self._experts is None else self._experts.expected(costs))[beside:]

    def drafts(self, source: str, most: int) -> list[float]:
        """Seconds of a draft of 1, 2, ..., `most` tokens by `source`, or some more; never falling."""
        with self._lock:
            table = self._drafts.get(source)
            if table:
                return table.costs(most)
            token = self._assumed.get(source, PRIOR_DRAFT) * self._forwards.costs(1)[0]
        return [count * token for count in range(1, most + 1)]

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
        for table in (self._forwards, *self._drafts.values()):
            table.change(factor, touched)
        self._latest.clear()

    def _drop_recalled(self) -> None:
        for table in (self._forwards, *self._drafts.values()):
            table.drop_recalled()


class _Measured(NamedTuple):
    """A round: how many times as long as expected its forward took, and what it was a measurement of."""

    change: float
    touched: list[Recent]


def _plausible(known: KnownCosts) -> tuple[dict[int, float], dict[str, dict[int, float]]]:
    """Forwards and drafts that take no more than LONE_LIMIT times what is expected where nothing is known: what a busy
    machine made dear may not keep drafts from being tried on an idle one.
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
    """Whether something was measured that was not before, or is far from it."""
    if now.drafts.keys() != before.drafts.keys():
        return True
    pairs = [(now.forwards, before.forwards), *((now.drafts[name], before.drafts[name]) for name in now.drafts)]
    return any(_differs(one, other) for one, other in pairs)


def _differs(now: Mapping[int, float], before: Mapping[int, float]) -> bool:
    return now.keys() != before.keys() or any(far(seconds, before[count]) for count, seconds in now.items())
