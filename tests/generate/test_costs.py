"""The cost model: curves of rows and tokens, and the present time of a forward of one row."""

import threading
from dataclasses import replace

import numpy as np
import pytest

from ondevice.generate.costs import (
    KNOWN_WEIGHT,
    MEASURED_ROWS,
    MEMORY,
    PRIOR_ROW,
    STALE,
    SWEEP,
    Costs,
    Curve,
    KnownCosts,
    measure,
    rising,
)
from ondevice.generate.stats import ForwardCost, Round
from tests.fixtures.toy_engine import ToyEngine
from tests.generate.rounds import decoded


def teach(costs: Costs, rows: int, *seconds: float) -> None:
    for value in seconds:
        costs.observe(decoded(rows, value))


def relative(costs: Costs, most: int) -> list[float]:
    forwards = costs.forwards(most)
    return [seconds / forwards[0] for seconds in forwards]


def test_a_draft_costs_what_was_assumed_until_it_was_measured() -> None:
    costs = Costs()
    costs.recall(KnownCosts(0.0, 2.0, {1: 1.0}, {"known": {1: 0.1}}, {}))
    assert costs.drafts("mtp", 2) == pytest.approx([0.05 * 2.0, 0.1 * 2.0])
    costs.assume("large", 0.5)
    costs.assume("known", 0.5)
    assert (costs.drafts("large", 1), costs.drafts("known", 1)) == ([1.0], [0.2])


def test_nothing_known_is_a_line_with_the_prior_slope() -> None:
    costs = Costs()
    assert costs.runs(1) == 0
    np.testing.assert_allclose(relative(costs, 5), 1 + PRIOR_ROW * np.arange(5))
    assert 0 < costs.drafts("mtp", 1)[0] < costs.forwards(1)[0]


def test_a_prefill_teaches_nothing() -> None:
    costs = Costs()
    for _ in range(3):
        costs.observe(Round((0,), rows=300, seconds=9.0))
        costs.observe(Round((0,), forward=ForwardCost(301, 2, 9.0)))  # another sequence's
    assert costs.measurements(300) == 0
    assert costs.forwards(2) == Costs().forwards(2)


@pytest.mark.parametrize("slope", [0.0, 0.05, 0.5])
@pytest.mark.parametrize("noise", [0.0, 0.1])
def test_it_learns_a_slope_from_a_few_row_counts(slope: float, noise: float) -> None:
    """Beyond the largest count, rows cost at least the prior slope."""
    costs, random = Costs(), np.random.default_rng(1)
    for _ in range(60):
        for rows in (1, 3, 6):
            teach(costs, rows, 0.02 * (1 + slope * (rows - 1)) * float(np.exp(noise * random.standard_normal())))
    np.testing.assert_allclose(relative(costs, 6), 1 + slope * np.arange(6), rtol=0.02 + 0.5 * noise)
    assert costs.forwards(1)[0] == pytest.approx(0.02, rel=0.02 + noise)
    assert relative(costs, 8)[7] - relative(costs, 6)[5] == pytest.approx(2 * max(slope, PRIOR_ROW), rel=0.3)


def test_it_learns_a_jump() -> None:
    costs = Costs()
    real = [1.0, 1.1, 1.2, 3.0, 3.1, 3.2]
    for _ in range(3 * MEMORY):
        for rows, seconds in enumerate(real, start=1):
            teach(costs, rows, seconds)
    np.testing.assert_allclose(costs.forwards(6), real, rtol=0.1)


def test_where_the_machine_is_slow_for_a_while_no_row_count_looks_dearer() -> None:
    """Half of the speed: the time of a row follows within the rounds of its median, the curve stays."""
    costs = Costs()
    for _ in range(20):
        for rows in (1, 3, 6):
            teach(costs, rows, 1 + 0.1 * (rows - 1))
    before = relative(costs, 8)
    for _ in range(10):
        teach(costs, 3, 2.4)
        teach(costs, 6, 3.0)
    assert costs.forwards(1)[0] == pytest.approx(2.0, rel=0.15)
    np.testing.assert_allclose(relative(costs, 8), before, rtol=0.15)
    for _ in range(10):
        teach(costs, 3, 1.2)
        teach(costs, 6, 1.5)
    assert costs.forwards(1)[0] == pytest.approx(1.0, rel=0.1)
    np.testing.assert_allclose(relative(costs, 8), before, rtol=0.15)


