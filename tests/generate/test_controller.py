"""The controller: the choice of drafter and length, what it costs to explore, and the simple rules."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from ondevice.engines.protocol import MAX_DRAFTED, MAX_ROUNDS
from ondevice.errors import UsageError
from ondevice.generate.controller import (
    CREDIT,
    CREDIT_SHARE,
    MAX_DRAFT,
    NEW_CREDIT,
    NO_ROOM,
    PLAIN_FORWARDS,
    Controller,
    FixedLength,
    HeuristicLength,
    below,
    make_controller,
)
from ondevice.generate.costs import TIMINGS, Costs, KnownCosts
from ondevice.generate.drafters.acceptance import PositionAcceptance
from ondevice.generate.drafters.mtp import SURE
from ondevice.generate.drafters.protocol import Draft, DraftRequest, Forecast
from ondevice.generate.stats import ForwardCost, Round
from tests.generate.rounds import decoded
from tests.generate.simulation import Boaster, DiceDrafter, Pessimist, World, simulate, speed

SEEDS = range(4)
ROUNDS = 800


def chain(drafted: int, accepted: int) -> Round:
    return decoded(drafted + 1, 1.0, accepted)


def known(forwards: list[float], draft: float = 0.0) -> Costs:
    """These times of forwards of 1, 2, ... rows, and of a drafted token, as if this process had measured them."""
    costs = Costs()
    rows = dict(enumerate((forward / forwards[0] for forward in forwards), 1))
    costs.recall(KnownCosts(0.0, forwards[0], rows, {"dice": {1: draft, 16: 16 * draft}} if draft else {}, {}))
    costs._curve_of("dice").timed = TIMINGS
    return costs


class Scripted(DiceDrafter):
    """Expects what it was given."""

    def __init__(self, name: str, *survival: float, depths: Sequence[int] = ()) -> None:
        super().__init__(name)
        self.survival, self.depths = np.array(survival, np.float32), depths

    def forecast(self, nodes: int) -> Forecast:
        return Forecast(self.survival[:nodes], self.name, self.depths[:nodes])


# The simple rules.


def test_constant_drafts_as_many_as_fit() -> None:
    controller, drafter = FixedLength(Costs(), 5), DiceDrafter()
    assert [controller.plan([drafter], limit).nodes for limit in (16, 3)] == [5, 3]
    assert controller.plan([drafter], 0) == NO_ROOM


def test_the_engine_drafts_constant_lengths_that_it_can() -> None:
    """With one drafter: of several, each round chooses; and the heuristic chooses each round's length."""
    one, two = [DiceDrafter()], [DiceDrafter(), DiceDrafter()]
    assert FixedLength(Costs(), 5).plan(one, 99).rounds == [MAX_ROUNDS] * 5
    assert not FixedLength(Costs(), MAX_DRAFTED + 1).plan(one, 99).rounds
    assert not FixedLength(Costs(), 5).plan(two, 99).rounds
    assert not any(HeuristicLength(Costs(), 5).plan(one, 99).rounds)


def test_heuristic_adds_two_when_all_were_accepted_and_takes_one_when_not() -> None:
    controller = HeuristicLength(Costs(), 5)
    lengths = []
    for drafted, accepted in [(5, 5), (7, 6), (6, 0), (0, 0), (5, 5)]:
        controller.observe(chain(drafted, accepted))
        lengths.append(controller.plan([DiceDrafter()], 99).nodes)
    assert lengths == [7, 6, 5, 5, 7]


def test_heuristic_stays_between_one_and_the_most() -> None:
    controller = HeuristicLength(Costs(), 2)
    for _ in range(5):
        controller.observe(chain(2, 0))
    assert controller.plan([DiceDrafter()], 99).nodes == 1
    for _ in range(30):
        controller.observe(chain(2, 2))
    assert controller.plan([DiceDrafter()], 99).nodes == MAX_DRAFT


@pytest.mark.parametrize(
    ("name", "kind"), [("constant", FixedLength), ("heuristic", HeuristicLength), ("auto", Controller)]
)
def test_controllers_by_name(name: str, kind: type) -> None:
    assert isinstance(make_controller(name, None, Costs()), kind)
    rounds = simulate(make_controller(name, 1, Costs()), DiceDrafter(), World.linear(0.05, 0.0), 20)
    assert max(this.drafted for this in rounds) == 1


