"""How many tokens to draft in a round."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from ondevice.decoding.costs import Costs
from ondevice.decoding.probes import Probes
from ondevice.decoding.record import IdleReason, Round
from ondevice.decoding.rest import Rest
from ondevice.decoding.trust import Trust
from ondevice.drafters.protocol import Drafter, Forecast
from ondevice.errors import UsageError

MOST = 16
"""Tokens that the schedules which choose for themselves draft at most."""

START = 4
"""Tokens that a schedule which was not told how many starts with."""

REFRESH = 128
"""Rounds with a draft after which one goes without, so that the cost of a single row stays known."""


@dataclass(frozen=True)
class Plan:
    """Draft up to `k` tokens, 0: do not call the drafter, for a reason; stop before one less likely to survive than
    `floor`.
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
    def rests(self) -> bool:
        """A round begins: whether it goes without a plan, and without telling the drafter or this of it."""
        ...

    def plan(self, drafter: Drafter, limit: int, beside: int = 0) -> Plan:
        """The next round's plan, for a drafter that has observed everything so far.

        Args:
            drafter: whom to ask what it expects.
            limit: tokens that may be drafted at most; 0 where there is room for one more token only.
            beside: rows that other sequences will have in the same forward, as far as is known.
        """
        ...

    def observe(self, this: Round) -> None:
        """What became of the plan."""
        ...


@dataclass
class ConstantSchedule:
    """Always drafts as many as it was told."""

    num_assistant_tokens: int

    def rests(self) -> bool:
        return False

    def plan(self, drafter: Drafter, limit: int, beside: int = 0) -> Plan:
        return Plan(min(self.num_assistant_tokens, limit))

    def observe(self, this: Round) -> None:
        """Nothing to learn."""


@dataclass
class HeuristicSchedule:
    """Two more when a draft was accepted to its end, one less otherwise; transformers' rule, with an upper bound.

    A round without a draft changes nothing.
    """

    num_assistant_tokens: int

    def rests(self) -> bool:
        return False

    def plan(self, drafter: Drafter, limit: int, beside: int = 0) -> Plan:
        return Plan(min(self.num_assistant_tokens, limit, MOST))

    def observe(self, this: Round) -> None:
        if this.drafted:
            change = 2 if this.accepted == this.depth else -1
            self.num_assistant_tokens = min(max(self.num_assistant_tokens + change, 1), MOST)


class AutoSchedule:
    """Chooses the k, 0 included, with the most expected tokens per second: speculation never loses.

    One drafter's, or one portfolio's. Where it does not pay it is not called, but for probes, which notice when the
    text has changed: with the draft that would lose least, for a single token says little of the cost of the next.

    costs : this machine's, shared by all generations of a model
    most : tokens to draft at most
    """

    def __init__(self, costs: Costs, most: int = MOST) -> None:
        self.costs = costs
        self.most = most
        self._trust: defaultdict[str, Trust] = defaultdict(Trust)
        self._probes = Probes()
        self._forecast: Forecast | None = None
        self._probing = False
        self._since_plain = 0
        self._parked: tuple[Drafter, Plan] | None = None
        """A drafter whose forecast stays as it is and does not pay, and the answer until the next probe."""
        self._rest = Rest()

    def rests(self) -> bool:
        return self._rest.begins()

    def plan(self, drafter: Drafter, limit: int, beside: int = 0) -> Plan:
        due = False
        if self._parked is not None and self._parked[0] is drafter and not (due := self._probes.due()):
            return self._parked[1]
        # Into the unknown by doubling only: nobody knows yet what so many rows cost here.
        limit = min(limit, self.most, 2 * self.costs.most_rows - beside)
        if limit < 1 or self._since_plain >= self._refresh(beside):
            return MEASURING
        forecast = drafter.forecast(limit)
        if not len(forecast.survival):
            return NO_MATCH
        self._parked = None
        trust = forecast.trust or self._trust[forecast.source]
        plan, gain = best_plan(forecast, self.costs, trust, beside)
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
        # What is drafted with for the first time takes longer than it ever will again.
        tried_before = not this.drafted or self.costs.knows(this.source)
        self.costs.observe(this)
        forward = this.forward
        if forward is not None and forward.rows == this.rows and tried_before:  # alone in its forward
            seconds = forward.seconds + this.draft_seconds + this.asking_seconds
            self._rest.observe(len(this.token_ids), seconds, this.asking_seconds, self.costs.forwards(1)[0])
        self._since_plain = self._since_plain + 1 if this.drafted else 0
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

    def _refresh(self, beside: int) -> int:
        """Rounds after which the cost of a single row is measured again: everything is compared with it."""
        measurements = self.costs.measurements(1 + beside)
        return min(2 ** (measurements + 1), REFRESH) if measurements else 0


