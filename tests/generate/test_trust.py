import numpy as np
import pytest

from ondevice.generate.drafters.acceptance import Trust

FORECAST = np.array([0.8, 0.6, 0.4], np.float32)


def test_forecasts_are_believed_at_first() -> None:
    assert Trust().share == 1.0
    assert Trust().empty == 0.0


def test_a_boaster_is_discounted_to_what_comes_true() -> None:
    trust = Trust()
    for index in range(200):
        trust.observe(FORECAST, 3, index % 2)
    assert trust.share == pytest.approx(0.5 / 1.8, rel=0.05)


def test_nobody_is_believed_more_than_they_say() -> None:
    trust = Trust()
    for _ in range(200):
        trust.observe(FORECAST, 3, 3)
    assert trust.share == pytest.approx(1.0)


def test_only_drafted_tokens_count_as_promised() -> None:
    trust = Trust()
    for _ in range(200):
        trust.observe(FORECAST, 1, 1)
        trust.observe(FORECAST, 0, 0)
    assert trust.share == pytest.approx(1.0)
    assert trust.empty == pytest.approx(0.5, abs=0.02)


def test_a_round_without_a_draft_says_nothing_about_forecasts() -> None:
    asked, silent = Trust(), Trust()
    for trust, pauses in ((asked, 0), (silent, 100)):
        for _ in range(5):
            trust.observe(FORECAST, 3, 0)
        for _ in range(pauses):
            trust.observe(FORECAST, 0, 0)
        trust.observe(FORECAST, 3, 3)
    assert silent.share == asked.share


def test_only_a_round_without_a_draft_is_empty_and_old_ones_are_forgotten() -> None:
    trust = Trust()
    for _ in range(100):
        trust.observe(FORECAST, 0, 0)
    assert trust.empty == pytest.approx(1.0, abs=0.02)
    for drafted in (1, 2, 3) * 50:
        trust.observe(FORECAST, drafted, 0)
    assert trust.empty == pytest.approx(0.0, abs=0.02)
