"""The forms in which rows of activations are given to a matrix, block by block of 32 numbers.

Rows lie in groups of up to MOST_ROWS. A form is an integer that says which of three layouts a matrix reads:

- GROUPS, with the code of a zero weight: int8 with a scale for every block, as `quantize` writes it: [block][row].
- STEPS, with the bits of a float32, the step s: int8 codes clamp(round(x / s), -128, 127) as a static scale gives them,
  [block][row][32], then int32 sums of the codes [row][block], then the sums of whole rows [row], which the matrix's
  readers put there: see `sum_codes`.
- FLOATS: float32 [row][number].
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ondevice.engines.simd.kernels.jit import kernel
from ondevice.engines.simd.kernels.memory import bits_float, read_i32, write_i32
from ondevice.engines.simd.kernels.quantize import quantize_block
from ondevice.engines.simd.kernels.tile import ACTIVATION_BYTES, MOST_ROWS
from ondevice.engines.simd.kernels.vector import (
    full,
    maximum,
    minimum,
    round_even,
    store,
    store_rounded_int8,
    sum_lanes,
)

GROUPS, STEPS, FLOATS = range(3)
KIND = 32
"""Bits of a form below its layout."""

LARGEST_BYTES = 128
"""Of a block of a row, in any form."""

_LEAST, _MOST = np.float32(-128.0), np.float32(127.0)


def groups_form(zero: int) -> int:
    """For a matrix with a scale for every 32 weights, whose weights are 0 at the code `zero`."""
    return GROUPS << KIND | zero


def steps_form(step: float) -> int:
    """For a matrix whose input has a static scale, a float32."""
    return STEPS << KIND | int(np.float32(step).view(np.uint32))


FLOATS_FORM = FLOATS << KIND


def row_bytes(form: int, blocks: int) -> int:
    """Of a row of so many blocks."""
    return {GROUPS: ACTIVATION_BYTES * blocks, STEPS: 36 * blocks + 4, FLOATS: 128 * blocks}[form >> KIND]


@kernel
def group_address(form: int, activations: int, first: int, blocks: int) -> Any:
    """Where the group whose first row is row `first` begins."""
    kind = form >> KIND
    if kind == GROUPS:
        return activations + first * ACTIVATION_BYTES * blocks
    return activations + first * (36 * blocks + 4 if kind == STEPS else 128 * blocks)


@kernel
def write_input(low: Any, high: Any, form: int, activations: int, row: int, rows: int, block: int, blocks: int) -> None:
    """Write a block of a row in a form.

    Args:
        low, high: 32 numbers.
        form: of the matrix that reads them.
        activations: address of those of `rows` rows of `blocks` blocks.
        row, block: whose numbers they are.
    """
    kind, place = form >> KIND, row % MOST_ROWS
    first = row - place
    members = min(MOST_ROWS, rows - first)
    at = group_address(form, activations, first, blocks)
    if kind == GROUPS:
        quantize_block(low, high, form & 0xFF, at + ACTIVATION_BYTES * (block * members + place))
    elif kind == STEPS:
        step = full(bits_float(np.int32(form & 0xFFFFFFFF)))
        low, high = to_codes(low, step), to_codes(high, step)
        to = at + 32 * (block * members + place)
        store_rounded_int8(to, low)
        store_rounded_int8(to + 16, high)
        write_i32(at + 32 * blocks * members + 4 * (place * blocks + block), np.int32(sum_lanes(low + high)))
    else:
        to = at + 128 * (place * blocks + block)
        store(to, low)
        store(to + 64, high)


@kernel
def to_codes(x: Any, step: Any) -> Any:
    """clamp(round(x / step), -128, 127), ties to even, as whole floats."""
    return round_even(minimum(maximum(x / step, full(_LEAST)), full(_MOST)))


@kernel
def sum_codes(form: int, activations: int, rows: int, blocks: int) -> None:
    """Complete the sums of rows whose blocks are all written; every thread that reads them writes the same numbers."""
    if form >> KIND != STEPS:
        return
    for first in range(0, rows, MOST_ROWS):
        members = min(MOST_ROWS, rows - first)
        sums = group_address(form, activations, first, blocks) + 32 * blocks * members
        for row in range(members):
            total = np.int32(0)
            for block in range(blocks):
                total = np.int32(total + read_i32(sums + 4 * (row * blocks + block)))
            write_i32(sums + 4 * (members * blocks + row), total)
