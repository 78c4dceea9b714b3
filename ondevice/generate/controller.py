"""How many tokens to draft in a round, and whether to consult the drafter at all.

In: the drafter's `Forecast`, this machine's `Costs`, and the finished rounds. Out: a `Plan` for the next round. A
`Schedule` decides: `constant` and `heuristic` by a simple rule, `auto` by expected tokens per second (`best_plan`), so
that where drafts do not pay, none are made. `auto` combines three checks: `acceptance.Trust` scales forecasts by how
far earlier ones came true, `Probes` decides when to try again a draft that does not pay, and `Pauses` skips the drafter
where by the clock consulting it costs more than its drafts gain.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from ondevice.errors import UsageError
from ondevice.generate.costs import Costs
from ondevice.generate.drafters.acceptance import Trust
from ondevice.generate.drafters.protocol import Drafter, Forecast
from ondevice.generate.stats import IdleReason, Round

MAX_DRAFT = 16
"""Tokens that `heuristic` and `auto` draft at most."""

START_DRAFT = 4
"""Tokens that `constant` and `heuristic` draft at first where the caller did not choose a number."""

REFRESH = 128
"""Rounds with a draft after which `auto` runs one without, so that the cost of a single row stays known."""


@dataclass(frozen=True)
class Plan:
    """Draft up to `k` tokens, and stop before one whose survival (see `Forecast`) is below `floor`. k = 0 skips
    drafting; `reason` says why.
    """

    k: int
    floor: float = 0.0
    reason: IdleReason = "unprofitable"


UNPROFITABLE = Plan(0)
MEASURING = Plan(0, reason="measuring")
NO_MATCH = Plan(0, reason="no_match")
NO_ROOM = Plan(0, reason="no_room")
DRIFT = Plan(0, reason="drift")


class Schedule(Protocol):
    """Plans the rounds of one generation at a time, and learns from them."""

    def skips_round(self) -> bool:
        """Called once as a round begins: whether neither the drafter nor this schedule is consulted in it. Such a round
        has no plan and is not observed.
        """
        ...

    def plan(self, drafter: Drafter, limit: int, other_rows: int = 0) -> Plan:
        """Plan the next round.

        Args:
            drafter: asked for its forecast; has observed everything so far.
            limit: tokens that may be drafted at most; 0 where only one more token may be emitted.
            other_rows: rows that other sequences will have in the same forward, as far as is known.
        """
        ...

    def observe(self, this: Round) -> None:
        """Learn from the finished round."""
        ...


@dataclass
class ConstantSchedule:
    """Always drafts the same number of tokens."""

    num_assistant_tokens: int

    def skips_round(self) -> bool:
        return False

    def plan(self, drafter: Drafter, limit: int, other_rows: int = 0) -> Plan:
        return Plan(min(self.num_assistant_tokens, limit))

    def observe(self, this: Round) -> None:
        """Does nothing."""


@dataclass
class HeuristicSchedule:
    """Two tokens more after a draft that was accepted to its end, one less after another; transformers' rule, with an
    upper bound of MAX_DRAFT. A round without a draft changes nothing.
    """

    num_assistant_tokens: int

    def skips_round(self) -> bool:
        return False

    def plan(self, drafter: Drafter, limit: int, other_rows: int = 0) -> Plan:
        return Plan(min(self.num_assistant_tokens, limit, MAX_DRAFT))

    def observe(self, this: Round) -> None:
        if this.drafted:
            change = 2 if this.accepted == this.depth else -1
            self.num_assistant_tokens = min(max(self.num_assistant_tokens + change, 1), MAX_DRAFT)


class AutoSchedule:
    """Chooses the k, 0 included, with the most expected tokens per second: where drafts do not pay, none are made.

    Serves one drafter, or one portfolio. While drafts do not pay the drafter is called only for probes, which notice
    that the text has changed. A probe makes the draft that is expected to lose least, because a single token says
    little about the cost of the next ones.

    Measured worst case: 0.95 of the speed of plain decoding, on a tiny model whose forward takes 0.2 ms.

    costs : this machine's, shared by all generations of a model
    most : tokens to draft at most
    """

    def __init__(self, costs: Costs, most: int = MAX_DRAFT) -> None:
        self.costs = costs
        self.most = most
        self._trust: defaultdict[str, Trust] = defaultdict(Trust)
        self._probes = Probes()
        self._pauses = Pauses()
        self._forecast: Forecast | None = None
        """The forecast that this round's plan was made from."""
        self._probing = False
        self._rounds_since_plain = 0
        self._parked: tuple[Drafter, Plan] | None = None
        """A drafter whose steady forecast does not pay, and the plan to give until the next probe."""

    def skips_round(self) -> bool:
        return self._pauses.skips_round()

    def plan(self, drafter: Drafter, limit: int, other_rows: int = 0) -> Plan:
        due = False
        if self._parked is not None and self._parked[0] is drafter and not (due := self._probes.due()):
            return self._parked[1]
        # The number of rows at most doubles: the cost of larger forwards is not known yet.
        limit = min(limit, self.most, 2 * self.costs.most_rows - other_rows)
        if limit < 1 or self._rounds_since_plain >= self._refresh(other_rows):
            return MEASURING
        forecast = drafter.forecast(limit)
        if not len(forecast.survival):
            return NO_MATCH
        self._parked = None
        trust = forecast.trust or self._trust[forecast.source]
        plan, gain = best_plan(forecast, self.costs, trust, other_rows)
        self._probing = gain <= 1.0
        if self._probing:
            if not (due or self._probes.due()):
                idle = DRIFT if trust.drifted else UNPROFITABLE
                self._parked = (drafter, idle) if forecast.steady else None
                return idle
            plan = Plan(plan.k)
        else:
            self._probes.end()
        self._forecast = forecast
        return plan

    def observe(self, this: Round) -> None:
        # A drafter's first draft takes longer than any later one.
        tried_before = not this.drafted or self.costs.knows(this.source)
        self.costs.observe(this)
        forward = this.forward
        if forward is not None and forward.rows == this.rows and tried_before:  # no other sequence took part
            seconds = forward.seconds + this.draft_seconds + this.control_seconds
            self._pauses.observe(len(this.token_ids), seconds, this.control_seconds, self.costs.forwards(1)[0])
        self._rounds_since_plain = self._rounds_since_plain + 1 if this.drafted else 0
        forecast, self._forecast = self._forecast, None
        if forecast is None:
            return
        if forecast.trust is None:
            self._trust[forecast.source].observe(forecast.survival, this.drafted, this.accepted)
        if self._probing:
            count = max(this.drafted, 1)
            one, *_, all_of_them = self.costs.forwards(count + 1)
            loss = (all_of_them + self.costs.drafts(forecast.source, count)[count - 1]) / one - 1
            self._probes.observe(this.accepted - loss, loss)

    def _refresh(self, other_rows: int) -> int:
        """Rounds after which the cost of a single row, which everything is compared with, is measured again."""
        measurements = self.costs.measurements(1 + other_rows)
        return min(2 ** (measurements + 1), REFRESH) if measurements else 0


