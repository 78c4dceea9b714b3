import numpy as np
import pytest

from ondevice.generate.sampling_kernels import Nucleus

ALMOST_1 = float(np.nextafter(1.0, 0.0))


def sorted_out(weights: np.ndarray, top_p: float) -> list[int]:
    order = np.argsort(-weights, kind="stable")
    before = np.concatenate([[0.0], weights[order[:-1]]]).cumsum()
    return sorted(order[before < top_p * weights.sum()].tolist())


def test_weights_that_differ_in_their_last_bit_are_told_apart() -> None:
    steps = np.random.default_rng(0).permutation(1000)
    weights = (1.0 - steps * 2.0**-53).astype(np.float64)
    assert Nucleus(0.25).select(weights).tolist() == sorted(np.flatnonzero(steps < 250).tolist())


@pytest.mark.parametrize("bits", [6, 18, 30, 42, 52])
def test_weights_that_part_at_any_digit(bits: int) -> None:
    """The set ends among weights that share their bits down to this one."""
    random = np.random.default_rng(bits)
    weights = (1.0 + random.integers(0, 64, 500) * 2.0**-bits) / 2
    weights[7] = 1.0
    for top_p in (0.01, 0.3, 0.77):
        assert Nucleus(top_p).select(weights).tolist() == sorted_out(weights, top_p)


def test_the_lowest_ids_of_a_tie_are_kept() -> None:
    weights = np.array([0.25, 1.0, 0.25, 0.25, 0.25])
    assert Nucleus(0.6).select(weights).tolist() == [0, 1]
    assert Nucleus(0.65).select(weights).tolist() == [0, 1, 2]


def test_a_set_that_holds_exactly_as_much_as_asked_for_is_complete() -> None:
    assert Nucleus(0.5).select(np.array([0.25, 1.0, 0.5, 0.25])).tolist() == [1]
    assert Nucleus(0.75).select(np.array([0.25, 1.0, 0.5, 0.25])).tolist() == [1, 2]


def test_the_lightest_weights_are_not_taken_for_heavy_ones() -> None:
    """Their keys have more digits than are looked at."""
    weights = np.array([2.0**-256, 1.0, 2.0**-512])
    assert Nucleus(0.5).select(weights).tolist() == [1]


@pytest.mark.parametrize("top_p", [5e-324, 0.5, ALMOST_1])
def test_what_cannot_be_drawn_is_left_out(top_p: float) -> None:
    weights = np.array([0.0, 1e-300, 1.0, 0.0, 1e-310])
    assert Nucleus(top_p).select(weights).tolist() == [2]


def test_almost_everything_keeps_all_that_has_weight_enough_to_count() -> None:
    weights = np.exp(-np.arange(30.0))
    assert Nucleus(ALMOST_1).select(weights).tolist() == list(range(30))
    assert Nucleus(ALMOST_1).select(np.ones(5000)).tolist() == list(range(5000))


def test_weights_too_light_to_add_up_one_by_one_are_all_kept() -> None:
    """Their sum is part of the mass, but added one by one to 1 they are lost, so the mass needed is never reached."""
    light = 2.0**-54 * (1.0 + np.arange(2, 202) * 2.0**-16)  # heavier from id to id, in one leading digit
    assert Nucleus(ALMOST_1).select(np.concatenate([[1.0], light])).tolist() == list(range(201))


def test_a_set_does_not_depend_on_the_ones_before() -> None:
    random = np.random.default_rng(1)
    nucleus = Nucleus(0.6)
    for count in (900, 5, 2000, 900):
        weights = random.random(count)
        weights[0] = 1.0
        assert nucleus.select(weights).tolist() == sorted_out(weights, 0.6)
