"""How many tokens to draft in a round, with which drafter, and whether to ask the drafters at all.

In: the drafters' forecasts, this machine's `Costs`, and the finished rounds. Out: a `RoundPlan` for the next one. There
is one rule for each question:

- Choice: a round should bring the most tokens beyond what its time would bring at the speed of the last rounds
  (`Controller.plan`). Plain decoding is one of the choices.
- Length: a draft ends before a token whose chance of being accepted is not worth its row, or its draft step, at that
  speed (`DraftRequest.pays_row`, `pays_step`). So a drafter that is sure of its tokens drafts more of them.
- Exploration: each drafter has a credit, in plain rounds. What its rounds gain or lose against plain decoding is added
  to it, and a drafter in debt is not asked until CREDIT_SHARE of the time has paid its debt. No draft risks more than
  the credit that is left. So all drafting that does not pay, for whatever reason (the text changed, forecasts are
  wrong, asking takes longer than it gains), costs at most that share of the time, and for each drafter CREDIT rounds
  once and NEW_CREDIT in every generation.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from ondevice.engines.protocol import MAX_DRAFTED, MAX_ROUNDS
from ondevice.errors import UsageError
from ondevice.generate.costs import LIMIT, Costs
from ondevice.generate.drafters.protocol import Drafter, Forecast
from ondevice.generate.stats import IdleReason, Round

MAX_DRAFT = 16
"""Most tokens of a draft with `auto`, unless the caller chose a number; the length up to which `heuristic` grows."""

START_DRAFT = 4
"""Tokens that `constant` and `heuristic` draft at first where the caller did not choose a number."""

CREDIT_SHARE = 0.01
"""Share of the time that drafting may lose against plain decoding in the long run."""

CREDIT = 8.0
"""Largest credit of a drafter, in plain rounds, and the one that it starts with: a bad moment does not cost it its
place, and when the text turns, no more than this is lost. With 3, simulated drafts that gain a twentieth on average
reached 0.93 of their best speed, with 8 more than 0.95."""

NEW_CREDIT = 0.5
"""Addition of a generation to the credit of a drafter that has less: its text may suit one that lost on the last."""

MAX_ASKING = 4.0
"""Plain rounds that asking for a draft counts for at most: the process may have been stopped meanwhile."""

REFRESH = 128
"""Rounds with a draft after which `auto` runs one without, so that the cost of a single row stays known."""

PLAIN_FORWARDS = 4
"""Forwards of a round in which drafters were asked and nothing is drafted, where the engine runs several in one call
(`MultiStep`): to ask after every token would cost all that one call for several saves. They double with each further
round without a draft: a call costs SmolLM2 0.2 of a forward, so that always four lost 0.03 where drafts do not pay."""

MEASURING_ROUNDS = 4
"""Rounds of a draft of one token that measure its cost, where the engine drafts by itself: one alone would bear all the
time of a call, 0.4 of a forward of SmolLM2."""

SPEED_KEEP = 0.95
"""Weight of earlier rounds in the speed that drafts are judged by, after a new one; remembers about 20."""


@dataclass(frozen=True)
class RoundPlan:
    """Let `drafter` draft up to `nodes` tokens; None drafts nothing, and `reason` says why.

    row_floors : survival (see `Forecast`) below which the draft's first, second, ... token is not worth its row
    step_floors : by step, what it adds to the floor of the token that it computes
    rounds : by tokens of a draft, from 1 on, the rounds of them that the credit pays for, in which the engine may draft
        by itself: see `EngineDrafter`
    """

    drafter: Drafter | None
    nodes: int = 0
    row_floors: Sequence[float] = ()
    step_floors: Sequence[float] = ()
    rounds: Sequence[int] = ()
    reason: IdleReason = "unprofitable"


UNPROFITABLE = RoundPlan(None)
MEASURING = RoundPlan(None, reason="measuring")
NO_MATCH = RoundPlan(None, reason="no_match")
NO_ROOM = RoundPlan(None, reason="no_room")


class Controller:
    """Plans the rounds of one generation at a time, and learns from them. This class is `auto`.

    costs : this machine's, shared by all generations of a model
    most : tokens to draft at most
    """

    def __init__(self, costs: Costs, most: int = MAX_DRAFT) -> None:
        self.costs = costs
        self.most = most
        self._credit: dict[str, float] = {}
        """Plain rounds that a drafter may lose, by its name."""
        self._tokens = self._rounds = 0.0
        """Tokens of recent rounds, and their time in plain rounds."""
        self._since_plain = 0
        """Rounds with a draft since the last one without."""
        self._rest = 0
        """Forwards to come before which no drafter is asked; the credits already contain their share of the time."""
        self._income = 0.0
        """Plain rounds that each of these adds to a drafter's credit."""
        self._resting = False
        """Whether this round is one of them."""
        self._plain_forwards = PLAIN_FORWARDS
        """Forwards of the next round without a draft."""
        self._asked: list[str] = []
        """The drafters asked in this round."""
        self._chosen: str | None = None
        """The drafter that this round's plan chose."""

    def begin(self) -> None:
        """Start a generation."""
        unpaid = self._rest * self._income
        self._rest, self._plain_forwards = 0, PLAIN_FORWARDS
        for name, credit in self._credit.items():
            self._credit[name] = max(credit - unpaid, min(credit - unpaid + NEW_CREDIT, NEW_CREDIT))

    def asked(self, drafters: Sequence[Drafter]) -> list[Drafter]:
        """The drafters worth asking in the next round. Called once as it begins; where there are none, it has no plan.

        Where all are in debt, nothing is measured or decided until the first has paid: such a round costs next to
        nothing, also on models whose forward takes a fraction of a millisecond.
        """
        chosen: list[Drafter] = []
        self._resting = self._rest > 0
        if self._resting:
            self._rest -= 1
        else:
            chosen = [drafter for drafter in drafters if self._credit.get(drafter.name, CREDIT) >= 0]
            if not chosen:
                self._income = CREDIT_SHARE / len(drafters)
                self._rest = math.ceil(-max(self._credit[drafter.name] for drafter in drafters) / self._income)
                for drafter in drafters:
                    self._credit[drafter.name] += self._rest * self._income
        self._asked, self._chosen = [drafter.name for drafter in chosen], None
        return chosen

    def plain_forwards(self) -> int:
        """After `asked`: the number of forwards of this round and later ones, if it drafts nothing."""
        return 1 + self._rest if self._resting else self._plain_forwards

    def plan(self, drafters: Sequence[Drafter], limit: int, other_rows: int = 0) -> RoundPlan:
        """Plan the next round.

        With a_i the survival of a draft's node i, F(b) the time of a forward of b rows next to those of other
        sequences, D(d) the time of a draft of depth d, and v the recent speed, a draft of k nodes is worth
        a_1 + .. + a_k - v * (F(k + 1) + D(d) - F(1)) tokens more than a plain round. The largest worth over all
        drafters and k makes the most tokens of a long run's time (the renewal-reward theorem). A rule that maximised
        tokens per second of each round alone, as DSpark's does, would end a sure draft too early, because its own round
        is faster than others.

        Args:
            drafters: those asked; they have observed everything so far.
            limit: tokens that may be drafted at most; 0 where only one more token may be emitted.
            other_rows: rows that other sequences will have in the same forward, as far as is known.
        """
        limit = min(limit, self.most)
        if limit < 1:
            return NO_ROOM
        if self._since_plain >= self._refresh(other_rows):
            return MEASURING
        speed = self.speed()
        offers = self._offers(drafters, limit, other_rows, speed)
        if not offers:
            return NO_MATCH
        worth, drafter, forecast = max(offers, key=lambda offer: offer[0])
        if worth <= 0.0:
            untimed = [
                drafter
                for _, drafter, forecast in offers
                if not self.costs.knows(forecast.source) and self._worth(forecast, other_rows, speed / LIMIT) > 0.0
            ]
            if not untimed:
                return UNPROFITABLE
            # The cost is assumed, or another process measured it at another moment: a few drafts of one token show it.
            self._chosen = untimed[0].name
            return RoundPlan(untimed[0], 1, rounds=[MEASURING_ROUNDS])
        self._chosen = drafter.name
        count, source = len(forecast.survival), forecast.source
        rows, steps = self.costs.forwards(1 + count, other_rows, source), self.costs.drafts(source, count)
        credit = rows[0] * max(self._credit.get(drafter.name, CREDIT), 0.0)
        risks = [row - rows[0] + draft for row, draft in zip(rows[1:], forecast.by_nodes(steps), strict=False)]
        nodes = sum(risk <= credit for risk in risks)
        price = speed / rows[0]
        row_floors = [price * (after - before) for before, after in pairwise(below(rows))]
        step_floors = [price * (after - before) for before, after in pairwise([0.0, *steps])]
        rounds = [int(min(max(credit / risk, 1), MAX_ROUNDS)) if risk > 0 else MAX_ROUNDS for risk in risks]
        return RoundPlan(drafter, max(nodes, 1), row_floors, step_floors, rounds)

    def observe(self, this: Round, *others: Round) -> None:
        """Learn from the finished round; or from those of one call of the engine, which cost the same."""
        if self._resting:
            self._rest -= this.forwards - 1
            return
        self.costs.observe(this)
        forward = this.forward
        if forward is None or forward.rows != forward.wanted:
            return
        spent, plain = self.costs.charge(this), self.costs.forwards(1, forward.rows - this.rows)[0]
        count, tokens = 1 + len(others), sum(len(each.token_ids) for each in (this, *others))
        spent *= count
        asking = count * (this.control_seconds + (0.0 if this.drafted else this.draft_seconds))
        self._since_plain = self._since_plain + count if this.drafted else 0
        self._plain_forwards = PLAIN_FORWARDS if this.drafted else 2 * this.forwards
        self._tokens = SPEED_KEEP**count * self._tokens + tokens
        self._rounds = SPEED_KEEP**count * self._rounds + spent
        gain = tokens - spent - min(asking / plain, MAX_ASKING)
        charged = self._asked if self._chosen is None else [self._chosen]
        for name in charged:
            self._credit[name] = min(self._credit.get(name, CREDIT) + gain / len(charged), CREDIT)
        debtors = [name for name, credit in self._credit.items() if credit < 0]
        for name in debtors:
            self._credit[name] += CREDIT_SHARE * spent / len(debtors)

    def speed(self) -> float:
        """Tokens that recent rounds emitted in the time of a plain round, at least 1: what drafts are judged by."""
        return max(self._tokens / self._rounds, 1.0) if self._rounds else 1.0

    def _offers(
        self, drafters: Sequence[Drafter], limit: int, other_rows: int, speed: float
    ) -> list[tuple[float, Drafter, Forecast]]:
        """The worth and the forecast of each drafter that has tokens to propose: see `plan`."""
        forecasts = ((drafter, drafter.forecast(limit)) for drafter in drafters)
        return [
            (self._worth(forecast, other_rows, speed), drafter, forecast)
            for drafter, forecast in forecasts
            if len(forecast.survival)
        ]

    def _worth(self, forecast: Forecast, other_rows: int, speed: float) -> float:
        """The worth of the best draft of at least one token, in tokens: see `plan`."""
        # Called in every round, for a few numbers: arrays would take several times as long.
        tokens: list[float] = list(accumulate(forecast.survival.tolist()))
        rows = self.costs.forwards(1 + len(tokens), other_rows, forecast.source)
        drafts = forecast.by_nodes(self.costs.drafts(forecast.source, len(tokens)))
        price = speed / rows[0]
        worths = (
            brought - price * (forward - rows[0] + draft)
            for brought, forward, draft in zip(tokens, rows[1:], drafts, strict=False)
        )
        return max(worths)

    def _refresh(self, other_rows: int) -> int:
        """Rounds after which the cost of a single row, which everything is compared with, is measured again."""
        runs = self.costs.runs(1 + other_rows)
        return min(2 ** min(runs + 1, 8), REFRESH) if runs else 0