def test_a_row_count_not_run_for_long_is_forgotten() -> None:
    """One from a busy moment would keep drafts of that length from being made, and so never be corrected."""
    costs = Costs()
    for _ in range(8):
        teach(costs, 1, 1.0)
        teach(costs, 4, 9.0)
    teach(costs, 1, *[1.0] * (STALE - SWEEP))
    assert costs.measurements(4) == MEMORY
    teach(costs, 1, *[1.0] * (3 * SWEEP))
    assert costs.measurements(4) == 0
    np.testing.assert_allclose(relative(costs, 4), 1 + PRIOR_ROW * np.arange(4))


def test_one_row_count_alone_says_nothing_of_the_curve() -> None:
    costs = Costs()
    costs.recall(KnownCosts(0.0, 1.0, {1: 1.0, 5: 1.02, 8: 1.4}, {}, {}))
    before = relative(costs, 8)
    teach(costs, 5, *[7.0] * 100)
    np.testing.assert_allclose(relative(costs, 8), before)
    assert costs.forwards(5)[4] == pytest.approx(7.0)


def test_a_single_row_that_turns_out_cheap_makes_all_others_dear() -> None:
    """From rows that seem free: those of a drafter that always drafts four, until a plain round is measured."""
    costs = Costs()
    costs.recall(KnownCosts(0.0, 1.0, {1: 1.0, 5: 1.0, 8: 1.1}, {}, {}))
    for _ in range(30):
        teach(costs, 5, 2.0, 2.0, 2.0)
        teach(costs, 1, 1.0)
    np.testing.assert_allclose(relative(costs, 8)[4], 2.0, rtol=0.1)
    assert relative(costs, 8)[7] >= relative(costs, 8)[4]


def test_where_forwards_follow_each_other_one_alone_tells_nothing_of_plain_decoding() -> None:
    costs = Costs()
    teach(costs, 1, 1.0)
    assert costs.forwards(1) == [pytest.approx(1.0)]
    for _ in range(20):
        costs.observe(replace(decoded(1, 0.8), forwards=4))
    runs = costs.runs(1)
    assert costs.forwards(1) == [pytest.approx(0.8)]
    teach(costs, 1, 1.0, 1.0)
    assert costs.forwards(1) == [pytest.approx(0.8)]
    assert costs.runs(1) == runs
    teach(costs, 3, 1.2)
    assert costs.measurements(3) > 0


def test_a_forward_with_a_call_of_its_own_costs_more_than_one_of_several_in_a_call() -> None:
    """As n-gram drafts beside those that the engine makes by itself: two rows of SmolLM2 take 1.3 and 1.1 there."""
    costs, plain = Costs(), replace(decoded(1, 1.0), forwards=4)
    several = replace(decoded(2, 1.25, draft_seconds=0.15, source="mtp"), together=8)
    for _ in range(12):
        for this in (plain, several, decoded(2, 1.3, source="ngram"), decoded(3, 1.6, source="ngram"), several):
            costs.observe(this)
    assert costs.forwards(2, source="mtp") == pytest.approx([1.0, 1.1])
    assert costs.forwards(3, source="ngram") == pytest.approx([1.0, 1.3, 1.6])
    assert costs.charge(several) == pytest.approx(1.25)
    assert costs.charge(decoded(2, 1.3, source="ngram")) == pytest.approx(1.3, abs=0.01)
    # beside another sequence a drafter has no call of several rounds
    assert costs.forwards(1, other_rows=1, source="mtp") == pytest.approx([1.3])

    known = costs.known()
    assert known is not None
    other = Costs()
    other.recall(known)
    other.observe(several)
    assert other.forwards(2, source="mtp") == pytest.approx([1.0, 1.1])
    assert other.forwards(3, source="ngram") == pytest.approx([1.0, 1.3, 1.6])


