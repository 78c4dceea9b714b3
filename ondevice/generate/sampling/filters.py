"""The filters of a row: top-k, top-p and min-p, without sorting the vocabulary."""

from __future__ import annotations

from typing import Any

import numpy as np

from ondevice.arrays import Float32Array, Float64Array, IndexArray
from ondevice.generate.sampling.elementary import exponential, exponential_32, logarithm
from ondevice.generate.sampling.peaks import BLOCK
from ondevice.native.functions import kernel


@kernel
def weigh(scores: Float32Array, peak: float, temperature: float, weights: Float64Array) -> None:
    """weights[i] = exp((scores[i] - peak) / temperature); scores are float32[n], weights float64[n], out."""
    for at in range(len(scores)):
        weights[at] = exponential((scores[at] - peak) / temperature)


@kernel
def weigh_some(scores: Float32Array, some: IndexArray, peak: float, temperature: float, weights: Float64Array) -> float:
    """`weigh` for the scores of some indices; returns the sum of their weights."""
    mass = 0.0
    for at in range(len(some)):
        weights[at] = exponential((scores[some[at]] - peak) / temperature)
        mass += weights[at]
    return mass


# Top-k, and all scores from one on. Few blocks are looked at.


LOWEST = np.finfo(np.float32).min


@kernel
def select_top_k(scores: Float32Array, peaks: Float32Array, largest: Float32Array, kept: IndexArray) -> int:
    """Fill `kept` with the indices of the k largest scores, and of all that equal the k-th, as transformers'
    `TopKLogitsWarper` does, ascending; return their number. -inf is never selected, because it cannot be drawn.

    The k-th largest score is at least the k-th largest peak, so blocks with lower peaks are left out.

    peaks : of `peaks.find_peaks`
    largest : float32[k], scratch: a heap of the k largest numbers so far, smallest first, whose first entry is the one
        to reach
    """
    largest[:] = LOWEST
    for number in range(len(peaks)):
        if peaks[number] > largest[0]:
            replace_first(largest, peaks[number])
    largest[:] = largest[0]
    count = 0
    for number in range(len(peaks)):
        if peaks[number] < largest[0]:
            continue
        start = BLOCK * number
        block = scores[start : start + BLOCK]
        for at in range(len(block)):
            score = block[at]
            if not score < largest[0]:
                kept[count] = start + at
                count += 1
                if score > largest[0]:
                    replace_first(largest, score)
    size = 0
    for at in range(count):
        kept[size] = kept[at]
        size += not scores[kept[at]] < largest[0]
    return size


MARGIN = 1e-5
"""Relative margin on logits that is larger than the rounding of float32."""


@kernel
def least_score(peak: float, temperature: float, weight: float) -> float:
    """A score below which no token has this weight, at most 1, even if its score was rounded."""
    below = temperature * -logarithm(weight)
    return peak - below - MARGIN * (abs(peak) + below)


@kernel
def select_reaching(scores: Float32Array, peaks: Float32Array, least: float, kept: IndexArray) -> int:
    """Fill `kept` with the indices of the scores of at least `least`, ascending, but not of -inf; return their number.

    peaks : of `peaks.find_peaks`
    """
    reach = np.float32(least if least > LOWEST else LOWEST)
    count = 0
    for number in range(len(peaks)):
        if peaks[number] < reach:
            continue
        start = BLOCK * number
        block = scores[start : start + BLOCK]
        for at in range(len(block)):
            kept[count] = start + at
            count += block[at] >= reach
    return count


@kernel
def replace_first(heap: Float32Array, value: float) -> None:
    """Replace the smallest value of a heap by a larger one."""
    at = 0
    while 2 * at + 1 < len(heap):
        child = 2 * at + 1
        if child + 1 < len(heap) and heap[child + 1] < heap[child]:
            child += 1
        if value <= heap[child]:
            break
        heap[at] = heap[child]
        at = child
    heap[at] = value


# Top-p, without sorting the vocabulary: the mass of all tokens, the heaviest tokens, and those of them in the set.


LEAST_TEMPERATURE = 1e-30
"""The inverse of a lower one is not a float32. Only denormal scores differ by so little."""


