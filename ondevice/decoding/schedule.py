"""How many tokens to draft in a round."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from ondevice.decoding.costs import Costs
from ondevice.decoding.record import Round
from ondevice.drafters.protocol import Drafter, Forecast
from ondevice.errors import UsageError

MOST = 16
"""Tokens that the schedules which choose for themselves draft at most."""

START = 4
"""Tokens that a schedule which was not told how many starts with."""

REFRESH = 128
"""Rounds with a draft after which one goes without, so that the cost of a single row stays known."""

PROBE_SHARE = 0.01
"""Share of the time that probes of a drafter which does not pay may cost."""

PATIENCE = 4.0
"""Plain steps that a drafter may lose, in recent rounds together, before it is parked."""

PROFIT_KEEP = 0.95
"""Weight of the profit of earlier rounds after a new one; remembers about 20."""

CONVINCING = 2
"""Probes that must pay in a row for a parked drafter to be believed again."""


@dataclass(frozen=True)
class Plan:
    """Draft up to `k` tokens, 0: do not call the drafter; stop before one less likely to survive than `floor`."""

    k: int
    floor: float = 0.0


class Schedule(Protocol):
    def plan(self, drafter: Drafter, limit: int) -> Plan:
        """The next round's plan, for a drafter that has observed everything so far.

        Args:
            limit: tokens that may be drafted at most; 0 where there is room for one more token only.
        """
        ...

    def observe(self, this: Round) -> None:
        """What became of the plan. Called after every round but the prefill."""
        ...


@dataclass
class ConstantSchedule:
    """Always drafts as many as it was told."""

    num_assistant_tokens: int

    def plan(self, drafter: Drafter, limit: int) -> Plan:
        return Plan(min(self.num_assistant_tokens, limit))

    def observe(self, this: Round) -> None:
        """Nothing to learn."""


@dataclass
class HeuristicSchedule:
    """Two more when every draft was accepted, one less when any was rejected; transformers' rule, with an upper bound.

    A round without a draft changes nothing.
    """

    num_assistant_tokens: int

    def plan(self, drafter: Drafter, limit: int) -> Plan:
        return Plan(min(self.num_assistant_tokens, limit))

    def observe(self, this: Round) -> None:
        if this.drafted:
            change = 2 if this.accepted == this.drafted else -1
            self.num_assistant_tokens = min(max(self.num_assistant_tokens + change, 1), MOST)


class AutoSchedule:
    """Chooses the k, 0 included, with the most expected tokens per second: speculation never loses.

    With a_j the forecast chance that the target takes the first j tokens, C(b) the cost of a forward of b rows and d
    that of a drafted token, k maximises (1 + a_1 + .. + a_k) / (C(k + 1) + k d); DSpark's rule for one request.

    A drafter that does not pay is not called, except for probes of one token, which notice when the text has changed.
    Failed probes back off until they cost `PROBE_SHARE` of the time. A drafter whose forecasts promise more than comes
    true is parked, and left to probes, once its rounds have lost `PATIENCE` plain steps.

    costs : this machine's, shared by all generations of a model
    most : tokens to draft at most
    """

    def __init__(self, costs: Costs, most: int = MOST) -> None:
        self.costs = costs
        self.most = most
        self._probes = Probes()
        self._parked = False
        self._profit = 0.0
        self._since_plain = 0
        self._planned: tuple[str, bool] | None = None

    def plan(self, drafter: Drafter, limit: int) -> Plan:
        self._planned = None
        limit = min(limit, self.most)
        if limit < 1 or self._since_plain >= self._refresh():
            return Plan(0)
        forecast = drafter.forecast(limit)
        if not len(forecast.survival):
            return Plan(0)
        plan = best_plan(forecast, self.costs)
        probe = self._parked or plan.k == 0
        if probe:
            if not self._probes.due():
                return Plan(0)
            plan = Plan(1)
        self._planned = (forecast.source, probe)
        return plan

    def _refresh(self) -> int:
        """Rounds after which the cost of a single row is measured again: what everything is compared with."""
        measurements = self.costs.measurements(1)
        return min(2 ** (measurements + 1), REFRESH) if measurements else 0

    def observe(self, this: Round) -> None:
        self.costs.observe(this)
        self._since_plain = self._since_plain + 1 if this.drafted else 0
        if self._planned is None:
            return
        (source, probe), self._planned = self._planned, None
        forwards = self.costs.forwards(max(this.rows, 2))
        draft = self.costs.draft(source)
        gain = this.accepted + 1 - (forwards[this.rows - 1] + max(this.drafted, 1) * draft) / forwards[0]
        if probe:
            self._probes.observe(
                gain > 0, most=math.ceil((forwards[1] + draft - forwards[0]) / forwards[0] / PROBE_SHARE)
            )
            if self._probes.streak >= CONVINCING:
                self._parked = False
        else:
            self._profit = PROFIT_KEEP * self._profit + gain
            if self._profit < -PATIENCE:
                self._parked = True
                self._profit = 0.0


def best_plan(forecast: Forecast, costs: Costs) -> Plan:
    """The k with the most expected tokens per second, and the survival below which one more row does not pay.

    The floor leaves the cost of drafting out: when a drafter knows how sure it is of a token, that is already spent.
    """
    most = len(forecast.survival)
    forwards = costs.forwards(most + 1)
    seconds = forwards + np.arange(most + 1) * costs.draft(forecast.source)
    tokens = 1.0 + np.concatenate([[0.0], np.cumsum(forecast.survival, dtype=np.float64)])
    rates = tokens / seconds
    k = int(rates.argmax())
    if k == 0:
        return Plan(0)
    return Plan(k, float(rates[k] * (forwards[k] - forwards[0]) / k))


class Probes:
    """When to try again what did not pay: ever more rarely while it fails, at once while it succeeds."""

    def __init__(self) -> None:
        self.streak = 0
        self._interval = 1
        self._wait = 0

    def due(self) -> bool:
        """Count one round; whether it should probe."""
        self._wait -= 1
        return self._wait < 0

    def observe(self, paid: bool, most: int) -> None:
        """A probe's outcome; `most` rounds pass between two probes at most."""
        if paid:
            self.streak += 1
            self._interval = max(self._interval // 2, 1)
            self._wait = 0
        else:
            self.streak = 0
            self._interval = min(2 * self._interval, max(most, 8))
            self._wait = self._interval


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
