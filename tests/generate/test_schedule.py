from dataclasses import replace

import numpy as np
import pytest

from ondevice.errors import UsageError
from ondevice.generate.controller import (
    MAX_DRAFT,
    START_DRAFT,
    AutoSchedule,
    ConstantSchedule,
    HeuristicSchedule,
    Plan,
    best_plan,
    make_schedule,
)
from ondevice.generate.costs import Costs
from ondevice.generate.drafters.acceptance import Trust
from ondevice.generate.drafters.portfolio import Portfolio
from ondevice.generate.drafters.protocol import Draft, DraftRequest, Forecast
from ondevice.generate.stats import Round
from tests.generate.rounds import decoded
from tests.generate.simulation import Boaster, DiceDrafter, Pessimist, World, simulate, speed

SEEDS = range(4)
ROUNDS = 800


def chain(drafted: int, accepted: int) -> Round:
    return decoded(drafted + 1, 1.0, accepted)


def test_constant_drafts_as_many_as_fit() -> None:
    schedule = ConstantSchedule(5)
    assert [schedule.plan(DiceDrafter(), limit) for limit in (16, 3, 0)] == [Plan(5), Plan(3), Plan(0)]


def test_heuristic_adds_two_when_all_were_accepted_and_takes_one_when_not() -> None:
    schedule = HeuristicSchedule(5)
    lengths = []
    for drafted, accepted in [(5, 5), (7, 6), (6, 0), (0, 0), (5, 5)]:
        schedule.observe(chain(drafted, accepted))
        lengths.append(schedule.plan(DiceDrafter(), 99).k)
    assert lengths == [7, 6, 5, 5, 7]


def test_heuristic_stays_between_one_and_the_most() -> None:
    schedule = HeuristicSchedule(2)
    for _ in range(5):
        schedule.observe(chain(2, 0))
    assert schedule.plan(DiceDrafter(), 99).k == 1
    for _ in range(30):
        schedule.observe(chain(2, 2))
    assert schedule.plan(DiceDrafter(), 99).k == MAX_DRAFT


@pytest.mark.parametrize(
    ("name", "kind"), [("constant", ConstantSchedule), ("heuristic", HeuristicSchedule), ("auto", AutoSchedule)]
)
def test_schedules_by_name(name: str, kind: type) -> None:
    assert isinstance(make_schedule(name, None, Costs()), kind)
    rounds = simulate(make_schedule(name, 1, Costs()), DiceDrafter(), World.linear(0.05, 0.0), 20)
    assert max(this.drafted for this in rounds) == 1


def test_an_unknown_schedule_or_length_is_a_usage_error() -> None:
    with pytest.raises(UsageError, match="auto, heuristic or constant, not 'wild'"):
        make_schedule("wild", 4, Costs())
    with pytest.raises(UsageError, match="at least 1, not 0"):
        make_schedule("auto", 0, Costs())


def taught(forward: list[float], draft: float) -> Costs:
    costs = Costs()
    for _ in range(20):
        for extra, seconds in enumerate(forward):
            costs.observe(decoded(extra + 1, seconds + draft * extra, draft_seconds=draft * extra))
    return costs


def test_the_best_plan_maximises_tokens_per_second() -> None:
    costs = taught([1.0, 1.1, 1.2, 1.3, 1.4], draft=0.05)
    plan, gain = best_plan(Forecast(np.array([0.7, 0.5, 0.1, 0.05], np.float32), "dice"), costs, Trust())
    assert plan.k == 2
    # 2.2 tokens in 1.3 seconds: a row that costs 0.1 must bring 0.17 tokens
    assert plan.floor == pytest.approx(2.2 / 1.3 * 0.1, rel=0.01)
    assert gain > 1
    assert best_plan(Forecast(np.array([0.14, 0.1], np.float32), "dice"), costs, Trust())[1] < 1


def test_the_best_plan_sees_past_a_jump() -> None:
    """Two more rows do not pay, four do: every length is compared, not only the next."""
    costs = taught([1.0, 1.9, 1.9, 1.9, 1.9], draft=0.0)
    assert best_plan(Forecast(np.array([0.85, 0.7, 0.6, 0.5], np.float32), "dice"), costs, Trust())[0].k == 4