def test_one_slow_round_changes_little() -> None:
    costs = Costs()
    teach(costs, 1, *[1.0] * 8)
    teach(costs, 2, *[1.1] * 8)
    before = np.array(costs.forwards(8))
    teach(costs, 5, 50.0)
    assert (costs.forwards(8) <= 1.75 * before).all()
    assert costs.forwards(1)[0] == pytest.approx(1.0, rel=0.02)


def test_it_follows_a_growing_context() -> None:
    costs = Costs()
    for length in range(200):
        teach(costs, 1, 1.0 + 0.01 * length)
    assert costs.forwards(1)[0] == pytest.approx(3.0, rel=0.05)


def test_it_never_falls_with_rows() -> None:
    costs = Costs()
    for _ in range(5):
        for rows, seconds in ((1, 1.0), (2, 1.4), (3, 1.1), (4, 1.2)):
            teach(costs, rows, seconds)
    assert (np.diff(costs.forwards(9)) >= 0).all()


def test_rising_gives_neighbours_their_mean() -> None:
    assert rising([(1.0, 1.0), (3.0, 1.0), (1.0, 3.0), (2.0, 1.0)]) == [1.0, 1.5, 1.5, 2.0]
    assert rising([(3.0, 1.0), (2.0, 1.0), (1.0, 1.0)]) == [2.0, 2.0, 2.0]
    assert rising([]) == []


def test_below_the_least_count_that_was_measured_a_curve_has_the_form_of_its_prior() -> None:
    curve = Curve(0.05, 0.05)
    for _ in range(50):
        curve.observe(3, 0.3)
    assert curve.costs(3)[2] == pytest.approx(0.3, rel=0.05)
    assert curve.costs(6) == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.5, 0.6])


def test_drafting_is_timed_by_source_and_number_of_tokens() -> None:
    costs = Costs()
    for _ in range(3 * MEMORY):
        costs.observe(decoded(1, 1.0))
        costs.observe(decoded(5, 1.4, draft_seconds=0.4, source="mtp"))
        costs.observe(decoded(3, 1.2, draft_seconds=0.3, source="mtp"))
        costs.observe(decoded(3, 1.0, draft_seconds=0.0, source="ngram"))
    np.testing.assert_allclose(costs.drafts("mtp", 8)[1:4], [0.3, 0.35, 0.4], rtol=0.1)
    assert costs.drafts("ngram", 2)[1] < 0.01


def test_rows_of_other_sequences_count() -> None:
    costs = Costs()
    for _ in range(3 * MEMORY):
        for rows in (1, 4, 8):
            teach(costs, rows, 1.0 + 0.1 * (rows - 1))
    np.testing.assert_allclose(costs.forwards(4, other_rows=3), [1.3, 1.4, 1.5, 1.6], rtol=0.02)
    assert costs.forwards(8)[3:7] == costs.forwards(4, other_rows=3)


def test_several_threads_may_teach_and_ask() -> None:
    costs, failures = Costs(), []

    def work(first: int) -> None:
        try:
            for index in range(1000):
                teach(costs, first + index % 40, 1.0)
                assert len(costs.forwards(index % 17 + 1, other_rows=index % 5)) == index % 17 + 1
                assert costs.drafts("dice", 1)[0] >= 0.0
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(first,)) for first in (1, 50, 100, 150)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


@pytest.mark.parametrize(("length", "rows"), [(2, [1]), (16, [1, 3, 5, 6, 8]), (40, list(MEASURED_ROWS))])
def test_costs_of_a_short_context(length: int, rows: list[int]) -> None:
    assert list(measure(ToyEngine(length)).forwards) == rows


def test_measured_costs_of_an_engine() -> None:
    engine = ToyEngine(400)
    known = measure(engine)
    assert set(known.forwards) == set(MEASURED_ROWS)
    assert known.row_s > 0
    assert all(cost > 0 for cost in known.forwards.values())
    assert not known.drafts
    costs = Costs()
    costs.recall(known)
    assert costs.runs(1) == 1
    assert costs.measurements(3) == KNOWN_WEIGHT
