"""Rounds in which the drafter is not consulted."""

from __future__ import annotations

import pytest

from ondevice.generate.controller import LONG_PAUSE, LOSS_SHARE, MIN_ASKED, Pauses


def asked(rounds: int, tokens: float, seconds: float, asking: float) -> int:
    """How often a drafter is asked in so many rounds, if asking brings that many tokens in that many plain rounds."""
    pauses, count = Pauses(), 0
    for _ in range(rounds):
        if not pauses.skips_round():
            count += 1
            pauses.observe(tokens, seconds, asking, plain=1.0)  # type: ignore[arg-type]
    return count


@pytest.mark.parametrize("lost", [0.05, 0.3, 1.0])
def test_asking_in_vain_loses_little(lost: float) -> None:
    count = asked(2000, tokens=1, seconds=1 + lost, asking=lost)
    assert count * lost / 2000 < 1.5 * max(LOSS_SHARE, MIN_ASKED * lost / LONG_PAUSE)
    assert count >= 2000 * MIN_ASKED / (LONG_PAUSE + MIN_ASKED)  # a text may have changed


def test_a_text_that_repeats_itself_now_and_then_is_not_slept_through() -> None:
    """Fifty rounds in which asking loses, fifty in which it gains."""
    pauses, gains = Pauses(), 0
    for index in range(2000):
        good = index % 100 >= 50
        if not pauses.skips_round():
            gains += good
            pauses.observe(3 if good else 1, 1.3, 0.3, plain=1.0)
    assert gains > 0.4 * 1000


def test_what_brings_more_than_it_takes_is_always_asked() -> None:
    assert asked(500, tokens=2, seconds=1.7, asking=0.3) == 500


def test_where_asking_takes_nothing_the_schedule_is_left_alone() -> None:
    """A draft that does not pay is its business, and it notices sooner."""
    assert asked(500, tokens=1, seconds=1.2, asking=0.002) == 500


def test_one_round_that_took_ages_is_an_accident() -> None:
    pauses = Pauses()
    for seconds in (1.2, 400.0, 1.2, 1.2, 1.2, 1.2):
        pauses.observe(2, seconds, 0.1, plain=1.0)
    assert not pauses.skips_round()