@kernel
def mass_of(scores: Float32Array, peak: float, temperature: float, shares: Float32Array) -> float:
    """The sum of exp((scores[i] - peak) / temperature), to 1e-6 of itself: as exact as the cumulative sum of float32
    that transformers' `TopPLogitsWarper` takes, and a fifth of the time of exact exponentials.

    shares : float32[m], scratch
    """
    top, inverse = np.float32(peak), np.float32(1.0 / max(temperature, LEAST_TEMPERATURE))
    for at in range(len(scores)):
        shares[at] = exponential_32(np.float32((scores[at] - top) * inverse))
    size = len(scores)
    while size > 1:
        half = (size + 1) // 2
        low, high = shares[:half], shares[half:size]
        for at in range(len(high)):
            low[at] += high[at]
        size = half
    return np.float64(shares[0])


MANY_TIMES = 16.0
"""How many times the lightest weight that a token of the set can have `select_heaviest` tries first. Up to 0.15 of a
row have as much, 0.001 to 0.05 in the median, and they hold enough, but for one row in seven of SmolLM2 at top-p 0.99
and temperature 1 (rows of SmolLM2 and Gemma 3, top-p 0.8 to 0.99)."""


@kernel
def select_heaviest(  # noqa: PLR0917
    scores: Float32Array, peaks: Float32Array, peak: float, temperature: float, top_p: float, mass: float,
    kept: IndexArray, weights: Float64Array,
) -> int:  # fmt: skip
    """Fill `kept` with the indices of all scores from one on that have `top_p` of the mass, ascending, and `weights`
    with their weights; return their number.

    mass : of all scores, to 1e-6 of itself
    """
    lightest = (1.0 - top_p) / 2 * mass / len(scores)  # were all lighter, half of the rest would still be missing
    count = 0
    for weight in (min(MANY_TIMES * lightest, 1.0), lightest):
        count = select_reaching(scores, peaks, least_score(peak, temperature, weight), kept)
        if weigh_some(scores, kept[:count], peak, temperature, weights) >= top_p * mass:
            break
    return count


DIGIT_BITS = 12
DIGITS = 1 << DIGIT_BITS
FEW = 128
"""Number of weights up to which sorting is faster than radix selection; top-k usually leaves no more."""
FIRST_SHIFT: Any = np.int64(4 * DIGIT_BITS)  # not an int, for which `digit` would be compiled a second time
ONE = 0x3FF << 52
"""The bits of 1.0. The bits of positive floats are ordered as their values, so ONE - bits is a sort key."""


@kernel
def bits_of(weight: float) -> int:
    """The bits of a float64 as an int64."""
    return int(np.float64(weight).view(np.int64))


@kernel
def digit(weight: float, shift: int) -> int:
    """One of the five digits of a weight's sort key, 0 for the heaviest. A weight below 2**-256 gets the digit of a
    heavier one, and vanishes in its sum by rounding.
    """
    return ((ONE - bits_of(weight)) >> shift) & (DIGITS - 1)


@kernel
def crossed(mass: Float64Array, before: float, needed: float) -> tuple[int, float]:
    """The digit at which the cumulative mass reaches `needed`, and the mass before that digit."""
    last, start = 0, before
    for index in range(DIGITS):
        if mass[index] > 0.0:
            last, start = index, before
            before += mass[index]
            if before >= needed:
                break
    return last, start


@kernel
def select_few_nucleus(weights: Float64Array, needed: float, kept: IndexArray, order: IndexArray) -> int:
    """`select_nucleus` by insertion sort. `order` intp[n] is scratch."""
    for index in range(len(weights)):
        at = index
        while at > 0 and weights[order[at - 1]] < weights[index]:
            order[at] = order[at - 1]
            at -= 1
        order[at] = index
    before, size = 0.0, 0
    while size < len(weights) and before < needed:
        index = order[size]
        before += weights[index]
        at = size
        while at > 0 and kept[at - 1] > index:
            kept[at] = kept[at - 1]
            at -= 1
        kept[at] = index
        size += 1
    return size


