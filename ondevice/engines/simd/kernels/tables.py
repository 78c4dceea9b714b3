"""Reads and multiplies single rows of quantised tables, in the layout of the mapped file, by address."""

from __future__ import annotations

from typing import Any

import numpy as np

from ondevice.engines.simd.kernels.codes import INT4_NUMBER
from ondevice.engines.simd.kernels.int4 import weights4
from ondevice.engines.simd.kernels.int8 import weights8
from ondevice.engines.simd.kernels.jit import kernel
from ondevice.engines.simd.kernels.memory import read_f32, read_half
from ondevice.engines.simd.kernels.vector import fma, full, load, store, sum_lanes

_ZERO = np.float32(0.0)


@kernel
def scale_at(scales: int, index: int, half: int) -> Any:
    """The scale at an index of fp16 scales, or of float32 where `half` is 0."""
    return read_half(scales + 2 * index) if half else read_f32(scales + 4 * index)


@kernel
def weights_at(codes: int, index: int, number: int) -> Any:
    """Sixteen weights from `index` on, of codes of the format with that number, without their scale."""
    return weights4(codes, index) if number == INT4_NUMBER else weights8(codes, index)


@kernel
def read_row(codes: int, scales: int, half: int, number: int, row: int, width: int, factor: float, out: int) -> None:
    """out = table[row] * factor, float32[width]; codes [rows, width * bits / 8], scales [rows, width / 32]."""
    first = row * width
    for i in range(0, width, 32):
        scale = full(scale_at(scales, (first + i) // 32, half))
        for part in (i, i + 16):
            store(out + 4 * part, weights_at(codes, first + part, number) * scale * full(factor))


@kernel
def dot_row(codes: int, scales: int, half: int, number: int, row: int, width: int, x: int) -> Any:
    """The dot product of a table's row and x float32[width], in float32; codes and scales as in `read_row`."""
    first = row * width
    a, b = full(_ZERO), full(_ZERO)
    for i in range(0, width, 32):
        scale = full(scale_at(scales, (first + i) // 32, half))
        a = fma(weights_at(codes, first + i, number) * scale, load(x + 4 * i), a)
        b = fma(weights_at(codes, first + i + 16, number) * scale, load(x + 4 * i + 64), b)
    return sum_lanes(a + b)


@kernel
def dot(a: int, b: int, width: int) -> Any:
    """The dot product of a and b float32[width]."""
    low, high = full(_ZERO), full(_ZERO)
    for i in range(0, 4 * width, 128):
        low, high = fma(load(a + i), load(b + i), low), fma(load(a + i + 64), load(b + i + 64), high)
    return sum_lanes(low + high)