def make_schedule(name: str, num_assistant_tokens: int | None, costs: Costs) -> Schedule:
    """The schedule of that name.

    Args:
        name: `constant`, `heuristic` or `auto`.
        num_assistant_tokens: tokens per draft for `constant`, in the first draft for `heuristic`, at most for `auto`;
            None for the schedule's own default.
        costs: what `auto` reads and updates.

    Raises:
        UsageError: another name, or fewer than one token.
    """
    if num_assistant_tokens is not None and num_assistant_tokens < 1:
        raise UsageError(f"num_assistant_tokens must be at least 1, not {num_assistant_tokens}")
    if name == "constant":
        return ConstantSchedule(num_assistant_tokens or START_DRAFT)
    if name == "heuristic":
        return HeuristicSchedule(num_assistant_tokens or START_DRAFT)
    if name == "auto":
        return AutoSchedule(costs, num_assistant_tokens or MAX_DRAFT)
    raise UsageError(f"num_assistant_tokens_schedule must be auto, heuristic or constant, not {name!r}")


# Expected tokens per second of a draft.


def best_plan(forecast: Forecast, costs: Costs, trust: Trust, other_rows: int = 0) -> tuple[Plan, float]:
    """The plan with the most expected tokens per second among all k from 1 on, and the factor by which its rate exceeds
    that of a round without a draft.

    With a_j the survival of node j, C(b) the seconds of a forward of b rows next to those of other sequences, and D(k)
    the seconds of a draft of k tokens, this is the largest (1 + a_1 + .. + a_k) / (C(k + 1) + D(k)), DSpark's rule for
    one request. In a share `trust.empty` of the rounds the drafter proposes nothing, which gives 1 / (C(1) + D(1)).
    All k are compared, because C and D may have jumps.

    The plan's floor is the survival below which one more row does not pay. It leaves out the cost of drafting: when a
    drafter knows how sure it is of a token, that cost is already spent.
    """
    plain, *forwards = costs.forwards(len(forecast.survival) + 1, other_rows)
    best, rate = _best(forecast, plain, forwards, costs, trust)
    return Plan(best, rate * (forwards[best - 1] - plain) / best), rate * plain


def expected_rate(forecast: Forecast, costs: Costs, trust: Trust) -> float:
    """Tokens per second of the best draft of at least one token, for a sequence that runs alone; 0.0 if the forecast is
    empty.
    """
    plain, *forwards = costs.forwards(len(forecast.survival) + 1)
    return _best(forecast, plain, forwards, costs, trust)[1]


def _best(forecast: Forecast, plain: float, forwards: Sequence[float], costs: Costs, trust: Trust) -> tuple[int, float]:
    """The best k from 1 on, and its tokens per second; (0, 0.0) if the forecast is empty."""
    if not forwards:
        return 0, 0.0
    drafts, empty = costs.drafts(forecast.source, len(forwards)), trust.empty
    drafting = 1.0 - empty
    brings, takes_none = drafting * trust.share, empty * (plain + drafts[0])
    tokens, best, best_rate, left = 1.0, 0, 0.0, len(forwards)
    # Called several times in every round, for a few numbers: arrays would take several times as long.
    for chance, forward, draft in zip(forecast.survival.tolist(), forwards, drafts, strict=False):
        seconds = takes_none + drafting * (forward + draft)
        if tokens + brings * chance * left < best_rate * seconds:  # even if all other nodes were as likely, and free
            break
        tokens += brings * chance
        left -= 1
        if tokens > best_rate * seconds:
            best, best_rate = len(forwards) - left, tokens / seconds
    return best, best_rate