def test_an_unknown_controller_or_length_is_a_usage_error() -> None:
    with pytest.raises(UsageError, match="auto, heuristic or constant, not 'wild'"):
        make_controller("wild", 4, Costs())
    with pytest.raises(UsageError, match="at least 1, not 0"):
        make_controller("auto", 0, Costs())


# The choice.


def test_a_draft_ends_where_a_token_is_not_worth_its_row_or_its_step() -> None:
    """At the speed of plain decoding a row that costs a tenth must bring a tenth of a token."""
    plan = Controller(known([1.0, 1.1, 1.2, 1.3, 1.4], draft=0.05)).plan([DiceDrafter()], 4)
    assert plan.nodes == 4
    assert plan.row_floors == pytest.approx([0.1] * 4)
    assert plan.step_floors == pytest.approx([0.05] * 4)
    request = DraftRequest(plan.nodes, plan.row_floors, plan.step_floors)
    assert [request.pays_row(0, 0.11), request.pays_row(0, 0.09)] == [True, False]
    assert [request.pays_step(0, 0.16), request.pays_step(0, 0.14)] == [True, False]


def test_at_a_higher_speed_a_token_must_be_more_likely() -> None:
    controller = Controller(known([1.0, 1.0, 1.0, 1.0, 1.1]))
    for _ in range(100):
        controller.observe(decoded(5, 1.1, accepted=4))
    assert controller.speed() == pytest.approx(5 / 1.1, rel=0.02)
    controller._since_plain = 0
    plan = controller.plan([Scripted("ngram", 0.9, 0.9, 0.9, 0.9)], 4)
    assert plan.row_floors[3] == pytest.approx(0.1 * 5 / 1.1, rel=0.05)


def test_rounds_of_one_call_count_as_those_of_several() -> None:
    together, one_by_one = Controller(known([1.0, 1.1])), Controller(known([1.0, 1.1]))
    rounds = [decoded(2, 1.1, accepted) for accepted in (1, 0, 1, 1)]
    together.observe(*rounds)
    for this in rounds:
        one_by_one.observe(this)
    assert together.speed() == pytest.approx(one_by_one.speed(), rel=0.02)
    assert together._since_plain == one_by_one._since_plain == 4


def test_siblings_cost_no_step() -> None:
    """Three tokens are worth a row each, but not a step each."""
    controller, tokens = Controller(known([1.0, 1.05, 1.1, 1.15], draft=0.3)), (0.3, 0.1, 0.1)
    assert controller.plan([Scripted("dice", *tokens)], 3).drafter is None
    assert controller.plan([Scripted("dice", *tokens, depths=[1, 1, 1])], 3).nodes == 3
    request = DraftRequest(3, [0.05] * 3, [0.3, 0.1])
    assert [request.pays_step(2, 0.2, step) for step in (0, 1)] == [False, True]


def test_a_draft_sees_past_a_jump() -> None:
    """Two more rows do not pay, four do: the jump is spread over the rows that it pays for."""
    drafter = Scripted("dice", 0.85, 0.7, 0.6, 0.5)
    controller = Controller(known([1.0, 1.9, 1.9, 1.9, 1.9], draft=1e-6))
    plan = controller.plan([drafter], 4)
    assert plan.drafter is drafter
    assert len(drafter.draft(DraftRequest(plan.nodes, plan.row_floors, plan.step_floors))) == 4
    drafter.survival = np.array([0.85], np.float32)
    assert controller.plan([drafter], 4).drafter is None


@pytest.mark.parametrize("seed", range(20))
def test_the_largest_convex_sequence_below_costs(seed: int) -> None:
    costs = np.cumsum(np.random.default_rng(seed).random(12)).tolist()
    found = below(costs)
    assert len(found) == len(costs)
    assert (np.array(found) <= np.array(costs) + 1e-12).all()
    assert (np.diff(found, 2) >= -1e-12).all()
    touched = np.flatnonzero(np.isclose(found, costs))
    assert {0, len(costs) - 1} <= set(touched.tolist())
    corners = np.flatnonzero(np.diff(found, 2) > 1e-9) + 1
    assert set(corners.tolist()) <= set(touched.tolist())


