"""The search for sub-layers to skip, without an engine: costs and acceptance are made up."""

from __future__ import annotations

import random
from itertools import combinations

import pytest

from ondevice.engines.layer_path import Skips, SubLayer, Survival
from ondevice.generate.drafters.skip_search import PREFIXES, SkipCosts, SkipSearch, costs_of, survival_of

FREE: list[SubLayer] = [sub for layer in range(5) for sub in (("attention", layer), ("mlp", layer))]
COSTS = SkipCosts([1.0 + 0.02 * extra for extra in range(9)], attention=0.05, mlp=0.13)


def made_up(seed: int) -> dict[SubLayer, float]:
    """The chance that a draft survives the loss of each block."""
    rng = random.Random(seed)
    return {sub: rng.choice([0.7, 0.97, 0.99, 1.0]) for sub in FREE}


def survival(chances: dict[SubLayer, float], skips: Skips) -> Survival:
    rate = 1.0
    for sub in skips:
        rate *= chances[sub]
    return tuple(rate**count for count in range(1, 9))


@pytest.mark.parametrize("seed", range(6))
def test_it_finds_what_trying_everything_finds(seed: int) -> None:
    chances = made_up(seed)
    search = SkipSearch(FREE, COSTS)
    while (skips := search.propose()) is not None:
        assert skips not in search.tried
        search.learn(skips, survival(chances, skips))
    everything = [frozenset(chosen) for count in range(len(FREE) + 1) for chosen in combinations(FREE, count)]
    best = max(COSTS.speed_up(survival(chances, skips), search.token(skips)) for skips in everything)
    assert search.speed_up(search.best) == pytest.approx(best, rel=0.01)
    assert len(search.tried) < len(everything) / 2


def test_after_each_alone_the_least_important_ones_together_are_tried() -> None:
    """A sub-layer matters less that harms fewer tokens, and of two that harm as many, the one that takes longer."""
    chances = {sub: (0.99 if sub[1] % 2 else 0.7) for sub in FREE}
    search, proposed = SkipSearch(FREE, COSTS), []
    for _ in range(len(FREE) + PREFIXES):
        skips = search.propose()
        assert skips is not None
        proposed.append(skips)
        search.learn(skips, survival(chances, skips))
    assert proposed[: len(FREE)] == [frozenset({sub}) for sub in FREE]
    ranked = sorted(FREE, key=lambda sub: (chances[sub] < 0.99, sub[0] == "attention"))
    sizes = [10, 9, 8, 7, 5, 4, 3, 2]
    assert proposed[len(FREE) :] == [frozenset(ranked[:size]) for size in sizes]


def test_behind_the_neighbours_of_the_best_set_it_starts_again_with_a_fifth_of_the_choices_inverted() -> None:
    free: list[SubLayer] = [sub for layer in range(10) for sub in (("attention", layer), ("mlp", layer))]
    search = SkipSearch(free, SkipCosts(COSTS.rows, attention=0.02, mlp=0.07))
    for _ in range(len(free) + PREFIXES):
        search.learn(search.propose() or frozenset(), (0.5,))
    best = search.best
    distances: list[int] = []
    while not distances or distances[-1] == 1:
        skips = search.propose()
        assert skips is not None
        distances.append(len(skips ^ best))
        search.learn(skips, (0.0,))
    assert distances == [1] * (len(distances) - 1) + [4]


def test_a_record_in_between_changes_nothing() -> None:
    """`ondevice tune` makes one every few seconds, for which it asks whether anything is left to try."""
    chances = made_up(1)
    plain, recorded = SkipSearch(FREE, COSTS), SkipSearch(FREE, COSTS)
    while (skips := plain.propose()) is not None:
        assert not recorded.record().finished
        assert recorded.propose() == skips
        for search in (plain, recorded):
            search.learn(skips, survival(chances, skips))
    record = recorded.record()
    assert record.finished
    assert (record.skips, record.tried) == (plain.best, plain.tried)
    assert (record.speed_up, record.draft_share) == (plain.speed_up(plain.best), plain.token(plain.best))


def test_where_nothing_pays_the_best_set_still_leaves_something_out() -> None:
    """So that it can be tried. A record of an earlier version may contain the empty set."""
    search = SkipSearch(FREE, SkipCosts([1.0, 1.1, 1.2], attention=0.0, mlp=0.0), {frozenset(): (1.0, 1.0)})
    while (skips := search.propose()) is not None:
        assert skips
        search.learn(skips, (0.1, 0.01))
    assert search.best
    assert 0 < search.speed_up(search.best) < 1


def test_it_goes_on_where_it_was_interrupted() -> None:
    chances = made_up(1)
    whole, first = SkipSearch(FREE, COSTS), SkipSearch(FREE, COSTS)
    while (skips := whole.propose()) is not None:
        whole.learn(skips, survival(chances, skips))
    for _ in range(20):
        proposed = first.propose()
        assert proposed is not None
        first.learn(proposed, survival(chances, proposed))
    second = SkipSearch(FREE, COSTS, first.tried)
    assert second.best == first.best
    while (skips := second.propose()) is not None:
        assert skips not in first.tried
        second.learn(skips, survival(chances, skips))
    assert second.speed_up(second.best) == pytest.approx(whole.speed_up(whole.best), rel=0.01)


def test_what_is_expected_of_a_draft() -> None:
    costs = SkipCosts([1.0, 1.1, 1.2], attention=0.1, mlp=0.2)
    assert costs.token(frozenset({("attention", 1), ("mlp", 2), ("mlp", 3)})) == pytest.approx(0.5)
    assert costs.speed_up((0.5,), 0.4) == pytest.approx(1.5 / 1.5)
    assert costs.speed_up((0.8, 0.7), 0.2) == pytest.approx(max(1.8 / 1.3, 2.5 / 1.6))
    assert costs.speed_up((), 0.2) == 0.0


def test_a_draft_that_leaves_nothing_out_cannot_pay() -> None:
    for answers in ([1.0, 0.4, 0.9, 0.5], [0.7, 1.3, 0.6, 1.2], [1.4, 0.4, 1.2, 1.1]):
        costs = costs_of(answers, frozenset(FREE))
        assert costs.token(frozenset()) == 1.0
        assert costs.speed_up((1.0,) * 8, costs.token(frozenset())) <= 1.0


def test_blocks_save_what_all_of_them_save_together() -> None:
    costs = costs_of([1.4, 0.4, 0.9, 0.5], frozenset(FREE))
    assert costs.rows[:5] == pytest.approx([1.0, 1.1, 1.2, 1.3, 1.4])
    assert costs.token(frozenset(FREE)) == pytest.approx(0.4)
    assert costs.mlp == pytest.approx(5 * costs.attention)
    assert costs_of([1.0, 1.3, 0.6, 1.2], frozenset(FREE)).token(frozenset(FREE)) == 1.0


def test_runs_of_right_places() -> None:
    yes, no = True, False
    assert survival_of([[yes, yes, no, yes]]) == pytest.approx((3 / 4, 1 / 3, 0.0, 0.0))
    assert survival_of([[yes, yes], [no]]) == pytest.approx((2 / 3, 2 / 3))  # one pair begins, and it is right
    assert survival_of([[]]) == ()
