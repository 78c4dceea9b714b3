from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ondevice.engines.protocol import DraftStep
from ondevice.generate.controller import FixedLength
from ondevice.generate.costs import Costs
from ondevice.generate.drafters.protocol import DraftRequest
from ondevice.generate.drafters.simulated import FIRST, NEITHER, SECOND, SimulatedDrafter, make_luck
from ondevice.generate.loop import generate, run
from ondevice.generate.request import Limits, SamplingOptions
from ondevice.generate.sampling.sampler import Sampler
from tests.fixtures.toy_engine import ToyEngine, ToySession

PROMPT = (2, 3, 5)
COUNT = 40


class SessionWithDrafter(ToySession):
    engine: EngineWithDrafter

    def draft_step(self, token, hidden, depth=0):
        assert hidden.shape == (self.engine.target.hidden_size,)
        self.engine.draft_steps += 1
        return DraftStep(np.arange(3), np.zeros(3, np.float32), hidden)


class EngineWithDrafter(ToyEngine):
    drafter: Any = "a drafter, whose configuration nothing here reads"

    def __init__(self):
        super().__init__()
        self.draft_steps = 0

    def open_session(self):
        return SessionWithDrafter(self)


def rounds_of(engine, drafter=None, k=3):
    controller = FixedLength(Costs(), k) if drafter else None
    drafters = [drafter] if drafter else []
    sampler = Sampler(SamplingOptions(temperature=0.0))
    loop = generate(engine.open_session(), PROMPT, sampler, Limits(COUNT), drafters=drafters, controller=controller)
    return list(run(loop, lambda rows: engine.forward([rows])[0]))


def tokens_of(rounds):
    return [token for this in rounds for token in this.token_ids]


@pytest.fixture
def continuation():
    return tokens_of(rounds_of(ToyEngine()))


def drafter_of(continuation, luck, engine=None, *, trees=False):
    drafter = SimulatedDrafter(engine or ToyEngine(), continuation, trees=trees)
    drafter.luck = np.asarray(luck)
    return drafter


def test_always_right(continuation):
    rounds = rounds_of(ToyEngine(), drafter_of(continuation, [FIRST] * COUNT))
    assert tokens_of(rounds) == continuation
    assert all(this.accepted == this.drafted for this in rounds)
    assert len(rounds) == 11  # the prefill's token, nine times 1 + 3, and 3 for which there is room


def test_always_wrong(continuation):
    rounds = rounds_of(ToyEngine(), drafter_of(continuation, [NEITHER] * COUNT))
    assert tokens_of(rounds) == continuation
    assert sum(this.accepted for this in rounds) == 0


def test_it_pays_for_every_token(continuation):
    engine = EngineWithDrafter()
    rounds = rounds_of(engine, drafter_of(continuation, make_luck(COUNT, 0.5, 0, 1), engine))
    assert tokens_of(rounds) == continuation
    assert engine.draft_steps == sum(this.drafted for this in rounds) > 0


def test_a_second_child_helps_where_the_first_is_wrong(continuation):
    luck = [FIRST, *[SECOND, FIRST, NEITHER] * (COUNT // 3)]
    chain, tree = (rounds_of(ToyEngine(), drafter_of(continuation, luck, trees=trees), k=6) for trees in (False, True))
    assert tokens_of(chain) == tokens_of(tree) == continuation
    assert len(tree) < len(chain)
    assert any(this.depth < this.drafted for this in tree)


def test_a_draft_ends_where_its_next_step_does_not_pay(continuation):
    """As a drafter that runs steps ends it: a step that is dear is not run, though the row would pay."""
    engine = EngineWithDrafter()
    lengths = []
    for floors in ([0.0] * 6, [0.0, 0.0, 0.95, 0.0, 0.0, 0.0]):
        drafter = drafter_of(continuation, [FIRST] * COUNT, engine)
        drafter.begin(PROMPT, engine.open_session())
        lengths.append(len(drafter.draft(DraftRequest(6, step_floors=floors))))
    assert lengths == [6, 2]
