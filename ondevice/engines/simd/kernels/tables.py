"""Reads and multiplies single rows of quantised tables, in the layout of the mapped file, by address."""

from __future__ import annotations

from typing import Any

import numpy as np

from ondevice.engines.simd.kernels.jit import kernel
from ondevice.engines.simd.kernels.memory import read_f32, read_half
from ondevice.engines.simd.kernels.vector import fma, full, load, load_int4, load_int8, store, sum_lanes

_ZERO = np.float32(0.0)
_INT4_ZERO, _INT8_ZERO = np.float32(8.0), np.float32(128.0)


@kernel
def scale_at(scales: int, index: int, half: int) -> Any:
    """The scale at an index of fp16 scales, or of float32 where `half` is 0."""
    return read_half(scales + 2 * index) if half else read_f32(scales + 4 * index)


@kernel
def codes_at(codes: int, index: int, bits: int) -> Any:
    """Sixteen codes of `bits` from `index` on, less the code of zero: weights without their scale."""
    if bits == 4:
        return load_int4(codes + index // 2) - full(_INT4_ZERO)
    return load_int8(codes + index) - full(_INT8_ZERO)


@kernel
def read_row(codes: int, scales: int, half: int, bits: int, row: int, width: int, factor: float, out: int) -> None:
    """out = table[row] * factor, float32[width]; codes [rows, width * bits / 8], scales [rows, width / 32]."""
    first = row * width
    for i in range(0, width, 32):
        scale = full(scale_at(scales, (first + i) // 32, half))
        for part in (i, i + 16):
            store(out + 4 * part, codes_at(codes, first + part, bits) * scale * full(factor))


@kernel
def dot_row(codes: int, scales: int, half: int, bits: int, row: int, width: int, x: int) -> Any:
    """The dot product of a table's row and x float32[width], in float32; codes and scales as in `read_row`."""
    first = row * width
    a, b = full(_ZERO), full(_ZERO)
    for i in range(0, width, 32):
        scale = full(scale_at(scales, (first + i) // 32, half))
        a = fma(codes_at(codes, first + i, bits) * scale, load(x + 4 * i), a)
        b = fma(codes_at(codes, first + i + 16, bits) * scale, load(x + 4 * i + 64), b)
    return sum_lanes(a + b)


@kernel
def dot(a: int, b: int, width: int) -> Any:
    """The dot product of a and b float32[width]."""
    low, high = full(_ZERO), full(_ZERO)
    for i in range(0, 4 * width, 128):
        low, high = fma(load(a + i), load(b + i), low), fma(load(a + i + 64), load(b + i + 64), high)
    return sum_lanes(low + high)
