"""Activations to int8 with one power-of-two scale per row and block of 32: see `tile` for the record."""

from __future__ import annotations

from typing import Any

import numpy as np

from ondevice.engines.simd.kernels.jit import kernel
from ondevice.engines.simd.kernels.memory import bits_float, float_bits, write_f32, write_i32
from ondevice.engines.simd.kernels.tile import BLOCK, MOST_ROWS, RECORD, SHIFT, START
from ondevice.engines.simd.kernels.vector import (
    full,
    magnitude,
    max_lanes,
    maximum,
    round_even,
    store_rounded_int8,
    sum_lanes,
)


@kernel
def quantize_block(low: Any, high: Any, zero: int, record: int) -> None:
    """Write one record: 32 numbers as round(x / 2**e), e the smallest that brings the largest to 127 or less.

    Args:
        low, high: the numbers, sixteen lanes each.
        zero: the code of a zero weight in the matrix that reads the record.
        record: its address.
    """
    largest = max_lanes(maximum(magnitude(low), magnitude(high)))
    # 127 = 1.984375 * 2**6: a mantissa beyond that carries into the exponent
    exponent = ((np.int64(float_bits(largest)) + 0x1FFFF) >> 23) - 133
    exponent = min(max(exponent, np.int64(-100)), np.int64(100))
    inverse = full(bits_float(np.int32((127 - exponent) << 23)))
    low = round_even(low * inverse)
    high = round_even(high * inverse)
    store_rounded_int8(record, low)
    store_rounded_int8(record + 16, high)
    shift = ((exponent + 150) << 23) | 0x400000  # the bits of 1.5 * 2**(23 + exponent)
    write_i32(record + START, np.int32(shift - zero * np.int64(sum_lanes(low + high))))
    write_f32(record + SHIFT, bits_float(np.int32(shift)))


@kernel
def record_address(records: int, row: int, rows: int, block: int, blocks: int) -> int:
    """Where a block of a row lies: rows are in groups of up to 8, a group is [block][row of the group]."""
    first = row - row % MOST_ROWS
    members = min(MOST_ROWS, rows - first)
    return records + RECORD * (first * blocks + block * members + (row - first))


__all__ = ["BLOCK", "quantize_block", "record_address"]
