"""The top-p set of a vocabulary, without sorting it."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ondevice.jit import kernel

Ids = NDArray[np.intp]
Probabilities = NDArray[np.float64]

DIGIT_BITS = 12
DIGITS = 1 << DIGIT_BITS
FEW = 128
"""Weights that are sorted sooner than their digits are counted: top-k leaves no more in the usual case."""
FIRST_SHIFT: Any = np.int64(4 * DIGIT_BITS)  # not a plain number, for which `digit` would be compiled once more
ONE = 0x3FF << 52
"""The bits of 1.0. Bits order positive numbers as their values do, so a distance from these is a sort key."""


class Nucleus:
    """The smallest set of tokens that holds `top_p` of the mass: likeliest first, lowest id first in a tie.

    Holtzman et al. (arXiv 1904.09751). Ties apart, it is the set of transformers' `TopPLogitsWarper`.

    top_p : over 0 and under 1
    """

    def __init__(self, top_p: float) -> None:
        self._top_p = top_p
        self._mass = np.empty(DIGITS)
        self._kept, self._edge = np.empty(0, np.intp), np.empty(0, np.intp)
        self.of(np.ones(1))  # so that no kernel is compiled, or loaded, while tokens wait for it

    def of(self, weights: Probabilities) -> Ids:
        """Where the set lies, ascending; valid until the next call.

        weights : float64[n], contiguous, at most 1 and one of them 1
        """
        if len(self._kept) < len(weights):
            self._kept, self._edge = np.empty(len(weights), np.intp), np.empty(len(weights), np.intp)
        return self._kept[: select(weights, self._top_p, self._mass, self._kept, self._edge)]


@kernel
def digit(bits: int, shift: int) -> int:
    """Of five, 0 for the heaviest. What is lighter than 2**-256 passes for heavier in a sum, where it rounds away."""
    return ((ONE - bits) >> shift) & (DIGITS - 1)


@kernel
def crossed(mass: Probabilities, before: float, needed: float) -> tuple[int, float]:
    """The digit with which the mass comes to what is needed, and the mass before it."""
    last, start = 0, before
    for index in range(DIGITS):
        if mass[index] > 0.0:
            last, start = index, before
            before += mass[index]
            if before >= needed:
                break
    return last, start


@kernel
def select_few(weights: Probabilities, top_p: float, kept: Ids, order: Ids) -> int:
    """`select` by sorting. `order` intp[n] is scratch."""
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
def select(weights: Probabilities, top_p: float, mass: Probabilities, kept: Ids, edge: Ids) -> int:
    """Fill `kept` with the set; how many there are. `mass` float64[DIGITS] and `edge` intp[n] are scratch.

    A radix selection. The mass of each leading digit says in which one the set ends; what shares that one, the edge, is
    told apart by the next digit, until what is left of it is equal.
    """
    if len(weights) <= FEW:
        return select_few(weights, top_p, kept, edge)
    bits = weights.view(np.int64)
    mass[:] = 0.0
    for index in range(len(weights)):
        mass[digit(bits[index], FIRST_SHIFT)] += weights[index]
    total = 0.0
    for index in range(DIGITS):
        total += mass[index]
    needed = top_p * total
    last, before = crossed(mass, 0.0, needed)
    beyond = ONE - ((last + 1) << FIRST_SHIFT)
    count = 0
    for index in range(len(weights)):
        kept[count] = index  # without a branch: it would be mispredicted too often
        count += bits[index] > beyond
    edges = 0
    for at in range(count):
        edge[edges] = kept[at]
        edges += digit(bits[kept[at]], FIRST_SHIFT) == last
    for shift in range(FIRST_SHIFT - DIGIT_BITS, -1, -DIGIT_BITS):
        mass[:] = 0.0
        for at in range(edges):
            mass[digit(bits[edge[at]], shift)] += weights[edge[at]]
        last, before = crossed(mass, before, needed)
        inside = 0
        for at in range(edges):
            edge[inside] = edge[at]
            inside += digit(bits[edge[at]], shift) == last
        edges = inside
    # A token stays while what comes before it falls short.
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
