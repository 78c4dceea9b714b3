"""The largest score of every block of a row: with them, filters and draws leave out nearly all other scores."""

from __future__ import annotations

from typing import Any

import numpy as np

from ondevice.arrays import Float32Array
from ondevice.native.functions import kernel

BLOCK = 64
"""Scores that share a peak."""

# Maxima of floats are not vectorised, because of NaN, so these are of integers. numba combines two int32 to an int64:
# every result is made an int32 again, of which a vector holds twice as many. Both took 19 us of a row of 49,152 scores,
# which takes 6 (AMD Zen 3).

MAGNITUDE = np.int32(2**31 - 1)
"""All bits of an int32 except the sign."""
NEGATIVE_NANS = np.int32(0x007FFFFF)
"""Number of the NaNs with a sign."""
LOWEST_ORDERED = np.int32(-(2**31))
"""The `ordered` number of -inf."""


@kernel
def ordered(score: float) -> Any:
    """An int32 that is ordered as the float32 `score` is; those of NaN are larger than that of +inf."""
    bits = np.float32(score).view(np.int32)
    ascending = np.int32(bits ^ ((bits >> np.int32(31)) & MAGNITUDE))
    return np.int32(ascending - NEGATIVE_NANS)  # the lowest numbers, those of negative NaNs, become the highest


@kernel
def unordered(number: Any) -> Any:
    """The float32 of an `ordered` number."""
    ascending = np.int32(number + NEGATIVE_NANS)
    return np.int32(ascending ^ ((ascending >> np.int32(31)) & MAGNITUDE)).view(np.float32)


@kernel
def peak_of(scores: Float32Array) -> Any:
    """The largest of some float32; NaN if one is NaN, -inf if there are none."""
    most = LOWEST_ORDERED
    for at in range(len(scores)):
        most = max(most, ordered(scores[at]))
    return unordered(most)


@kernel
def find_peaks(scores: Float32Array, peaks: Float32Array) -> float:
    """Fill `peaks` with the largest score of each BLOCK scores.

    scores : float32[m]
    peaks : float32[m / BLOCK, rounded up]

    Returns:
        The largest of all as a float64, in which differences to it are taken; NaN where a score is NaN.
    """
    for number in range(len(peaks)):
        peaks[number] = peak_of(scores[BLOCK * number : BLOCK * (number + 1)])
    return np.float64(peak_of(peaks))


@kernel
def count_peaks(count: int) -> int:
    """The number of blocks of so many scores."""
    return (count + BLOCK - 1) // BLOCK
