from __future__ import annotations

import numpy as np
import pytest

from benchmarks.simulated_drafter import FIRST, NEITHER, SECOND, SimulatedDrafter, make_luck
from ondevice.decoding.limits import Limits
from ondevice.decoding.loop import generate, run
from ondevice.decoding.sampling import Sampler
from ondevice.decoding.sampling_options import SamplingOptions
from ondevice.decoding.schedule import ConstantSchedule
from ondevice.drafters.acceptance import PositionAcceptance
from ondevice.engines.protocol import DraftStep
from tests.drafters.rounds import NO_SESSION, draft, observe
from tests.toy_engine import ToyEngine, ToySession

PROMPT = (2, 3, 5)
COUNT = 40


class SessionWithDrafter(ToySession):
    engine: EngineWithDrafter

    def draft_step(self, token, hidden):
        assert hidden.shape == (self.engine.target.hidden_size,)
        self.engine.draft_steps += 1
        return DraftStep(np.arange(3), np.zeros(3, np.float32), hidden)


class EngineWithDrafter(ToyEngine):
    has_drafter = True

    def __init__(self):
        super().__init__()
        self.draft_steps = 0

    def open_session(self):
        return SessionWithDrafter(self)


def rounds_of(engine, drafter=None, k=3):
    schedule = ConstantSchedule(k) if drafter else None
    sampler = Sampler(SamplingOptions(temperature=0.0))
    loop = generate(engine.open_session(), PROMPT, sampler, Limits(COUNT), drafter=drafter, schedule=schedule)
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


def test_wrong_where_it_was_told_to_be(continuation):
    luck = [FIRST] * COUNT
    luck[2] = NEITHER
    rounds = rounds_of(ToyEngine(), drafter_of(continuation, luck))
    assert tokens_of(rounds) == continuation
    assert [this.accepted for this in rounds[1:4]] == [1, 3, 3]


def test_it_pays_for_every_token(continuation):
    engine = EngineWithDrafter()
    rounds = rounds_of(engine, drafter_of(continuation, make_luck(COUNT, 0.5, 0, 1), engine))
    assert tokens_of(rounds) == continuation
    assert engine.draft_steps == sum(this.drafted for this in rounds) > 0


def test_its_forecast_is_what_verdicts_taught(continuation):
    lucky, unlucky = (drafter_of(continuation, [luck] * COUNT) for luck in (FIRST, NEITHER))
    start = PositionAcceptance().survival(4)
    assert np.array_equal(lucky.forecast(4).survival, start)
    for drafter in (lucky, unlucky):
        rounds_of(ToyEngine(), drafter)
    assert (lucky.forecast(4).survival > start).all()
    assert (unlucky.forecast(4).survival < start).all()


def test_a_draft_ends_at_the_floor(continuation):
    drafter = drafter_of(continuation, [FIRST] * COUNT)
    drafter.begin(PROMPT, NO_SESSION)
    observe(drafter, continuation[:1])
    third = float(drafter.forecast(5).survival[2])
    assert draft(drafter, 5, third - 1e-6).tokens.tolist() == continuation[1:4]
    assert len(draft(drafter, 5, 1.0)) == 0


@pytest.mark.parametrize("acceptance", [0.0, 0.3, 0.45, 0.9])
def test_luck_is_as_good_as_asked(acceptance):
    draws = [make_luck(500, acceptance, repeat, 2) for repeat in range(2)]
    assert np.mean(draws[0] == FIRST) == pytest.approx(acceptance, abs=0.06)
    assert np.mean(np.array(draws) == FIRST) == pytest.approx(acceptance, abs=0.03)
    better = make_luck(500, acceptance + 0.1, 0, 2)
    assert (better <= draws[0]).all()


def test_a_second_child_helps_where_the_first_is_wrong(continuation):
    luck = [FIRST, *[SECOND, FIRST, NEITHER] * (COUNT // 3)]
    chain, tree = (rounds_of(ToyEngine(), drafter_of(continuation, luck, trees=trees), k=6) for trees in (False, True))
    assert tokens_of(chain) == tokens_of(tree) == continuation
    assert len(tree) < len(chain)
    assert any(this.depth < this.drafted for this in tree)


def test_second_children_are_as_likely_as_asked():
    luck = make_luck(2000, 0.5, 0, 1, 0.2)
    assert np.mean(luck == FIRST) == pytest.approx(0.5, abs=0.04)
    assert np.mean(luck == SECOND) == pytest.approx(0.2, abs=0.04)