class FixedLength(Controller):
    """Always drafts the same number of tokens: `constant`. Of several drafters, the one whose draft is worth most.

    A single drafter neither reads costs nor teaches any: they are shared with `auto`, for which a draft costs less
    where the engine makes it (`MultiStep`).
    """

    _chooses = False
    _at_once = MAX_ROUNDS
    """Rounds in which the engine may draft by itself."""

    def asked(self, drafters: Sequence[Drafter]) -> list[Drafter]:
        return list(drafters)

    def plan(self, drafters: Sequence[Drafter], limit: int, other_rows: int = 0) -> RoundPlan:
        nodes, self._chooses = min(self.most, limit), len(drafters) > 1
        if nodes < 1:
            return NO_ROOM
        if not self._chooses:
            rounds = [self._at_once] * nodes if nodes <= MAX_DRAFTED else []  # longer drafts the engine does not make
            return RoundPlan(drafters[0], nodes, rounds=rounds)
        offers = self._offers(drafters, nodes, other_rows, 1.0)
        chosen = max(offers, key=lambda offer: offer[0])[1] if offers else drafters[0]
        return RoundPlan(chosen, nodes)

    def observe(self, this: Round, *others: Round) -> None:
        if self._chooses:
            super().observe(this, *others)


class HeuristicLength(FixedLength):
    """Two tokens more after a draft that was accepted to its end, one less after another; transformers' rule, with an
    upper bound of MAX_DRAFT. A round without a draft changes nothing.
    """

    _at_once = 0  # each round decides on the length of the next

    def observe(self, this: Round, *others: Round) -> None:
        super().observe(this, *others)
        if this.drafted:
            change = 2 if this.accepted == this.depth else -1
            self.most = min(max(self.most + change, 1), MAX_DRAFT)


