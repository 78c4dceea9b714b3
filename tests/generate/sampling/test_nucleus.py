import numpy as np
import pytest

from ondevice.generate.sampling.filters import DIGITS, select_nucleus

ALMOST_1 = float(np.nextafter(1.0, 0.0))


def selected(top_p: float, weights: np.ndarray) -> list[int]:
    kept, edge = np.empty((2, len(weights)), np.intp)
    return kept[: select_nucleus(weights, top_p * weights.sum(), np.empty(DIGITS), kept, edge)].tolist()


def sorted_out(weights: np.ndarray, top_p: float) -> list[int]:
    order = np.argsort(-weights, kind="stable")
    before = np.concatenate([[0.0], weights[order[:-1]]]).cumsum()
    return sorted(order[before < top_p * weights.sum()].tolist())


def test_weights_that_differ_in_their_last_bit_are_told_apart() -> None:
    steps = np.random.default_rng(0).permutation(1000)
    weights = (1.0 - steps * 2.0**-53).astype(np.float64)
    assert selected(0.25, weights) == sorted(np.flatnonzero(steps < 250).tolist())


@pytest.mark.parametrize("bits", [6, 18, 30, 42, 52])
def test_weights_that_part_at_any_digit(bits: int) -> None:
    """The set ends among weights that share their bits down to this one."""
    random = np.random.default_rng(bits)
    weights = (1.0 + random.integers(0, 64, 500) * 2.0**-bits) / 2
    weights[7] = 1.0
    for top_p in (0.01, 0.3, 0.77):
        assert selected(top_p, weights) == sorted_out(weights, top_p)


def test_the_lowest_ids_of_a_tie_are_kept() -> None:
    weights = np.array([0.25, 1.0, 0.25, 0.25, 0.25])
    assert selected(0.6, weights) == [0, 1]
    assert selected(0.65, weights) == [0, 1, 2]


def test_a_set_that_holds_exactly_as_much_as_asked_for_is_complete() -> None:
    assert selected(0.5, np.array([0.25, 1.0, 0.5, 0.25])) == [1]
    assert selected(0.75, np.array([0.25, 1.0, 0.5, 0.25])) == [1, 2]


def test_the_lightest_weights_are_not_taken_for_heavy_ones() -> None:
    """Their keys have more digits than are looked at."""
    weights = np.array([2.0**-256, 1.0, 2.0**-512])
    assert selected(0.5, weights) == [1]


@pytest.mark.parametrize("top_p", [5e-324, 0.5, ALMOST_1])
def test_what_cannot_be_drawn_is_left_out(top_p: float) -> None:
    weights = np.array([0.0, 1e-300, 1.0, 0.0, 1e-310])
    assert selected(top_p, weights) == [2]


def test_almost_everything_keeps_all_that_has_weight_enough_to_count() -> None:
    weights = np.exp(-np.arange(30.0))
    assert selected(ALMOST_1, weights) == list(range(30))
    assert selected(ALMOST_1, np.ones(5000)) == list(range(5000))


def test_weights_too_light_to_add_up_one_by_one_are_all_kept() -> None:
    """Their sum is part of the mass, but added one by one to 1 they are lost, so the mass needed is never reached."""
    light = 2.0**-54 * (1.0 + np.arange(2, 202) * 2.0**-16)  # heavier from id to id, in one leading digit
    assert selected(ALMOST_1, np.concatenate([[1.0], light])) == list(range(201))
