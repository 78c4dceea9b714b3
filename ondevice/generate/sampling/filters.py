"""The filters of a row: top-k, top-p and min-p, without sorting the vocabulary."""

from __future__ import annotations

from typing import Any

import numpy as np

from ondevice.arrays import Float32Array, Float64Array, IndexArray
from ondevice.generate.sampling.elementary import exponential, logarithm
from ondevice.native.functions import kernel


@kernel
def weigh(scores: Float32Array, peak: float, temperature: float, weights: Float64Array) -> None:
    """weights[i] = exp((scores[i] - peak) / temperature); scores are float32[n], weights float64[n], out."""
    for at in range(len(scores)):
        weights[at] = exponential((scores[at] - peak) / temperature)


# Top-k, in one pass over the vocabulary.


LOWEST = np.finfo(np.float32).min
TOP_K_BLOCK = 64
"""Logits compared at a time: few blocks hold one that is among the k largest so far."""


@kernel
def select_top_k(scores: Float32Array, largest: Float32Array, kept: IndexArray) -> int:
    """Fill `kept` with the indices of the k largest scores, and of all that equal the k-th, as transformers'
    `TopKLogitsWarper` does, ascending; return their number. -inf is never selected, because it cannot be drawn.

    `largest`, float32[k], is scratch: a heap of the k largest scores so far, smallest first, whose first entry is the
    score to reach.
    """
    largest[:] = LOWEST
    count = 0
    for start in range(0, len(scores), TOP_K_BLOCK):
        block = scores[start : start + TOP_K_BLOCK]
        below = 0
        for at in range(len(block)):
            below += block[at] < largest[0]
        if below == len(block):
            continue
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


@kernel
def select_reaching(scores: Float32Array, least: float, kept: IndexArray) -> int:
    """Fill `kept` with the indices of the scores of at least `least`, ascending; return their number."""
    reach = np.float32(least if least > LOWEST else LOWEST)
    count = 0
    for start in range(0, len(scores), TOP_K_BLOCK):
        block = scores[start : start + TOP_K_BLOCK]
        found = 0
        for at in range(len(block)):  # a loop of its own, so that it is vectorised
            found += block[at] >= reach
        if not found:
            continue
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


# Top-p, without sorting the vocabulary.


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
def select_few_nucleus(weights: Float64Array, top_p: float, kept: IndexArray, order: IndexArray) -> int:
    """`select_nucleus` by insertion sort. `order` intp[n] is scratch."""
    for index in range(len(weights)):
        at = index
        while at > 0 and weights[order[at - 1]] < weights[index]:
            order[at] = order[at - 1]
            at -= 1
        order[at] = index
    total = 0.0
    for at in range(len(weights)):
        total += weights[order[at]]
    before, size = 0.0, 0
    while size < len(weights) and before < top_p * total:
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
def select_nucleus(weights: Float64Array, top_p: float, mass: Float64Array, kept: IndexArray, edge: IndexArray) -> int:
    """Fill `kept` with the indices of the smallest set of weights that holds `top_p` of the mass, heaviest first,
    lowest index first in a tie; ascending. Return their number. Holtzman et al. (arXiv 1904.09751); except for ties it
    is the set of transformers' `TopPLogitsWarper`.

    weights : float64[n], at most 1 and one of them 1
    top_p : over 0 and under 1
    mass, edge : float64[DIGITS] and intp[n], scratch

    A radix selection. The mass of each leading digit shows at which digit the set ends. The weights with that digit,
    the edge, are separated by the next digit, and so on, until those left are equal.
    """
    if len(weights) <= FEW:
        return select_few_nucleus(weights, top_p, kept, edge)
    mass[:] = 0.0
    for index in range(len(weights)):
        mass[digit(weights[index], FIRST_SHIFT)] += weights[index]
    total = 0.0
    for index in range(DIGITS):
        total += mass[index]
    needed = top_p * total
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


MARGIN = 1e-5
"""Relative margin on logits that is larger than the rounding of float32."""


@kernel
def filtered(  # noqa: PLR0917
    scores: Float32Array, peak: float, temperature: float, k: int, top_p: float, min_p: float, largest_k: Float32Array,
    weights: Float64Array, mass: Float64Array, indices: IndexArray,
) -> int:  # fmt: skip
    """Fill `indices[0]` with the indices that the filters keep, ascending, and `weights` with their weights,
    exp((score - peak) / temperature); return their number.

    scores : float32[m], none of which is NaN or +inf
    peak : the largest of them, not -inf
    k, top_p, min_p : the filters; k = 0, top_p = 1.0 and min_p = 0.0 keep every token
    largest_k, weights, mass, indices : the fields of `RowScratch` for m scores or more
    """
    kept, inside, count = indices[0], indices[1], len(scores)
    few = k > 0 or (top_p == 1.0 and min_p > 0.0)  # exponentials are taken of few scores only
    if k > 0:
        count = select_top_k(scores, largest_k[: min(k, len(scores))], kept)
    elif few:
        below = temperature * -logarithm(min_p)
        count = select_reaching(scores, peak - below - MARGIN * (abs(peak) + below), kept)
    if few:
        for at in range(count):
            weights[at] = exponential((scores[kept[at]] - peak) / temperature)
    else:
        weigh(scores, peak, temperature, weights)
    if top_p < 1.0:
        count = select_nucleus(weights[:count], top_p, mass, inside, indices[2])
        for at in range(count):  # `inside` is ascending, so no entry is overwritten before it is read
            kept[at] = kept[inside[at]] if few else inside[at]
            weights[at] = weights[inside[at]]
    elif not few:
        for at in range(count):
            kept[at] = at
    left = 0
    for at in range(count):
        if weights[at] >= min_p:
            kept[left] = kept[at]
            weights[left] = weights[at]
            left += 1
    return left