def below(costs: Sequence[float]) -> list[float]:
    """The largest convex sequence that is nowhere above `costs`: slopes that never fall, with jumps spread over the
    counts before them, so that a draft that pays only beyond a jump is not ended before it.
    """
    hull: list[int] = []
    for place, cost in enumerate(costs):
        while len(hull) > 1:
            first, second = hull[-2:]
            if (costs[second] - costs[first]) * (place - first) < (cost - costs[first]) * (second - first):
                break
            hull.pop()
        hull.append(place)
    convex: list[float] = [costs[0]]
    for first, second in pairwise(hull):
        step = (costs[second] - costs[first]) / (second - first)
        convex += [costs[first] + step * count for count in range(1, second - first + 1)]
    return convex


def make_controller(name: str, num_assistant_tokens: int | None, costs: Costs) -> Controller:
    """The controller of that name.

    Args:
        name: `constant`, `heuristic` or `auto`.
        num_assistant_tokens: tokens per draft for `constant`, in the first draft of the controller for `heuristic`, at
            most for `auto`; None for the controller's own default.
        costs: what it reads and updates.

    Raises:
        UsageError: another name, or fewer than one token.
    """
    if num_assistant_tokens is not None and num_assistant_tokens < 1:
        raise UsageError(f"num_assistant_tokens must be at least 1, not {num_assistant_tokens}")
    if name == "constant":
        return FixedLength(costs, num_assistant_tokens or START_DRAFT)
    if name == "heuristic":
        return HeuristicLength(costs, num_assistant_tokens or START_DRAFT)
    if name == "auto":
        return Controller(costs, num_assistant_tokens or MAX_DRAFT)
    raise UsageError(f"num_assistant_tokens_schedule must be auto, heuristic or constant, not {name!r}")
