"""Gumbel noise, and the draw that it decides.

Gumbel-max: argmax of log p + g, with Gumbel noise g that is independent between tokens, is a draw from p. Here the
noise is a pure function of seed, position in the sequence and token id. As no draw depends on those before it, a text
depends on target, options and seed alone, whatever was drafted. And a drafter that draws with the same noise from a q
near p mostly draws the same token: Daliri, Musco, Suresh, "Coupling without Communication and Drafter-Invariant
Speculative Decoding" (arXiv 2408.07978).

A draw is the same on every CPU and operating system: see `elementary`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ondevice.arrays import Float32Array, Float64Array, IndexArray
from ondevice.generate.sampling.elementary import exponential, logarithm
from ondevice.generate.sampling.peaks import BLOCK, peak_of
from ondevice.native.functions import kernel

# Noise.

Key = NDArray[np.uint64]
"""uint64[1], the key of a generation's noise."""

GOLDEN = np.uint64(0x9E3779B97F4A7C15)
MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
MIX_2 = np.uint64(0x94D049BB133111EB)
"""Constants of splitmix64: Steele, Lea, Flood, "Fast splittable pseudorandom number generators" (OOPSLA 2014)."""

DROPPED_BITS = np.uint64(12)
UNIT = 2.0**-52
"""A hash h becomes the uniform number ((h >> DROPPED_BITS) + 0.5) * UNIT: with 52 bits it is below 1 even after
rounding."""


def key_of(seed: int | None) -> Key:
    """The key for a seed, an integer from 0 on of any size; for None, from the operating system's random numbers."""
    return np.random.SeedSequence(seed).generate_state(1, np.uint64).astype(np.uint64)


@kernel
def mixed(z: np.uint64) -> np.uint64:
    """The finaliser of splitmix64: a permutation of uint64 in which each bit of the result depends on each bit of z."""
    z = (z ^ (z >> np.uint64(30))) * MIX_1
    z = (z ^ (z >> np.uint64(27))) * MIX_2
    return z ^ (z >> np.uint64(31))


@kernel
def hashed(start: np.uint64, index: int) -> np.uint64:
    """The number at `index` of the splitmix64 sequence from `start` (uint64)."""
    return mixed(start + (np.uint64(index) + np.uint64(1)) * GOLDEN)


@kernel
def gumbel(bits: np.uint64) -> float:
    """A standard Gumbel number, within -3.7 to 36.8, from the 64 bits of a hash."""
    return -logarithm(-logarithm(1.0 - (float(bits >> DROPPED_BITS) + 0.5) * UNIT))


EVERY: Any = np.int64(-(1 << 63))
IN_ORDER = np.full(1, EVERY)
"""Token ids of a row of the whole vocabulary, in order: kernels take the index for the id. Not empty, because the
address of an empty array takes an exception."""


@kernel
def id_at(token_ids: IndexArray, at: int) -> int:
    """The token id of a score; see IN_ORDER."""
    return at if token_ids[0] == EVERY else token_ids[at]


# Gumbel argmax: the draw.

TOGETHER = 4
"""Blocks of scores that share a bound in `gumbel_argmax_all`, from the largest of their peaks."""

SLACK = 1.0 + 1e-9
"""Factor on bounds, which are computed less exactly than the values that they bound."""


@kernel
def gumbel_argmax(  # noqa: PLR0917
    scores: Float32Array, indices: IndexArray, weights: Float64Array, token_ids: IndexArray, peak: float,
    temperature: float, key: Key, position: int, best: IndexArray, values: Float64Array,
) -> int:  # fmt: skip
    """Fill `best` with those of `indices` that have the largest log weight + noise, largest first.

    The noise comes from v, uniform in (0, 1): g = -log(-log(1 - v)). As -log(1 - v) > v, an entry of weight w can only
    win where v < w * exp(-value to beat), so few logarithms are taken.

    scores : float32[m]; the log weight of an entry is (score - peak) / temperature
    indices : intp[n], the entries that take part, as indices of `scores`
    weights : float64[n], about exp of their log weights
    token_ids : intp[n], their token ids, which select the noise
    best, values : intp[b] and float64[b], out: the winners and their log weight + noise

    Returns:
        The number of winners.
    """
    row = hashed(key[0], position)
    count = 0
    bound = np.inf
    for index in range(len(indices)):
        bits = hashed(row, token_ids[index])
        if float(bits >> DROPPED_BITS) * UNIT < bound * weights[index]:
            value = (scores[indices[index]] - peak) / temperature + gumbel(bits)
            if value > -np.inf:
                count = insert(value, indices[index], best, values, count)
                bound = win_bound(values, count)
    return count


@kernel
def gumbel_argmax_all(  # noqa: PLR0917
    scores: Float32Array, peaks: Float32Array, token_ids: IndexArray, peak: float, temperature: float, key: Key,
    position: int, best: IndexArray, values: Float64Array,
) -> int:  # fmt: skip
    """`gumbel_argmax` over all scores, without weights: some blocks of tokens share one bound. It takes a hash and a
    comparison per token, both vectorised: less time than all exponentials.

    peaks, peak : of `find_peaks`
    token_ids : intp[m], the tokens of the scores, or IN_ORDER
    """
    row, in_order = hashed(key[0], position), token_ids[0] == EVERY
    count = 0
    bound = np.inf
    for first in range(0, len(peaks), TOGETHER):
        start = first * BLOCK
        block = scores[start : start + TOGETHER * BLOCK]
        top = np.float64(peak_of(peaks[first : first + TOGETHER]))
        share = bound * exponential((top - peak) / temperature) / UNIT
        least = np.int64(share) + 1 if share < 2.0**52 else np.int64(1) << 52
        found = 0
        if in_order:  # loops of their own, so that they are vectorised; signed, as AVX2 has no unsigned comparison
            place = row + np.uint64(start) * GOLDEN
            for _ in range(len(block)):
                place += GOLDEN
                found += int(np.int64(mixed(place) >> DROPPED_BITS) < least)
        else:
            for at in range(len(block)):
                found += int(np.int64(hashed(row, token_ids[start + at]) >> DROPPED_BITS) < least)
        if not found:
            continue
        for at in range(len(block)):
            bits = hashed(row, id_at(token_ids, start + at))
            if np.int64(bits >> DROPPED_BITS) < least:
                log_weight = (block[at] - peak) / temperature
                if float(bits >> DROPPED_BITS) * UNIT < bound * exponential(log_weight):
                    value = log_weight + gumbel(bits)
                    if value > -np.inf:
                        count = insert(value, start + at, best, values, count)
                        bound = win_bound(values, count)
    return count


@kernel
def insert(value: float, index: int, best: IndexArray, values: Float64Array, count: int) -> int:
    """Insert an entry into the lists `best` and `values`, which hold `count` entries, largest value first. Full lists
    drop their last entry.

    Returns:
        The number of entries then.
    """
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
def win_bound(values: Float64Array, count: int) -> float:
    """The largest v (see `gumbel_argmax`) with which an entry of weight 1 can still get among the best."""
    return SLACK * exponential(-values[count - 1]) if count == len(values) else np.inf
