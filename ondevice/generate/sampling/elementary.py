"""Compiled logarithm and exponential of float64, and an exponential of float32: the same bits on every CPU and system.

C libraries differ in the last bit of theirs. These use integers, and sums, products and quotients of float64, whose
rounding IEEE 754 fixes.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ondevice.native.functions import kernel

FRACTION_BITS = 52
FRACTION = (1 << FRACTION_BITS) - 1
BIAS = 1023
"""Parts of a float64: bits of the fraction, their mask, and the exponent's bits of 1.0."""

SMALLEST_NORMAL = 2.0**-1022

LN2_HIGH = float.fromhex("0x1.62e42fee00000p-1")
"""The first 32 bits of ln 2: their products with exponents are exact."""
LN2_LOW = float.fromhex("0x1.a39efp-33")
"""The next 21 bits: with LN2_HIGH, ln 2 rounded to float64."""
LN2_REST = float.fromhex("0x1.a39ef35793c76p-33")
"""ln 2 - LN2_HIGH, rounded to float64."""
PER_LN2 = float.fromhex("0x1.71547652b82fep+0")
"""1 / ln 2."""

ROUNDER = 1.5 * 2.0**52
"""A number of magnitude below 2**51 is rounded to an integer when this is added: the fraction's low bits hold it."""
ROUNDER_BITS = (BIAS + FRACTION_BITS << FRACTION_BITS) + (1 << FRACTION_BITS - 1)
LOWEST_EXPONENT, HIGHEST_EXPONENT = -746.0, 710.0
"""Arguments beyond which an exponential is 0 and infinity."""


@kernel
def fraction_and_exponent(x: float) -> tuple[float, int]:
    """`math.frexp` of a positive, finite number: f in [0.5, 1) and e with x = f * 2**e."""
    exponent = 1 - BIAS
    if x < SMALLEST_NORMAL:
        x *= 2.0**FRACTION_BITS
        exponent -= FRACTION_BITS
    bits = int(np.float64(x).view(np.int64))
    half = (bits & FRACTION) | ((BIAS - 1) << FRACTION_BITS)
    return float(np.int64(half).view(np.float64)), exponent + (bits >> FRACTION_BITS)


@kernel
def logarithm(x: float) -> float:
    """The natural logarithm of a positive, finite number, to 2 units in the last place."""
    mantissa, exponent = fraction_and_exponent(x)
    if mantissa < 0.7071067811865476:
        mantissa *= 2.0
        exponent -= 1
    # log((1 + s) / (1 - s)) = 2 (s + s**3 / 3 + s**5 / 5 + ...), |s| < 0.1716; s itself is exact where x is near 1
    s = (mantissa - 1.0) / (mantissa + 1.0)
    square = s * s
    series = 1.0 / 23.0
    for odd in range(21, 1, -2):
        series = 1.0 / odd + square * series
    return exponent * LN2_HIGH + (2.0 * s + (2.0 * s * (square * series) + exponent * LN2_LOW))


@kernel
def power_of_2(exponent: int) -> float:
    """2**exponent, for exponents of normal numbers."""
    return float(np.int64((exponent + BIAS) << FRACTION_BITS).view(np.float64))


@kernel
def exponential(x: float) -> float:
    """e**x for any x, to 0.7 units in the last place; to 1 unit where the result is denormal.

    Without a branch, so that a loop of it is vectorised.
    """
    within = LOWEST_EXPONENT if x < LOWEST_EXPONENT else x  # NaN stays NaN
    within = HIGHEST_EXPONENT if within > HIGHEST_EXPONENT else within
    rounded = within * PER_LN2 + ROUNDER
    exponent = int(np.float64(rounded).view(np.int64)) - ROUNDER_BITS
    count = rounded - ROUNDER
    # x = count * ln 2 + high - low, with |high - low| < 0.3466. `high` is exact, and so is 1 + high = first + rest.
    high, low = within - count * LN2_HIGH, count * LN2_REST
    r = high - low
    square = r * r
    even = 1 / 3628800 + square * (1 / 479001600 + square * (1 / 87178291200))
    even = 1 / 2 + square * (1 / 24 + square * (1 / 720 + square * (1 / 40320 + square * even)))
    odd = 1 / 39916800 + square * (1 / 6227020800)
    odd = 1 / 6 + square * (1 / 120 + square * (1 / 5040 + square * (1 / 362880 + square * odd)))
    first = 1.0 + high
    rest = high - (first - 1.0)
    result = first + (rest + (square * (even + r * odd) - low))
    # In two steps: 2**exponent alone may be no normal number. At most the second is rounded.
    step = exponent >> 1
    return result * power_of_2(step) * power_of_2(exponent - step)


# In float32, for sums of many.

LEAST_32: Any = np.float32(-87.0)
"""The smallest argument of `exponential_32`; its exponential is a normal number."""
PER_LN2_32: Any = np.float32(PER_LN2)
LN2_32: Any = np.float32(0.6931472)
ROUNDER_32: Any = np.float32(1.5 * 2.0**23)
ROUNDER_32_BITS: Any = np.int32(0x4B400000)
FRACTION_BITS_32: Any = np.int32(23)


@kernel
def exponential_32(x: Any) -> Any:
    """e**x of a float32 of at most 0, to 3e-7 of itself where x > -1, to 1e-5 elsewhere; -87 and less are taken as -87.
    It takes a fifth of the time of `exponential`.
    """
    within = x if x > LEAST_32 else LEAST_32
    rounded = np.float32(within * PER_LN2_32 + ROUNDER_32)
    exponent = np.int32(rounded.view(np.int32) - ROUNDER_32_BITS) + np.int32(127)
    r = within - (rounded - ROUNDER_32) * LN2_32
    square = r * r
    sixth, fifth = np.float32(1 / 6), np.float32(1 / 120)
    rest = np.float32(1 / 24) + r * fifth + square * np.float32(1 / 720)
    series = np.float32(1.0) + r + square * (np.float32(0.5) + r * sixth + square * rest)
    return series * np.int32(np.int32(exponent) << FRACTION_BITS_32).view(np.float32)
