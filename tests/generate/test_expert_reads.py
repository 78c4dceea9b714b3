"""Costs of forwards whose rows choose experts: what is learnt of one number of rows tells of the others."""

from __future__ import annotations

import pytest

from ondevice.engines.protocol import ExpertShare
from ondevice.generate.costs import Costs, ExpertReads
from ondevice.generate.stats import ForwardCost, Round, Stats

SHARE = ExpertShare(count=128, top=8, of_a_row=0.04)


def apart(rows: int) -> float:
    """Experts of rows that have nothing in common."""
    return 128 * (1 - (1 - 8 / 128) ** rows)


def forward(rows: int, experts: float, seconds: float) -> Round:
    return Round((0,), rows=rows, seconds=seconds, forward=ForwardCost(rows, rows, seconds, experts))


def seconds(rows: int, experts: float) -> float:
    """A machine on which rows are free, and experts are not."""
    return 1.0 + 0.04 * (experts - 8) + 0.001 * rows


def test_rows_that_have_nothing_in_common_choose_from_all_experts() -> None:
    reads = ExpertReads(SHARE)
    for rows in (2, 4, 8, 1, 3):
        reads.observe(rows, apart(rows))
    assert reads.pool == pytest.approx(128, abs=0.1)


def test_rows_that_choose_alike_choose_from_as_many_as_one_takes() -> None:
    reads = ExpertReads(SHARE)
    for _ in range(40):
        reads.observe(4, 8.0)
    assert reads.pool == pytest.approx(8, abs=0.1)
    assert reads.expected([1.0] * 16) == pytest.approx([1.0] * 16, abs=0.02)


def test_a_single_row_says_nothing_of_what_others_would_choose() -> None:
    reads = ExpertReads(SHARE)
    reads.observe(1, 8.0)
    assert reads.pool == 128


def test_two_rows_tell_what_eight_will_cost() -> None:
    """The text changes: forwards of eight rows that were measured before are no longer what they would be."""
    costs = Costs(SHARE)
    for _ in range(9):
        for rows in (1, 2, 8):
            costs.observe(forward(rows, 8.0, seconds(rows, 8.0)))
    assert costs.forwards(8)[7] == pytest.approx(1.0, abs=0.15)
    for _ in range(12):
        costs.observe(forward(2, apart(2), seconds(2, apart(2))))
    assert costs.forwards(8)[7] == pytest.approx(seconds(8, apart(8)), rel=0.15)
    assert costs.forwards(8)[0] == pytest.approx(1.0, abs=0.05)


def test_costs_never_fall_with_more_rows() -> None:
    costs = Costs(SHARE)
    for rows, experts in ((1, 8.0), (4, 30.0), (2, 9.0), (6, 8.0), (3, 22.0)):
        costs.observe(forward(rows, experts, seconds(rows, experts)))
        found = costs.forwards(16)
        assert found == sorted(found)


def test_a_model_without_experts_has_the_costs_that_were_measured() -> None:
    with_none, unknown = Costs(), Costs()
    with_none.observe(forward(1, 0.0, 2.0))
    unknown.observe(Round((0,), rows=1, seconds=2.0, forward=ForwardCost(1, 1, 2.0)))
    assert with_none.forwards(4) == unknown.forwards(4)


def test_stats_tell_experts_of_a_round() -> None:
    stats = Stats(new_tokens=1)
    stats.add(forward(1, 8.0, 1.0))
    stats.add(forward(3, 20.0, 1.0))
    assert stats.experts_per_round == 14
    assert Stats().experts_per_round == 0