def best_plan(forecast: Forecast, costs: Costs, trust: Trust, beside: int = 0) -> tuple[Plan, float]:
    """The k from 1 on with the most expected tokens per second, the survival below which one more row does not pay, and
    how many times as many tokens per second that is as without a draft.

    With a_j the chance that the target takes node j and all before it on its path, C(b) the seconds of a forward of b
    rows beside those of other sequences, D(k) those of a draft of k tokens: the largest
    (1 + a_1 + .. + a_k) / (C(k + 1) + D(k)), which is DSpark's rule for one request; a share `trust.empty` of the
    rounds gives 1 / (C(1) + D(1)) instead. All k are compared, for C and D may have jumps.

    The floor leaves the cost of drafting out: when a drafter knows how sure it is of a token, that is already spent.
    """
    plain, *forwards = costs.forwards(len(forecast.survival) + 1, beside)
    best, rate = _best(forecast, plain, forwards, costs, trust)
    return Plan(best, rate * (forwards[best - 1] - plain) / best), rate * plain


def expected_rate(forecast: Forecast, costs: Costs, trust: Trust) -> float:
    """Tokens per second of the best draft, one at least, of a sequence that is alone; 0.0 where there is none."""
    plain, *forwards = costs.forwards(len(forecast.survival) + 1)
    return _best(forecast, plain, forwards, costs, trust)[1]


def _best(forecast: Forecast, plain: float, forwards: Sequence[float], costs: Costs, trust: Trust) -> tuple[int, float]:
    """The best k from 1 on, and its tokens per second; two zeros where there is nothing to draft."""
    if not forwards:
        return 0, 0.0
    drafts, empty = costs.drafts(forecast.source, len(forwards)), trust.empty
    drafting = 1.0 - empty
    brings, takes_none = drafting * trust.share, empty * (plain + drafts[0])
    tokens, best, best_rate, left = 1.0, 0, 0.0, len(forwards)
    # Several times in every round, for a handful of numbers: arrays would take several times as long.
    for chance, forward, draft in zip(forecast.survival.tolist(), forwards, drafts, strict=False):
        seconds = takes_none + drafting * (forward + draft)
        if tokens + brings * chance * left < best_rate * seconds:  # even if all the others were as likely, and free
            break
        tokens += brings * chance
        left -= 1
        if tokens > best_rate * seconds:
            best, best_rate = len(forwards) - left, tokens / seconds
    return best, best_rate


def make_schedule(name: str, num_assistant_tokens: int | None, costs: Costs) -> Schedule:
    """The schedule of that name.

    Args:
        name: `constant`, `heuristic` or `auto`.
        num_assistant_tokens: tokens per draft for `constant`, those of the first draft for `heuristic`, the most for
            `auto`; None for the schedule's own default.
        costs: what `auto` reads and teaches.

    Raises:
        UsageError: another name, or fewer than one token.
    """
    if num_assistant_tokens is not None and num_assistant_tokens < 1:
        raise UsageError(f"num_assistant_tokens must be at least 1, not {num_assistant_tokens}")
    if name == "constant":
        return ConstantSchedule(num_assistant_tokens or START)
    if name == "heuristic":
        return HeuristicSchedule(num_assistant_tokens or START)
    if name == "auto":
        return AutoSchedule(costs, num_assistant_tokens or MOST)
    raise UsageError(f"num_assistant_tokens_schedule must be auto, heuristic or constant, not {name!r}")
