"""The widths of weights: what unpacks the codes of each, and the numbers that plans and kernels call products by.

What a kernel is made of lies in this folder, or its compiled code would be kept when it changes.
"""

from __future__ import annotations

from ondevice.engines.simd.kernels import int2, int4, int8
from ondevice.engines.simd.kernels.instruction_set import InstructionSet

CODES = {4: int4.codes, 8: int8.codes}
"""By bits: the eight vectors of codes of a block."""

SPLIT_CODES = {2: int2.split_codes, 4: int4.split_codes, 8: int8.split_codes}
"""By bits: the same, with codes at different places of their bytes."""

GROUPS4, GROUPS8, STEPS2, STEPS4, STEPS8, PLAIN = range(6)
"""Kinds of products: the form of the activations (see `inputs`) and the bits of a weight; PLAIN is of float32 rows."""

PRODUCTS = {(0, 4): GROUPS4, (0, 8): GROUPS8, (1, 2): STEPS2, (1, 4): STEPS4, (1, 8): STEPS8}
"""By the layout of the activations, a number of `inputs`, and the bits of a weight; what is not here is PLAIN."""


def most_ways(isa: InstructionSet, bits: int) -> int:
    """In how many ways the codes of a block may be split."""
    if bits == 2:
        return 2 if isa.signed else 4
    return 1 if bits == 8 or isa.signed else 2
