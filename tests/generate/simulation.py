"""A target and a drafter made of dice and a simulated clock, to see what a controller makes of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import takewhile

import numpy as np

from ondevice.engines.protocol import Outputs, Session
from ondevice.generate.controller import UNPROFITABLE, Controller
from ondevice.generate.drafters.acceptance import PositionAcceptance
from ondevice.generate.drafters.protocol import Draft, Drafter, DraftRequest, Forecast
from ondevice.generate.stats import ForwardCost, Round
from tests.drafters.rounds import observe


@dataclass
class DiceDrafter:
    """Drafts what pays; learns its acceptance by position as the MTP drafter does."""

    name: str = "dice"
    acceptance: PositionAcceptance = field(default_factory=PositionAcceptance)
    drafted: int = 0

    def begin(self, prompt_ids: Sequence[int], session: Session) -> None: ...

    def forecast(self, nodes: int) -> Forecast:
        return Forecast(self.acceptance.survival(nodes), self.name)

    def draft(self, request: DraftRequest) -> Draft:
        """As long as its forecast pays."""
        survival = self.forecast(request.nodes).survival.tolist()
        pays = (request.pays_step(node, chance) for node, chance in enumerate(survival))
        self.drafted = len(list(takewhile(bool, pays)))
        return Draft.chain([0] * self.drafted, source=self.name)

    def observe(self, emitted: Sequence[int], outputs: Outputs, path: Sequence[int]) -> None:
        self.acceptance.learn(self.drafted, len(emitted) - 1, len(emitted))
        self.drafted = 0

    def forget(self) -> None: ...


class Boaster(DiceDrafter):
    """Expects 0.9 of every token, whatever becomes of them."""

    def forecast(self, nodes: int) -> Forecast:
        return Forecast(np.float32(0.9) ** np.arange(1, nodes + 1, dtype=np.float32), self.name)


class Pessimist(DiceDrafter):
    """Expects 0.15 of every token."""

    def forecast(self, nodes: int) -> Forecast:
        return Forecast(np.float32(0.15) ** np.arange(1, nodes + 1, dtype=np.float32), self.name)


@dataclass(frozen=True)
class World:
    """forward : seconds of a forward by its rows
    draft : seconds per drafted token
    chance : acceptance of a token, by round and drafter
    noise : relative standard deviation of the clock
    spikes : share of rounds that take ten times as long
    neighbours : factor of the time while other programs run: they begin in one round of 12, and end in one of 5
    """

    forward: Callable[[int], float]
    draft: float
    chance: Callable[[int, str], float]
    noise: float = 0.0
    spikes: float = 0.0
    neighbours: float = 1.0

    @classmethod
    def linear(cls, slope: float, chance: float, draft: float = 0.03) -> World:
        return cls(lambda rows: 1 + slope * (rows - 1), draft, lambda index, source: chance)

    def best_speed(self, most: int = 16) -> float:
        """Tokens per second of the best constant k, 0 included, at the first round's acceptance."""
        a = self.chance(0, "dice")
        return max(sum(a**j for j in range(k + 1)) / (self.forward(k + 1) + self.draft * k) for k in range(most + 1))


def simulate(
    controller: Controller,
    drafters: Drafter | Sequence[Drafter],
    world: World,
    rounds: int,
    limit: int = 16,
    seed: int = 0,
    asking: float = 0.0,
) -> list[Round]:
    """Let the controller decide `rounds` rounds, in which asking the drafters takes `asking` seconds."""
    drafters = drafters if isinstance(drafters, Sequence) else [drafters]
    rng = np.random.default_rng(seed)
    done, slowed = [], False
    for index in range(rounds):
        asked = controller.asked(drafters)
        plan = controller.plan(asked, limit) if asked else UNPROFITABLE
        draft = Draft.empty()
        if plan.drafter is not None:
            draft = plan.drafter.draft(DraftRequest(plan.nodes, plan.row_floors, plan.step_floors))
        drafted = len(draft)
        misses = np.flatnonzero(rng.random(drafted) >= world.chance(index, draft.source))
        accepted = int(misses[0]) if len(misses) else drafted
        for drafter in drafters:
            observe(drafter, [0] * (accepted + 1))
        jitter = max(1 + world.noise * rng.standard_normal(), 0.5) * (10 if rng.random() < world.spikes else 1)
        slowed = rng.random() >= 1 / 5 if slowed else rng.random() < 1 / 12
        jitter *= world.neighbours if slowed else 1.0
        draft_seconds = world.draft * drafted * jitter
        seconds = world.forward(drafted + 1) * jitter
        control = asking if asked else 0.0
        this = Round(
            token_ids=(0,) * (accepted + 1),
            drafted=drafted,
            accepted=accepted,
            source=draft.source,
            rows=drafted + 1,
            depth=drafted,
            seconds=seconds + draft_seconds + control,
            draft_seconds=draft_seconds,
            control_seconds=control,
            idle=None if drafted else plan.reason,
            forward=ForwardCost(drafted + 1, drafted + 1, seconds),
        )
        controller.observe(this)
        done.append(this)
    return done


def speed(rounds: Sequence[Round], world: World) -> float:
    """Tokens per simulated second, by a clock without noise."""
    seconds = sum(world.forward(this.rows) + world.draft * this.drafted + this.control_seconds for this in rounds)
    return sum(len(this.token_ids) for this in rounds) / seconds
