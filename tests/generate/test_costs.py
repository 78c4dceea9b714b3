import threading

import numpy as np
import pytest

from ondevice.generate.costs import PRIOR_ROW, PRIOR_TOKEN, STALE, SWEEP, WINDOW, Costs, KnownCosts
from ondevice.generate.stats import ForwardCost, Round
from tests.generate.rounds import decoded


def teach(costs: Costs, rows: int, *seconds: float) -> None:
    for value in seconds:
        costs.observe(decoded(rows, value))


def test_a_draft_costs_what_was_assumed_until_it_was_measured() -> None:
    costs = Costs()
    costs.recall(KnownCosts(0.0, {1: 2.0}, {"known": {1: 0.1}}))
    assert costs.drafts("mtp", 2) == pytest.approx([0.05 * 2.0, 0.1 * 2.0])
    costs.assume("large", 0.5)
    costs.assume("known", 0.5)
    assert (costs.drafts("large", 1), costs.drafts("known", 1)) == ([1.0], [0.1])


def test_nothing_known_is_a_line_with_the_prior_slope() -> None:
    costs = Costs()
    assert costs.measurements(1) == 0
    forwards = np.array(costs.forwards(5))
    np.testing.assert_allclose(forwards / forwards[0], 1 + PRIOR_ROW * np.arange(5))
    assert 0 < costs.drafts("mtp", 1)[0] < forwards[0]


def test_a_prefill_teaches_nothing() -> None:
    costs = Costs()
    for _ in range(3):
        costs.observe(Round((0,), rows=300, seconds=9.0))
        costs.observe(Round((0,), forward=ForwardCost(301, 2, 9.0)))  # another sequence's
    assert costs.measurements(300) == 0
    assert costs.forwards(2)[0] == Costs().forwards(2)[0]


@pytest.mark.parametrize("slope", [0.0, 0.05, 0.5])
def test_it_learns_a_slope_from_a_few_row_counts(slope: float) -> None:
    costs = Costs()
    for _ in range(WINDOW + 1):
        for rows in (1, 3, 6):
            teach(costs, rows, 0.02 * (1 + slope * (rows - 1)))
    np.testing.assert_allclose(costs.forwards(12), 0.02 * (1 + slope * np.arange(12)), rtol=0.02)


def test_it_learns_a_jump() -> None:
    """Where a machine changes kernels, a table knows and a line does not."""
    costs = Costs()
    real = [1.0, 1.1, 1.2, 3.0, 3.1, 3.2]
    for _ in range(WINDOW + 1):
        for rows, seconds in enumerate(real, start=1):
            teach(costs, rows, seconds)
    np.testing.assert_allclose(costs.forwards(6), real, rtol=0.1)


def test_four_slow_rounds_of_nine_change_nothing() -> None:
    costs = Costs()
    teach(costs, 1, 1.0, 30.0, 1.0, 30.0, 1.0, 30.0, 1.0, 30.0, 1.0)
    assert costs.forwards(1)[0] == pytest.approx(1.0)


def test_one_slow_round_does_not_bend_what_was_not_measured() -> None:
    costs = Costs()
    teach(costs, 1, 1.0, 1.0, 1.0, 1.0)
    teach(costs, 2, 1.1, 1.1, 1.1, 1.1)
    before = np.array(costs.forwards(8))
    teach(costs, 5, 50.0)
    assert (costs.forwards(8) <= 1.6 * before).all()


def test_it_follows_a_growing_context() -> None:
    costs = Costs()
    for length in range(200):
        teach(costs, 1, 1.0 + 0.01 * length)
    assert costs.forwards(1)[0] == pytest.approx(3.0, rel=0.02)


def test_it_never_falls_with_rows() -> None:
    costs = Costs()
    for rows, seconds in ((1, 1.0), (2, 1.4), (3, 1.1), (4, 1.2)):
        teach(costs, rows, *[seconds] * 5)
    assert (np.diff(costs.forwards(9)) >= 0).all()


def test_a_row_count_not_run_for_long_is_forgotten() -> None:
    costs = Costs()
    teach(costs, 4, *[9.0] * 5)
    teach(costs, 1, *[1.0] * STALE)
    assert costs.measurements(4) == 5
    teach(costs, 1, *[1.0] * SWEEP)
    assert costs.measurements(4) == 0
    assert costs.forwards(4)[3] == pytest.approx(1 + 3 * PRIOR_ROW)


def test_drafting_is_timed_by_source_and_number_of_tokens() -> None:
    costs = Costs()
    for _ in range(WINDOW):
        costs.observe(decoded(5, 1.4, draft_seconds=0.4, source="mtp"))
        costs.observe(decoded(3, 1.2, draft_seconds=0.3, source="mtp"))
        costs.observe(decoded(3, 1.0, draft_seconds=0.0, source="ngram"))
    np.testing.assert_allclose(costs.drafts("mtp", 8)[1:4], [0.3, 0.35, 0.4], rtol=0.05)
    assert costs.drafts("ngram", 2)[:2] == [0.0, 0.0]


def test_a_lone_token_says_little_of_the_cost_of_several() -> None:
    costs = Costs()
    costs.observe(decoded(2, 1.1, draft_seconds=0.3, source="mtp"))
    assert costs.drafts("mtp", 3)[2] == pytest.approx(0.3 * (1 + 2 * PRIOR_TOKEN))
    for _ in range(WINDOW):
        costs.observe(decoded(4, 1.3, draft_seconds=0.9, source="mtp"))
    assert costs.drafts("mtp", 3)[2] == pytest.approx(0.9, rel=0.05)


def test_rows_of_other_sequences_count() -> None:
    costs = Costs()
    for _ in range(WINDOW):
        for rows in (1, 4, 8):
            teach(costs, rows, 1.0 + 0.1 * (rows - 1))
    np.testing.assert_allclose(costs.forwards(4, other_rows=3), [1.3, 1.4, 1.5, 1.6], rtol=0.02)
    assert costs.forwards(8)[3:7] == costs.forwards(4, other_rows=3)


def test_several_threads_may_teach_and_ask() -> None:
    """As the generations of a model do: row counts come and go meanwhile."""
    costs, failures = Costs(), []

    def work(first: int) -> None:
        try:
            for index in range(3 * STALE):
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


def test_when_the_machine_changes_all_costs_change() -> None:
    """Another program takes a core: what was not run since has become as dear as what was."""
    costs = Costs()
    for _ in range(WINDOW):
        for rows in (1, 3, 6):
            teach(costs, rows, 1 + 0.1 * (rows - 1))
    teach(costs, 3, 2.4, 2.5)
    assert costs.forwards(6)[0] == pytest.approx(1.0, rel=0.02)  # that may be an accident
    teach(costs, 3, 2.4)
    np.testing.assert_allclose(np.array(costs.forwards(6))[[0, 2, 5]], [2.0, 2.4, 3.0], rtol=0.05)
    teach(costs, 3, 1.2, 1.2, 1.2)
    np.testing.assert_allclose(np.array(costs.forwards(6))[[0, 2, 5]], [1.0, 1.2, 1.5], rtol=0.05)


def test_a_row_count_that_was_measured_at_a_bad_moment_spoils_no_other_for_long() -> None:
    costs = Costs()
    for _ in range(WINDOW):
        teach(costs, 1, 1.0)
    teach(costs, 5, 12.0, 12.0)
    teach(costs, 5, 1.2, 1.2, 1.2)
    teach(costs, 1, 1.0, 1.0)
    assert costs.forwards(1)[0] == pytest.approx(1.0)
    assert costs.forwards(5)[4] == pytest.approx(1.2, rel=0.1)