# Probes: when to try again a draft that does not pay.


PROBE_SHARE = 0.01
"""Share of the time that failing probes may cost."""

MIN_PROBE_INTERVAL = 8
"""Upper bound of the interval between failing probes, in rounds, where they cost so little that PROBE_SHARE would allow
a shorter one."""

PROBE_CREDIT = 1.0
"""Plain steps that probes must gain for the interval to start from 1 again when they next fail."""


class Probes:
    """Decides when to probe: ever more seldom while probes fail, at once again while they succeed.

    The gain of probes is summed up, never below 0 (CUSUM, Page 1954): the sum soon leaves 0 once they gain on average,
    and keeps falling back to it while they lose on average, however often one succeeds.
    """

    def __init__(self) -> None:
        self._credit = 0.0
        self._interval = 1
        self._wait = 0

    def due(self) -> bool:
        """Count one round; whether it should probe."""
        self._wait -= 1
        return self._wait < 0

    def end(self) -> None:
        """Drafts pay again: reset the sum, because it says nothing about the next time that they do not."""
        self._credit = 0.0

    def observe(self, gain: float, loss: float) -> None:
        """Learn from a probe.

        Args:
            gain: plain steps that it saved; negative where it cost some.
            loss: plain steps that a failing probe costs.
        """
        self._credit = min(max(self._credit + gain, 0.0), 2 * PROBE_CREDIT)
        if self._credit >= PROBE_CREDIT:
            self._interval = 1
        if self._credit:
            self._wait = 0
        else:
            self._interval = min(2 * self._interval, max(math.ceil(loss / PROBE_SHARE), MIN_PROBE_INTERVAL))
            self._wait = self._interval


# Pauses: rounds in which the drafter is not consulted.


MIN_ASKED = 4
"""Rounds in which the drafter was consulted before a pause may begin: a single slow one may be an accident."""

RECENT_KEEP = 0.9
"""Weight of earlier rounds after a new one, for the recent gain; remembers about 10."""

LONG_KEEP = 0.99
"""The same for the gain in the long run; remembers about 100."""

MIN_CONTROL_SHARE = 0.02
"""Control time, as a share of a plain round, below which there are no pauses: 0.1 ms do not matter next to a forward of
50 ms."""

LOSS_SHARE = 0.01
"""Share of all time that consulting the drafter in vain may cost. It sets the length of a pause after a loss."""

SHORT_PAUSE = 32
"""Longest pause, in rounds, while consulting has gained in the long run: the text may soon repeat itself again."""

LONG_PAUSE = 256
"""Longest pause, in rounds, where it has not, after several losses in a row. Only models whose rounds take a few
hundred microseconds ever pause, so this is a tenth of a second."""

MAX_SLOWDOWN = 2.0
"""Multiple of the expected time that a round counts for at most: another program may have had the core."""


class Pauses:
    """Decides when a drafter is not consulted at all, from wall time.

    A plan weighs rows and draft steps against tokens, and leaves out the Python code around them. That is a thousandth
    of E2B's round, and a third of a small model's, where a draft that just pays by rows loses by the clock. Therefore
    whole rounds in which the drafter was consulted are compared with plain rounds.
    """

    def __init__(self) -> None:
        self._left = self._asked = 0
        self._longest = SHORT_PAUSE
        self._gain = self._control = self._weight = 0.0
        self._balance = 0.0
        """Plain rounds that consulting the drafter has saved in the long run."""

    def skips_round(self) -> bool:
        """Called as a round begins: whether it belongs to a pause."""
        if not self._left:
            return False
        self._left -= 1
        return True

    def observe(self, tokens: int, seconds: float, control: float, plain: float) -> None:
        """Learn from a round in which the drafter was consulted.

        Args:
            tokens: tokens that the round emitted.
            seconds: wall time of the round.
            control: part of it that a plain round does not have, without drafting.
            plain: wall time of a plain round.
        """
        usual = tokens * plain
        gain = usual - min(seconds, MAX_SLOWDOWN * usual)
        self._gain = RECENT_KEEP * self._gain + gain
        self._balance = LONG_KEEP * self._balance + gain / plain
        self._control = RECENT_KEEP * self._control + control / plain
        self._weight = RECENT_KEEP * self._weight + 1.0
        self._asked += 1
        if self._asked >= MIN_ASKED and self._gain < 0 and self._control > MIN_CONTROL_SHARE * self._weight:
            self._longest = SHORT_PAUSE if self._balance >= 0 else min(2 * self._longest, LONG_PAUSE)
            self._left = min(round(-self._gain / (LOSS_SHARE * plain)), self._longest)
            self._asked = 0
            self._gain = self._control = self._weight = 0.0
