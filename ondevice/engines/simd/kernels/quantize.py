"""Quantises activations to int8, with one power-of-two scale per row and block of 32; `tile` has the block's layout.

Quantised rows lie in groups of up to 8, as one pass of the tile product takes them: a group is [block][row of it].
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ondevice.engines.simd.kernels.jit import kernel
from ondevice.engines.simd.kernels.memory import bits_float, float_bits, write_f32, write_i32
from ondevice.engines.simd.kernels.tile import SHIFT, START
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
def quantize_block(low: Any, high: Any, zero: int, out: int) -> None:
    """Write a quantised block: round(x / 2**e) of 32 numbers, with the smallest e that makes the largest 127 or less.

    Args:
        low, high: the numbers, 16 lanes each.
        zero: the code of a zero weight in the matrix that the block is multiplied with.
        out: address of the block.
    """
    largest = max_lanes(maximum(magnitude(low), magnitude(high)))
    # 127 = 1.984375 * 2**6: a mantissa beyond that carries into the exponent
    exponent = ((np.int64(float_bits(largest)) + 0x1FFFF) >> 23) - 133
    exponent = min(max(exponent, np.int64(-100)), np.int64(100))
    inverse = full(bits_float(np.int32((127 - exponent) << 23)))
    low = round_even(low * inverse)
    high = round_even(high * inverse)
    store_rounded_int8(out, low)
    store_rounded_int8(out + 16, high)
    shift = ((exponent + 150) << 23) | 0x400000  # the bits of 1.5 * 2**(23 + exponent)
    write_i32(out + START, np.int32(shift - zero * np.int64(sum_lanes(low + high))))
    write_f32(out + SHIFT, bits_float(np.int32(shift)))
