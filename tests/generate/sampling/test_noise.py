import math

import numpy as np
import pytest

from ondevice.generate.sampling import gumbel
from tests.generate.sampling.noise import gumbel_at, peaks_of

PINNED_KEY = 0x367E754172D24763
PINNED_GUMBELS = ["0x1.90ba4d36f6615p+1", "-0x1.ab733d25618a6p-1", "0x1.7561ee29da904p-1"]


def test_the_noise_of_a_place_is_what_it_always_was() -> None:
    """Texts of a seed depend on these numbers, on every CPU."""
    key = gumbel.key_of(11)
    assert key.tolist() == [PINNED_KEY]
    assert [gumbel_at(key, 1000, token).hex() for token in (0, 1, 262_143)] == PINNED_GUMBELS


def test_the_ends_of_the_noise_are_finite() -> None:
    assert 36.7 < gumbel.gumbel(np.uint64(0)) < 36.8
    assert -3.7 < gumbel.gumbel(np.uint64(2**64 - 1)) < -3.6


def test_noise_is_gumbel_distributed_along_tokens_and_along_places() -> None:
    """By Kolmogorov and Smirnov: of 4000 numbers, the statistic exceeds 1.95 once in a thousand."""
    key = gumbel.key_of(3)
    along = {
        "tokens": [gumbel_at(key, 7, token) for token in range(4000)],
        "places": [gumbel_at(key, place, 7) for place in range(4000)],
    }
    for each in along.values():
        drawn = np.sort(each)
        expected = np.exp(-np.exp(-drawn))
        gap = max(np.abs(expected - np.arange(4000) / 4000).max(), np.abs(expected - np.arange(1, 4001) / 4000).max())
        assert gap * math.sqrt(4000) < 1.95


def written_down(scores: np.ndarray, names: np.ndarray, temperature: float, seed: int, place: int) -> np.ndarray:
    """Entries by log weight + noise, largest first, without any bound."""
    drawn = np.array([gumbel_at(gumbel.key_of(seed), place, name) for name in names.tolist()])
    values = (scores.astype(np.float64) - float(scores.max())) / temperature + drawn
    return np.argsort(-values, kind="stable")


SPREADS = [0.0, 0.1, 3.0, 50.0]


@pytest.mark.parametrize("temperature", [0.2, 1.0, 5.0])
@pytest.mark.parametrize("spread", SPREADS)
@pytest.mark.parametrize("size", [1, 255, 256, 257, 3000])
def test_no_bound_loses_a_winner(size: int, spread: float, temperature: float) -> None:
    random = np.random.default_rng(size)
    for place in range(5):
        scores = (spread * random.standard_normal(size)).astype(np.float32)
        names = np.arange(size)
        weights = np.exp((scores.astype(np.float64) - float(scores.max())) / temperature)
        expected = written_down(scores, names, temperature, 5, place)[:3]
        best, values = np.empty(3, np.intp), np.empty(3)
        key, peak, peaks = gumbel.key_of(5), float(scores.max()), peaks_of(scores)
        count = gumbel.gumbel_argmax_all(scores, peaks, gumbel.IN_ORDER, peak, temperature, key, place, best, values)
        assert best[:count].tolist() == expected.tolist()
        first = best[0], values[0]
        count = gumbel.gumbel_argmax(scores, names, weights, names, peak, temperature, key, place, best, values)
        assert count == min(3, size) or weights.min() == 0.0
        assert best[:count].tolist() == expected[:count].tolist()
        assert (best[0], values[0]) == first, "one noise, whichever way"
        some = random.permutation(2 * size)[:size]
        expected = written_down(scores, some, temperature, 5, place)[:3]
        count = gumbel.gumbel_argmax_all(scores, peaks, some, peak, temperature, key, place, best, values)
        assert best[:count].tolist() == expected.tolist()


def test_a_forbidden_token_never_wins() -> None:
    scores = np.full(1000, -np.inf, np.float32)
    scores[[3, 700]] = 1.0
    peaks, best, values = peaks_of(scores), np.empty(4, np.intp), np.empty(4)
    for place in range(50):
        key, ids = gumbel.key_of(0), gumbel.IN_ORDER
        assert gumbel.gumbel_argmax_all(scores, peaks, ids, 1.0, 1.0, key, place, best, values) == 2
        assert set(best[:2].tolist()) == {3, 700}