@pytest.mark.parametrize(
    ("primary", "secondary", "expected"),
    [
        ((0.7, 0.5), (0.9, 0.8), "ngram"),
        ((0.7, 0.5), (0.8,), "mtp"),
        ((0.7, 0.5), (), "mtp"),
        ((0.9,), (0.85,), "ngram"),
        ((0.9,), (0.7,), "mtp"),
        ((), (), None),
        ((0.05,), (), None),
    ],
)
@pytest.mark.parametrize("kind", [Controller, FixedLength])
def test_the_drafter_whose_draft_is_worth_most_drafts(
    kind: type[Controller], primary: tuple[float, ...], secondary: tuple[float, ...], expected: str | None
) -> None:
    """Rows are free, and a token of `mtp` takes a tenth of a forward."""
    costs = Costs()
    drafts = {"mtp": {1: 0.1, 8: 0.8}, "ngram": {1: 1e-6, 8: 1e-6}}
    costs.recall(KnownCosts(0.0, 1.0, dict.fromkeys(range(1, 9), 1.0), drafts, {}))
    for source in drafts:
        costs._curve_of(source).timed = TIMINGS
    plan = kind(costs, 4).plan([Scripted("mtp", *primary), Scripted("ngram", *secondary)], 4)
    if kind is Controller:
        assert (plan.drafter and plan.drafter.name) == expected
        assert plan.drafter is not None or plan.reason == ("unprofitable" if primary else "no_match")
    else:
        assert plan.drafter is not None
        assert plan.drafter.name == (expected or "mtp")


def test_rows_of_other_sequences_make_drafts_dearer() -> None:
    """Rows are free up to four here: one sequence alone drafts three tokens, with three others none."""
    controller = Controller(known([1.0, 1.0, 1.0, 1.0, 1.6, 2.2, 2.8, 3.4]))
    for _ in range(60):  # a single row is known for all of these
        for rows in (1, 3, 4):
            controller.costs.observe(decoded(rows, 1.0))

    def drafted(other_rows: int) -> int:
        drafter = Scripted("dice", 0.5, 0.4, 0.3, 0.2)
        plan = controller.plan([drafter], 4, other_rows)
        return len(drafter.draft(DraftRequest(plan.nodes, plan.row_floors, plan.step_floors)))

    assert [drafted(0), drafted(2)] == [3, 1]
    assert controller.plan([Scripted("dice", 0.5, 0.4)], 2, other_rows=3).drafter is None


def test_sequences_that_long_ran_together_without_drafts_may_draft() -> None:
    controller, drafter = Controller(Costs()), Scripted("dice", 0.9, 0.8)
    for _ in range(400):
        controller.asked([drafter])
        controller.observe(replace(decoded(1, 1.0), forward=ForwardCost(2, 2, 1.0)))
    assert controller.plan([drafter], 2, other_rows=1).nodes > 0


class Untouchable(DiceDrafter):
    def forecast(self, k: int) -> Forecast:
        assert k > 0
        return Forecast(np.zeros(0, np.float32), self.name)

    def draft(self, request: DraftRequest) -> Draft:
        raise AssertionError("a drafter with nothing to say was called")


def test_auto_does_not_call_a_drafter_that_has_nothing_to_say() -> None:
    rounds = simulate(Controller(Costs()), Untouchable(), World.linear(0.1, 0.5), 50)
    assert not any(this.drafted for this in rounds)
    assert Controller(Costs()).plan([Untouchable()], 0) == NO_ROOM


def auto_speed(world: World, drafter: type[DiceDrafter] = DiceDrafter) -> float:
    """Mean over a few seeds, from a cold start."""
    runs = [simulate(Controller(Costs()), drafter(), world, ROUNDS, seed=seed) for seed in SEEDS]
    return float(np.mean([speed(rounds, world) for rounds in runs]))


@pytest.mark.parametrize("slope", [0.05, 0.2, 0.5])
@pytest.mark.parametrize("chance", [0.3, 0.45, 0.6, 0.75, 0.9])
def test_auto_comes_close_to_the_best_constant_length(slope: float, chance: float) -> None:
    world = World.linear(slope, chance)
    assert auto_speed(world) > 0.94 * world.best_speed()


@pytest.mark.parametrize("slope", [0.05, 0.2, 0.5])
@pytest.mark.parametrize("chance", [0.3, 0.6, 0.9])
def test_auto_does_so_on_a_busy_machine(slope: float, chance: float) -> None:
    world = replace(World.linear(slope, chance), noise=0.1, spikes=0.02)
    assert auto_speed(world) > 0.9 * world.best_speed()


