import numpy as np
import pytest

from ondevice.generate.drafters.acceptance import HOPELESS, Calibration, PositionAcceptance


def test_calibration_starts_by_trusting_the_raw_value() -> None:
    calibration = Calibration()
    for raw in (0.0, 0.013, 0.5, 0.77, 1.0):
        assert calibration.probability(raw) == pytest.approx(raw)


def test_calibration_learns_what_a_confidence_is_worth() -> None:
    random = np.random.default_rng(0)
    calibration = Calibration()
    for raw in random.random(4000):
        calibration.observe(raw, bool(random.random() < raw**3))
    raw = np.linspace(0.05, 0.95, 19)
    learnt = np.array([calibration.probability(value) for value in raw])
    np.testing.assert_allclose(learnt, raw**3, atol=0.15)
    assert np.abs(learnt - raw**3).mean() < 0.07


def test_calibration_forgets_old_text_and_in_the_end_its_prior() -> None:
    calibration = Calibration()
    for taken in [True] * 500 + [False] * 600:
        calibration.observe(0.8, taken)
    assert calibration.probability(0.8) < 0.02


def test_calibration_of_one_confidence_leaves_others_alone() -> None:
    calibration = Calibration()
    for _ in range(100):
        calibration.observe(0.9, False)
    assert calibration.probability(0.5) == pytest.approx(0.5)


def test_acceptance_starts_as_the_prior_at_every_position() -> None:
    acceptance = PositionAcceptance(start=0.6)
    np.testing.assert_allclose(acceptance.conditional(3), 0.6, rtol=1e-6)
    np.testing.assert_allclose(acceptance.survival(3), [0.6, 0.36, 0.216], rtol=1e-6)
    assert acceptance.survival(0).shape == (0,)


def test_a_measured_acceptance_outweighs_a_few_drafts() -> None:
    measured, guessed = PositionAcceptance(0.45, sure=20.0), PositionAcceptance(0.45)
    for acceptance in (measured, guessed):
        for _ in range(2):
            acceptance.observe(1, 0)
    assert measured.survival(1)[0] > 0.4
    assert guessed.survival(1)[0] < 0.3
    for _ in range(200):
        measured.observe(2, 2)
    np.testing.assert_allclose(measured.conditional(2), [0.75, 1.0], atol=0.05)


def test_hopeless_nodes_of_a_tree_are_not_forecast() -> None:
    acceptance = PositionAcceptance(start=0.4)
    survival, depths = acceptance.survival_with_siblings(16, 0.1)
    assert len(survival) == len(depths) < 9
    assert (survival[:-1] >= HOPELESS).all()
    assert (np.diff(survival) <= 0).all()
    assert len(PositionAcceptance(start=0.9).survival_with_siblings(16, 0.1)[0]) == 16
    assert len(PositionAcceptance(start=1e-6).survival_with_siblings(16, 1e-6)[0]) == 1


def test_acceptance_learns_each_position() -> None:
    chances = np.array([0.84, 0.71, 0.64, 0.70])
    random = np.random.default_rng(0)
    learnt = []
    acceptance = PositionAcceptance()
    for _ in range(2000):
        misses = np.flatnonzero(random.random(4) >= chances)
        acceptance.observe(4, int(misses[0]) if len(misses) else 4)
        learnt.append(acceptance.conditional(4))
    np.testing.assert_allclose(np.mean(learnt[500:], axis=0), chances, atol=0.04)


def test_acceptance_beyond_a_miss_says_nothing() -> None:
    acceptance = PositionAcceptance()
    acceptance.observe(4, 0)
    first, *rest = acceptance.conditional(4)
    np.testing.assert_array_equal(rest, first)


def test_a_position_not_reached_for_long_leans_on_the_one_before_again() -> None:
    acceptance = PositionAcceptance()
    for _ in range(20):
        acceptance.observe(2, 1)
    assert acceptance.conditional(2)[1] < 0.3
    for _ in range(150):
        acceptance.observe(1, 1)
    assert acceptance.conditional(2)[1] > 0.9


def test_acceptance_follows_the_text() -> None:
    acceptance = PositionAcceptance()
    for accepted in [2] * 200 + [0] * 100:
        acceptance.observe(2, accepted)
    assert acceptance.survival(1)[0] < 0.03


def test_a_long_pause_makes_old_failures_count_less() -> None:
    acceptance = PositionAcceptance(start=0.6)
    for _ in range(100):
        acceptance.observe(2, 0)
    chances = []
    for _ in range(1000):
        acceptance.pass_by(1)
        chances.append(float(acceptance.survival(1)[0]))
    assert chances[20] < 0.1
    assert chances[150] > 0.3
    assert chances == sorted(chances)
    np.testing.assert_allclose(acceptance.conditional(3), 0.6, atol=0.01)


def tried(acceptance: PositionAcceptance, rounds: int, *, right: bool) -> int:
    """Drafts of one token in so many rounds, where one is drafted once its chance is a fifth."""
    drafts = 0
    for _ in range(rounds):
        if acceptance.survival(1)[0] > 0.2:
            acceptance.observe(1, int(right))
            drafts += 1
        else:
            acceptance.pass_by(1)
    return drafts


def test_one_that_becomes_right_drafts_from_the_first_trial_on() -> None:
    acceptance = PositionAcceptance()
    tried(acceptance, 300, right=False)
    assert tried(acceptance, 200, right=True) > 100
    assert acceptance.survival(1)[0] > 0.9