class Untouchable(DiceDrafter):
    def forecast(self, k: int) -> Forecast:
        assert k > 0
        return Forecast(np.zeros(0, np.float32), self.name)

    def draft(self, request: DraftRequest) -> Draft:
        raise AssertionError("a drafter with nothing to say was called")


def test_auto_does_not_call_a_drafter_that_has_nothing_to_say() -> None:
    rounds = simulate(AutoSchedule(Costs()), Untouchable(), World.linear(0.1, 0.5), 50)
    assert not any(this.drafted for this in rounds)
    assert AutoSchedule(Costs()).plan(Untouchable(), 0).k == 0


def auto_speed(world: World, drafter: type[DiceDrafter] = DiceDrafter) -> float:
    """Mean over a few seeds, from a cold start."""
    runs = [simulate(AutoSchedule(Costs()), drafter(), world, ROUNDS, seed=seed) for seed in SEEDS]
    return float(np.mean([speed(rounds, world) for rounds in runs]))


@pytest.mark.parametrize("slope", [0.05, 0.2, 0.5])
@pytest.mark.parametrize("chance", [0.3, 0.45, 0.6, 0.75, 0.9])
def test_auto_comes_close_to_the_best_constant_length(slope: float, chance: float) -> None:
    world = World.linear(slope, chance)
    assert auto_speed(world) > 0.95 * world.best_speed()


@pytest.mark.parametrize("slope", [0.05, 0.2, 0.5])
@pytest.mark.parametrize("chance", [0.3, 0.6, 0.9])
def test_auto_does_so_on_a_busy_machine(slope: float, chance: float) -> None:
    world = replace(World.linear(slope, chance), noise=0.1, spikes=0.02)
    assert auto_speed(world) > 0.93 * world.best_speed()


@pytest.mark.parametrize("slope", [0.02, 0.05, 0.2, 0.5])
@pytest.mark.parametrize("drafter", [DiceDrafter, Boaster])
def test_auto_keeps_the_speed_of_plain_decoding_when_every_draft_is_wrong(
    slope: float, drafter: type[DiceDrafter]
) -> None:
    """A boaster goes on expecting 0.9 of every token: what its rounds lose parks it, not what it says."""
    assert auto_speed(World.linear(slope, 0.0), drafter) > 0.98


def test_probes_of_a_hopeless_drafter_cost_one_percent_at_most() -> None:
    world = World.linear(0.5, 0.0)
    rounds = simulate(AutoSchedule(Costs()), DiceDrafter(), world, 2000)
    assert speed(rounds[200:], world) > 0.99
    assert {this.drafted for this in rounds[200:]} == {0, 1}


class Steady(DiceDrafter):
    """Counts how often it is asked for a forecast that would be the same every time."""

    asked = 0

    def forecast(self, nodes: int) -> Forecast:
        self.asked += 1
        return Forecast(self.acceptance.survival(nodes), self.name, steady=True)


def test_a_steady_forecast_that_does_not_pay_is_asked_for_when_a_probe_is_due_alone() -> None:
    drafter, world = Steady(), World.linear(0.5, 0.0)
    schedule = AutoSchedule(Costs())
    simulate(schedule, drafter, world, 500)
    before = drafter.asked
    rounds = simulate(schedule, drafter, world, 500)
    probes = sum(this.drafted > 0 for this in rounds)
    assert 0 < probes < 20
    assert drafter.asked - before <= 2 * probes + 1
    other = Steady()
    schedule.plan(other, 16)
    assert other.asked == 1


def test_auto_does_not_draft_where_rows_cost_what_they_bring() -> None:
    world = World.linear(0.9, 0.6)
    rounds = simulate(AutoSchedule(Costs()), DiceDrafter(), world, ROUNDS)
    assert np.mean([this.drafted > 0 for this in rounds[200:]]) < 0.03


@pytest.mark.parametrize("slope", [0.05, 0.1, 0.2])
@pytest.mark.parametrize("drafter", [DiceDrafter, Boaster])
def test_auto_comes_back_when_the_text_changes(slope: float, drafter: type[DiceDrafter]) -> None:
    world = replace(World.linear(slope, 0.8), chance=lambda index, source: 0.0 if index < 400 else 0.8)
    best = World.linear(slope, 0.8).best_speed()
    back = []
    for seed in range(8):
        rounds = simulate(AutoSchedule(Costs()), drafter(), world, 700, seed=seed)
        assert np.mean([this.drafted > 0 for this in rounds[300:400]]) < 0.15
        starts = range(400, 680)
        back.append(next(start for start in starts if speed(rounds[start : start + 20], world) > 0.85 * best) - 400)
    assert np.median(back) <= 50