@pytest.mark.parametrize("chance", [0.3, 0.45])
def test_auto_does_so_where_other_programs_run_at_times(chance: float) -> None:
    """A drafter whose single tokens gain a tenth or a fifth. With means of all recent forwards as the cost of rows, and
    drafts charged with the time of slow rounds, `auto` reached 0.93 of the best speed."""
    world = replace(World.linear(0.05, chance, 0.15), noise=0.04, neighbours=2.2)
    runs = [simulate(Controller(Costs()), DiceDrafter(), world, ROUNDS, seed=seed) for seed in range(16)]
    assert np.mean([speed(rounds, world) for rounds in runs]) > 0.97 * world.best_speed()


@pytest.mark.parametrize("slope", [0.02, 0.05, 0.2, 0.5])
@pytest.mark.parametrize("drafter", [DiceDrafter, Boaster])
def test_auto_keeps_the_speed_of_plain_decoding_when_every_draft_is_wrong(
    slope: float, drafter: type[DiceDrafter]
) -> None:
    """A boaster goes on expecting 0.9 of every token: what its rounds lose parks it, not what it says."""
    assert auto_speed(World.linear(slope, 0.0), drafter) > 1 - 0.015 - CREDIT / ROUNDS


def test_probes_of_a_hopeless_drafter_cost_one_percent_at_most() -> None:
    world = World.linear(0.5, 0.0)
    rounds = simulate(Controller(Costs()), DiceDrafter(), world, 2000)
    assert speed(rounds[200:], world) > 0.985
    assert {this.drafted for this in rounds[200:]} == {0, 1}


@pytest.mark.parametrize("asking", [0.02, 0.3, 2.0])
def test_asking_in_vain_costs_one_percent_at_most(asking: float) -> None:
    """As on a tiny model, where the Python around a draft takes as long as a forward. A text may change at any time."""
    world = World.linear(0.9, 0.0)
    drafters = [DiceDrafter("one"), DiceDrafter("other")]
    rounds = simulate(Controller(Costs()), drafters, world, 3000, asking=asking)
    assert speed(rounds[500:], world) > 0.985
    assert sum(this.control_seconds > 0 for this in rounds[500:]) >= 5


def test_a_new_generation_tries_again_and_one_stopped_round_does_not_end_drafting() -> None:
    controller, drafter = Controller(Costs()), DiceDrafter()
    simulate(controller, drafter, World.linear(0.5, 0.0), 300)
    before = drafter.drafted
    assert before == 0
    controller.begin()
    rounds = simulate(controller, drafter, World.linear(0.5, 0.9), 100)
    assert sum(this.drafted > 0 for this in rounds) > 50
    stopped = replace(decoded(3, 1.0), draft_seconds=1e6, forward=rounds[-1].forward)
    controller.asked([drafter])
    controller.observe(stopped)
    after = simulate(controller, drafter, World.linear(0.5, 0.9), 200)
    assert sum(this.drafted > 0 for this in after) > 150


def test_short_generations_do_not_forgive_debts() -> None:
    controller, drafter, world = Controller(Costs()), DiceDrafter(), World.linear(0.9, 0.0)
    simulate(controller, drafter, world, 1000, asking=3.0)
    rounds = []
    for _ in range(100):
        controller.begin()
        rounds += simulate(controller, drafter, world, 50, asking=3.0)
    assert speed(rounds, world) > 1 - CREDIT_SHARE - NEW_CREDIT / 50 - 0.002
    assert any(this.control_seconds > 0 for this in rounds)


def test_forwards_in_one_call_pay_a_debt_as_rounds_do() -> None:
    controller, drafter = Controller(Costs()), DiceDrafter()
    assert controller.asked([drafter]) == [drafter]
    assert controller.plain_forwards() == PLAIN_FORWARDS
    controller._credit[drafter.name] = -10 * CREDIT_SHARE
    assert controller.asked([drafter]) == []
    controller.observe(decoded(1, 1.0))
    waited = []
    while controller.asked([drafter]) == []:
        waited.append(min(controller.plain_forwards(), 4))
        controller.observe(replace(decoded(1, 1.0), forwards=waited[-1]))
    assert waited == [4, 4, 2]


