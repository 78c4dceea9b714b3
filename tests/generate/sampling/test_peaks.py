"""The largest score of every block of a row."""

import numpy as np
import pytest

from ondevice.generate.sampling.peaks import BLOCK, find_peaks, ordered, peak_of, unordered
from tests.generate.sampling.noise import peaks_of

NEGATIVE_NAN = np.array([0xFFC00000], np.uint32).view(np.float32)[0]


@pytest.mark.parametrize("block", [[-3.5, -1.25, -9.0], [-np.inf, -2.0], [0.0, -0.0, 7.5], [-0.0, -1.0]], ids=str)
def test_the_largest_of_some_floats(block: list[float]) -> None:
    assert peak_of(np.array(block, np.float32)) == max(block)


def test_the_largest_of_none_is_the_lowest() -> None:
    assert peak_of(np.zeros(0, np.float32)) == -np.inf


def test_numbers_of_floats_are_ordered_as_the_floats() -> None:
    bits = np.random.default_rng(0).integers(0, 2**32, 3000, dtype=np.uint32).view(np.float32)
    floats = np.array(sorted([*bits[~np.isnan(bits)].tolist(), -np.inf, -0.0, 0.0, 1e-45, np.inf]), np.float32)
    numbers = [int(ordered(each)) for each in floats]
    assert numbers == sorted(numbers)
    assert [float(unordered(np.int32(number))) for number in numbers] == floats.tolist()
    for nan in (np.float32(np.nan), NEGATIVE_NAN):
        assert ordered(nan) > numbers[-1]
        assert np.isnan(unordered(np.int32(ordered(nan))))


@pytest.mark.parametrize("size", [1, BLOCK - 1, BLOCK, BLOCK + 1, 1000])
def test_every_block_has_its_peak(size: int) -> None:
    scores = np.random.default_rng(size).standard_normal(size).astype(np.float32)
    expected = [scores[start : start + BLOCK].max() for start in range(0, size, BLOCK)]
    assert peaks_of(scores).tolist() == expected
    assert find_peaks(scores, np.empty(len(expected), np.float32)) == scores.max()


@pytest.mark.parametrize("place", [0, BLOCK, 517, 999])
@pytest.mark.parametrize("nan", [np.float32(np.nan), NEGATIVE_NAN], ids=["positive", "negative"])
def test_a_nan_is_found_wherever_it_is(place: int, nan: np.float32) -> None:
    scores = np.full(1000, np.inf, np.float32)
    scores[place] = nan
    assert np.isnan(find_peaks(scores, np.empty(-(-1000 // BLOCK), np.float32)))
