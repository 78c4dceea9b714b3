"""Rounds in which nobody asks a drafter."""

from __future__ import annotations

import pytest

from ondevice.decoding.rest import ASKED, LOSS, MOST, Rest


def asked(rounds: int, tokens: float, seconds: float, asking: float) -> int:
    """How often a drafter is asked in so many rounds, if asking brings that many tokens in that many plain rounds."""
    rest, count = Rest(), 0
    for _ in range(rounds):
        if not rest.begins():
            count += 1
            rest.observe(tokens, seconds, asking, plain=1.0)  # type: ignore[arg-type]
    return count


@pytest.mark.parametrize("lost", [0.05, 0.3, 1.0])
def test_asking_in_vain_loses_little(lost: float) -> None:
    count = asked(2000, tokens=1, seconds=1 + lost, asking=lost)
    assert count * lost / 2000 < 1.5 * max(LOSS, ASKED * lost / MOST)
    assert count >= 2000 * ASKED / (MOST + ASKED)  # a text may have changed


def test_a_text_that_repeats_itself_now_and_then_is_not_slept_through() -> None:
    """Fifty rounds in which asking loses, fifty in which it gains."""
    rest, gains = Rest(), 0
    for index in range(2000):
        good = index % 100 >= 50
        if not rest.begins():
            gains += good
            rest.observe(3 if good else 1, 1.3, 0.3, plain=1.0)
    assert gains > 0.4 * 1000


def test_what_brings_more_than_it_takes_is_always_asked() -> None:
    assert asked(500, tokens=2, seconds=1.7, asking=0.3) == 500


def test_where_asking_takes_nothing_the_schedule_is_left_alone() -> None:
    """A draft that does not pay is its business, and it notices sooner."""
    assert asked(500, tokens=1, seconds=1.2, asking=0.002) == 500


def test_one_round_that_took_ages_is_an_accident() -> None:
    rest = Rest()
    for seconds in (1.2, 400.0, 1.2, 1.2, 1.2, 1.2):
        rest.observe(2, seconds, 0.1, plain=1.0)
    assert not rest.begins()