def test_the_longer_nothing_is_drafted_the_more_forwards_a_call_runs() -> None:
    controller, drafter, waited = Controller(Costs()), DiceDrafter(), []
    for drafted in (0, 0, 0, 2, 0):
        controller.asked([drafter])
        forwards = 1 if drafted else min(controller.plain_forwards(), 16)
        waited += [] if drafted else [forwards]
        controller.observe(replace(decoded(1 + drafted, 1.0), token_ids=(0,) * (forwards + drafted), forwards=forwards))
    assert waited == [PLAIN_FORWARDS, 2 * PLAIN_FORWARDS, 4 * PLAIN_FORWARDS, PLAIN_FORWARDS]


def test_chains_are_drafted_for_as_many_rounds_as_the_credit_pays() -> None:
    drafter = Scripted("dice", 0.9, 0.8, 0.7, 0.6)
    controller = Controller(known([1.0, 1.1, 1.2, 1.3, 1.4], draft=0.1))
    controller.observe(decoded(1, 1.0))
    assert controller.asked([drafter]) == [drafter]
    assert controller.plan([drafter], 4).rounds == [MAX_ROUNDS, MAX_ROUNDS, MAX_ROUNDS, 10]
    controller._credit[drafter.name] = 0.5
    controller.asked([drafter])
    assert controller.plan([drafter], 4).rounds == [2, 1, 1, 1]


def test_what_brings_more_than_it_takes_is_always_asked() -> None:
    rounds = simulate(Controller(Costs()), DiceDrafter(), World.linear(0.02, 0.8), 500, asking=0.3)
    assert all(this.control_seconds > 0 for this in rounds)


def test_auto_does_not_draft_where_rows_cost_what_they_bring() -> None:
    world = World.linear(0.9, 0.6)
    rounds = simulate(Controller(Costs()), DiceDrafter(), world, ROUNDS)
    assert np.mean([this.drafted > 0 for this in rounds[200:]]) < 0.06


@pytest.mark.parametrize("slope", [0.05, 0.1, 0.2])
@pytest.mark.parametrize("drafter", [DiceDrafter, Boaster])
def test_auto_comes_back_when_the_text_changes(slope: float, drafter: type[DiceDrafter]) -> None:
    world = replace(World.linear(slope, 0.8), chance=lambda index, source: 0.0 if index < 400 else 0.8)
    best = World.linear(slope, 0.8).best_speed()
    back = []
    for seed in range(8):
        rounds = simulate(Controller(Costs()), drafter(), world, 700, seed=seed)
        assert np.mean([this.drafted > 0 for this in rounds[300:400]]) < 0.15
        starts = range(400, 680)
        back.append(next(start for start in starts if speed(rounds[start : start + 20], world) > 0.85 * best) - 400)
    assert np.median(back) <= 80


def test_auto_drafts_within_forty_tokens_of_a_change() -> None:
    """From never right to right nine times in ten, in the middle of a generation, where rows cost what E2B's do."""
    world = replace(World.linear(0.05, 0.9, 0.02), chance=lambda index, source: 0.0 if index < 200 else 0.9)
    waits = []
    for seed in range(8):
        rounds = simulate(Controller(Costs()), DiceDrafter(), world, 300, seed=seed)
        assert speed(rounds[:200], world) > 0.95
        back = next(index for index, this in enumerate(rounds) if index >= 200 and this.drafted >= 4)
        waits.append(sum(len(this.token_ids) for this in rounds[200:back]))
    assert np.median(waits) <= 40


@pytest.mark.parametrize("slope", [0.05, 0.2])
def test_a_poor_free_drafter_does_not_keep_a_better_one_from_another_chance(slope: float) -> None:
    """If two do not pay, probes go to the one that expects more; the other must come to expect more in time."""

    def chance(index: int, source: str) -> float:
        return 0.15 if source == "free" else 0.0 if index < 400 else 0.8

    world = replace(World.linear(slope, 0.8), chance=chance)
    after = []
    for seed in SEEDS:
        costs = Costs()
        drafters = [DiceDrafter("model"), Pessimist("free")]
        after.append(speed(simulate(Controller(costs), drafters, world, 900, seed=seed)[500:], world))
    assert np.mean(after) > 0.9 * World.linear(slope, 0.8).best_speed()