def test_auto_drafts_within_forty_tokens_of_a_change() -> None:
    """From never right to right nine times in ten, in the middle of a generation, where rows cost what E2B's do."""
    world = replace(World.linear(0.05, 0.9, 0.02), chance=lambda index, source: 0.0 if index < 200 else 0.9)
    waits = []
    for seed in range(8):
        rounds = simulate(AutoSchedule(Costs()), DiceDrafter(), world, 300, seed=seed)
        assert speed(rounds[:200], world) > 0.98
        back = next(index for index, this in enumerate(rounds) if index >= 200 and this.drafted >= START_DRAFT)
        waits.append(sum(len(this.token_ids) for this in rounds[200:back]))
    assert np.median(waits) <= 40


@pytest.mark.parametrize("slope", [0.05, 0.2])
def test_a_poor_free_drafter_does_not_keep_a_better_one_from_another_chance(slope: float) -> None:
    """Of two that do not pay, probes go to the one that expects more; the other must come to expect more in time."""

    def chance(index: int, source: str) -> float:
        return 0.15 if source == "free" else 0.0 if index < 400 else 0.8

    world = replace(World.linear(slope, 0.8), chance=chance)
    after = []
    for seed in SEEDS:
        costs = Costs()
        drafter = Portfolio([DiceDrafter("model"), Pessimist("free")], costs)
        after.append(speed(simulate(AutoSchedule(costs), drafter, world, 900, seed=seed)[500:], world))
    assert np.mean(after) > 0.9 * World.linear(slope, 0.8).best_speed()


@pytest.mark.parametrize("drafter", [DiceDrafter, Boaster])
@pytest.mark.parametrize("slope", [0.02, 0.05, 0.2])
def test_a_drafter_that_drifts_is_dropped_within_sixteen_rounds_and_tried_again(
    slope: float, drafter: type[DiceDrafter]
) -> None:
    """A text that is easy, then hard from round 200 on, then easy again from 400 on."""
    world = replace(World.linear(slope, 0.8), chance=lambda index, source: 0.0 if 200 <= index < 400 else 0.8)
    for seed in range(8):
        rounds = simulate(AutoSchedule(Costs()), drafter(), world, 700, seed=seed)
        dropped = next(index for index in range(200, 400) if rounds[index].idle in ("drift", "unprofitable"))
        assert dropped <= 216
        assert sum(this.drafted > 0 for this in rounds[216:400]) < 0.25 * (400 - 216)
        assert np.mean([this.drafted > 1 for this in rounds[500:]]) > 0.9


def test_auto_gives_up_soon_when_the_text_turns_against_it() -> None:
    world = replace(World.linear(0.2, 0.8), chance=lambda index, source: 0.8 if index < 400 else 0.0)
    rounds = simulate(AutoSchedule(Costs()), DiceDrafter(), world, 700)
    assert np.mean([this.drafted > 0 for this in rounds[440:]]) < 0.1


def test_auto_survives_a_slow_first_measurement() -> None:
    """Four times too slow a first step makes every draft look cheap until the single row is timed again."""

    def simulate_slow_start() -> float:
        costs = Costs()
        costs.observe(decoded(1, 1.0))
        costs.observe(decoded(1, 4.0))
        world = World.linear(0.9, 0.3)
        return speed(simulate(AutoSchedule(costs), DiceDrafter(), world, 400), world)

    assert simulate_slow_start() > 0.93


def test_rows_of_other_sequences_make_drafts_dearer() -> None:
    """Rows are free up to four here: one sequence alone drafts three tokens, beside three others none."""
    costs = taught([1.0, 1.0, 1.0, 1.0, 1.6, 2.2, 2.8, 3.4], 0.0)
    forecast = Forecast(np.array([0.5, 0.4, 0.3, 0.2], np.float32), "dice")
    assert best_plan(forecast, costs, Trust())[0].k == 3
    assert best_plan(forecast, costs, Trust(), other_rows=2)[0].k == 1
    assert best_plan(forecast, costs, Trust(), other_rows=3)[1] < 1
