"""Random numbers that are a pure function of a seed, a place in the sequence and a token id, and draws made with them.

Gumbel-max: argmax of log p + g, with g Gumbel distributed and independent between tokens, is a draw from p. As no draw
depends on those before it, a text depends on target, options and seed alone, however it came about. And whoever guesses
with the same noise, from a q near p, mostly draws the same token: Daliri, Musco, Suresh, "Coupling without
Communication and Drafter-Invariant Speculative Decoding" (arXiv 2408.07978).

The noise is the same on every CPU: whole numbers, and sums, products and quotients of float64, whose rounding IEEE 754
fixes. The logarithms of C libraries differ in the last bit.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from ondevice.jit import kernel

Ids = NDArray[np.intp]
Floats = NDArray[np.float32]
Weights = NDArray[np.float64]
Key = NDArray[np.uint64]

GOLDEN = np.uint64(0x9E3779B97F4A7C15)
FIRST = np.uint64(0xBF58476D1CE4E5B9)
SECOND = np.uint64(0x94D049BB133111EB)
"""Of splitmix64: Steele, Lea, Flood, "Fast splittable pseudorandom number generators" (OOPSLA 2014)."""

BITS = np.uint64(12)
UNIT = 2.0**-52
"""52 bits of a hash and a half are below 1 even after rounding."""

MAGNITUDE = np.int32(2**31 - 1)
"""All bits of an int32 but the sign."""

LN2_HIGH = float.fromhex("0x1.62e42fee00000p-1")
LN2_LOW = math.log(2.0) - LN2_HIGH
"""The high part has 32 bits, so that its products with exponents are exact."""

BLOCK = 256
"""Tokens whose largest logit says at once how likely noise must be to make one of them the winner."""

SLACK = 1.0 + 1e-9
"""On bounds, which are computed less exactly than what they bound."""


def key_of(seed: int | None) -> Key:
    """uint64[1], of a whole number of any size from 0 on; None: of the operating system's randomness."""
    return np.random.SeedSequence(seed).generate_state(1, np.uint64).astype(np.uint64)


@kernel
def mixed(z: np.uint64) -> np.uint64:
    """A permutation of the 64-bit numbers (uint64) in which every bit depends on every bit."""
    z = (z ^ (z >> np.uint64(30))) * FIRST
    z = (z ^ (z >> np.uint64(27))) * SECOND
    return z ^ (z >> np.uint64(31))


@kernel
def hashed(start: np.uint64, index: int) -> np.uint64:
    """The number at `index` of the splitmix64 sequence that begins at `start` (uint64)."""
    return mixed(start + (np.uint64(index) + np.uint64(1)) * GOLDEN)


@kernel
def logarithm(x: float) -> float:
    """The natural logarithm of a positive, normal number, to 2 units in the last place."""
    mantissa, exponent = math.frexp(x)
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
def gumbel(bits: np.uint64) -> float:
    """The 64 bits of a hash as a standard Gumbel number, within -3.7 to 36.8."""
    return -logarithm(-logarithm(1.0 - (float(bits >> BITS) + 0.5) * UNIT))


@kernel
def insert(value: float, index: int, best: Ids, values: Weights, count: int) -> int:
    """Put an entry in its place, largest first; how many there are then. The last one of a full list drops out."""
    if count == len(best):
        if value <= values[count - 1]:
            return count
        count -= 1
    at = count
    while at > 0 and values[at - 1] < value:
        best[at], values[at] = best[at - 1], values[at - 1]
        at -= 1
    best[at], values[at] = index, value
    return count + 1


@kernel
def limit(values: Weights, count: int) -> float:
    """Of a weight 1, the largest v of `race` with which it can still get among the best."""
    return SLACK * math.exp(-values[count - 1]) if count == len(values) else np.inf


@kernel
def gumbel_at(key: Key, position: int, token: int) -> float:
    """The noise that a token has at a place."""
    return gumbel(hashed(hashed(key[0], position), token))


@kernel
def race(  # noqa: PLR0917
    scores: Floats, places: Ids, weights: Weights, names: Ids, peak: float, temperature: float,
    key: Key, position: int, best: Ids, values: Weights,
) -> int:  # fmt: skip
    """Fill `best` with the places that have the largest log weight + noise, largest first; how many there are.

    Noise comes from v, uniform in (0, 1): g = -log(-log(1 - v)). As -log(1 - v) > v, an entry of weight w can only win
    where v < w exp(-value to beat), and few logarithms are taken.

    scores : float32[m], whose log weight is (score - peak) / temperature
    places : intp[n], those that take part
    weights, names : float64[n], about exp of their log weight, and intp[n], their token ids
    best, values : intp[b] and float64[b], the winners and their log weight + noise
    """
    row = hashed(key[0], position)
    count = 0
    bound = np.inf
    for index in range(len(places)):
        bits = hashed(row, names[index])
        if float(bits >> BITS) * UNIT < bound * weights[index]:
            value = (scores[places[index]] - peak) / temperature + gumbel(bits)
            if value > -np.inf:
                count = insert(value, places[index], best, values, count)
                bound = limit(values, count)
    return count


@kernel
def largest(block: NDArray[np.int32]) -> float:
    """The largest of some floats, given as their bits: because of NaN, a maximum of floats is not vectorised."""
    most = -1 - MAGNITUDE
    for at in range(len(block)):
        bits = block[at]
        most = max(most, bits ^ ((bits >> np.int32(31)) & MAGNITUDE))  # ordered as the floats are
    return float(np.int32(most ^ ((most >> np.int32(31)) & MAGNITUDE)).view(np.float32))


@kernel
def race_all(  # noqa: PLR0917
    scores: Floats, peak: float, temperature: float, key: Key, position: int, best: Ids, values: Weights
) -> int:
    """`race` over a whole vocabulary, in which an entry is its own name, without weights: blocks of them share a bound.

    A hash and a comparison per token, both vectorised: less than the exponentials of all would take.
    """
    row = hashed(key[0], position)
    count = 0
    bound = np.inf
    as_bits = scores.view(np.int32)
    for start in range(0, len(scores), BLOCK):
        block = scores[start : start + BLOCK]
        share = bound * math.exp((largest(as_bits[start : start + BLOCK]) - peak) / temperature) / UNIT
        least = np.uint64(share) + np.uint64(1) if share < 2.0**52 else np.uint64(1) << np.uint64(52)
        found = 0
        for at in range(len(block)):  # vectorised, as nothing else is done
            found += int((hashed(row, start + at) >> BITS) < least)
        if not found:
            continue
        for at in range(len(block)):
            bits = hashed(row, start + at)
            if (bits >> BITS) < least:
                value = (block[at] - peak) / temperature + gumbel(bits)
                if value > -np.inf:
                    count = insert(value, start + at, best, values, count)
        bound = limit(values, count)
    return count