@pytest.mark.parametrize("drafter", [DiceDrafter, Boaster])
@pytest.mark.parametrize("slope", [0.02, 0.05, 0.2, 0.5])
def test_a_drafter_that_drifts_loses_its_credit_and_is_tried_again(slope: float, drafter: type[DiceDrafter]) -> None:
    """A text that is easy, then hard from round 200 on, then easy again from 600 on."""
    world = replace(World.linear(slope, 0.8), chance=lambda index, source: 0.0 if 200 <= index < 600 else 0.8)
    drafted = []
    for seed in range(8):
        rounds = simulate(Controller(Costs()), drafter(), world, 1000, seed=seed)
        lost = sum(world.forward(this.rows) + world.draft * this.drafted - 1 for this in rounds[200:600])
        assert lost < CREDIT + 0.015 * 400 + 1
        drafted.append(np.mean([this.drafted > 0 for this in rounds[800:]]))
    # A boaster's drafts are so long that they hardly pay.
    assert np.mean(drafted) > (0.85 if drafter is DiceDrafter else 0.2)


def test_auto_gives_up_soon_when_the_text_turns_against_it() -> None:
    world = replace(World.linear(0.2, 0.8), chance=lambda index, source: 0.8 if index < 400 else 0.0)
    rounds = simulate(Controller(Costs()), DiceDrafter(), world, 700)
    assert np.mean([this.drafted > 0 for this in rounds[440:]]) < 0.1


def test_costs_that_another_process_measured_too_low_are_soon_corrected() -> None:
    """Rows that seem to cost a quarter less than they do make drafts that lose look as if they gained. Before a single
    row was measured again within the first rounds of a process, a hundred rounds reached 0.944 of plain decoding."""
    world = World.linear(0.15, 0.3, 0.25)
    assert world.best_speed() == pytest.approx(1.0)

    def first_rounds(seed: int) -> float:
        costs = Costs()
        forwards = {1: 1.0} | {rows: 0.75 * world.forward(rows) for rows in (2, 3, 4, 5, 6, 8)}
        costs.recall(KnownCosts(1.0, 1.0, forwards, {"dice": {1: 0.25, 2: 0.5, 3: 0.75}}, {}))
        return speed(simulate(Controller(costs), DiceDrafter(), world, 100, seed=seed), world)

    assert np.mean([first_rounds(seed) for seed in range(40)]) > 0.95


@pytest.mark.parametrize("seed", range(8))
def test_costs_that_another_process_measured_too_high_are_soon_corrected(seed: int) -> None:
    """As from a moment when other programs ran: at these costs no draft pays, and so none would ever be timed."""
    world = World.linear(0.08, 0.45, 0.13)
    costs, drafter = Costs(), DiceDrafter(acceptance=PositionAcceptance(0.45, sure=SURE))
    costs.recall(KnownCosts(1.0, 1.0, {1: 1.0, 2: 1.2, 3: 1.4}, {"dice": {1: 0.27, 2: 0.54}}, {}))
    rounds = simulate(Controller(costs), drafter, world, 300, seed=seed)
    assert np.mean([this.drafted > 0 for this in rounds[30:]]) > 0.8


def test_what_another_process_measured_as_hopeless_is_not_measured_again() -> None:
    costs, drafter = Costs(), DiceDrafter(acceptance=PositionAcceptance(0.45, sure=SURE))
    costs.recall(KnownCosts(1.0, 1.0, {1: 1.0, 2: 1.8, 3: 2.6}, {"dice": {1: 0.27, 2: 0.54}}, {}))
    rounds = simulate(Controller(costs), drafter, World.linear(0.8, 0.45, 0.27), 200)
    assert not any(this.drafted for this in rounds)


def test_a_draft_with_a_call_of_its_own_must_bring_what_that_call_costs() -> None:
    costs, plain = Costs(), replace(decoded(1, 1.0), forwards=4)
    several = replace(decoded(2, 1.1, source="mtp"), together=8)
    for _ in range(12):
        for this in (plain, several, decoded(2, 1.4, source="ngram")):
            costs.observe(this)
    by_engine, by_search = Scripted("mtp", 0.3), Scripted("ngram", 0.35)
    assert Controller(costs).plan([by_search], 8).drafter is None
    assert Controller(costs).plan([by_search, by_engine], 8).drafter is by_engine


def test_auto_survives_a_slow_first_measurement() -> None:
    """Four times too slow a first step makes every draft look cheap until the single row is timed again."""

    def simulate_slow_start() -> float:
        costs = Costs()
        costs.observe(decoded(1, 1.0))
        costs.observe(decoded(1, 4.0))
        world = World.linear(0.9, 0.3)
        return speed(simulate(Controller(costs), DiceDrafter(), world, 400), world)

    assert simulate_slow_start() > 0.93