@kernel
def select_nucleus(weights: Float64Array, needed: float, mass: Float64Array, kept: IndexArray, edge: IndexArray) -> int:
    """Fill `kept` with the indices of the smallest set of weights whose sum is `needed`, heaviest first, lowest index
    first in a tie; ascending. Return their number. Holtzman et al. (arXiv 1904.09751); except for ties it is the set of
    transformers' `TopPLogitsWarper`.

    weights : float64[n], at most 1 and one of them 1
    needed : a share of the sum of all weights, over 0; of more than the sum of these, all are kept
    mass, edge : float64[DIGITS] and intp[n], scratch

    A radix selection. The mass of each leading digit shows at which digit the set ends. The weights with that digit,
    the edge, are separated by the next digit, and so on, until those left are equal.
    """
    if len(weights) <= FEW:
        return select_few_nucleus(weights, needed, kept, edge)
    mass[:] = 0.0
    for index in range(len(weights)):
        mass[digit(weights[index], FIRST_SHIFT)] += weights[index]
    last, before = crossed(mass, 0.0, needed)
    beyond = ONE - ((last + 1) << FIRST_SHIFT)
    count = 0
    for index in range(len(weights)):
        kept[count] = index  # without a branch: it would be mispredicted too often
        count += bits_of(weights[index]) > beyond
    edges = 0
    for at in range(count):
        edge[edges] = kept[at]
        edges += digit(weights[kept[at]], FIRST_SHIFT) == last
    for shift in range(FIRST_SHIFT - DIGIT_BITS, -1, -DIGIT_BITS):
        mass[:] = 0.0
        for at in range(edges):
            mass[digit(weights[edge[at]], shift)] += weights[edge[at]]
        last, before = crossed(mass, before, needed)
        inside = 0
        for at in range(edges):
            edge[inside] = edge[at]
            inside += digit(weights[edge[at]], shift) == last
        edges = inside
    if not edges:  # the weights are no numbers
        return 0
    # A token is kept while the mass before it falls short of what is needed.
    lightest = weights[edge[0]]
    ties = 1
    while ties < edges and before + ties * lightest < needed:
        ties += 1
    last_tie = edge[ties - 1]
    size = 0
    for at in range(count):
        index = kept[at]
        kept[size] = index
        size += weights[index] > lightest or (weights[index] == lightest and index <= last_tie)
    return size


# All filters.


@kernel
def filtered(  # noqa: PLR0917
    scores: Float32Array, peak: float, temperature: float, k: int, top_p: float, min_p: float, peaks: Float32Array,
    largest_k: Float32Array, weights: Float64Array, digit_mass: Float64Array, indices: IndexArray,
) -> int:  # fmt: skip
    """Fill `indices[0]` with the indices that the filters keep, ascending, and `weights` with their weights,
    exp((score - peak) / temperature); return their number.

    scores : float32[m], none of which is NaN or +inf
    peak, peaks : of `peaks.find_peaks`; the peak is not -inf
    k, top_p, min_p : the filters; k = 0, top_p = 1.0 and min_p = 0.0 keep every token
    largest_k, weights, digit_mass, indices : the fields of `RowScratch` for m scores or more
    """
    kept, inside, mass = indices[0], indices[1], 0.0
    if k > 0:
        count = select_top_k(scores, peaks, largest_k[: min(k, len(scores))], kept)
        mass = weigh_some(scores, kept[:count], peak, temperature, weights)
    elif top_p < 1.0:
        mass = mass_of(scores, peak, temperature, largest_k)
        count = select_heaviest(scores, peaks, peak, temperature, top_p, mass, kept, weights)
    elif min_p > 0.0:
        count = select_reaching(scores, peaks, least_score(peak, temperature, min_p), kept)
        weigh_some(scores, kept[:count], peak, temperature, weights)
    else:
        count = len(scores)
        weigh(scores, peak, temperature, weights)
        for at in range(count):
            kept[at] = at
    if top_p < 1.0:
        count = select_nucleus(weights[:count], top_p * mass, digit_mass, inside, indices[2])
        for at in range(count):  # `inside` is ascending, so no entry is overwritten before it is read
            kept[at], weights[at] = kept[inside[at]], weights[inside[at]]
    left = 0
    for at in range(count):
        if weights[at] >= min_p:
            kept[left], weights[left] = kept[at], weights[at]
            left += 1
    return left
