"""Single rows of embedding tables, read and multiplied in float32 in the layout of the mapped file.

codes : address of uint8[rows, width * bits / 8]; bfloat16 for 16 bits, float32 for 32
scales : address of fp16 or float32 [rows, width / group]; `half` is 1 for fp16
minimums : address of the blocks' minimums, of the type and shape of the scales; 0 if they have none
group : numbers that share a scale; 0 if the codes are plain numbers
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ondevice.engines.simd.kernels.formats import int2_weights, int4_weights, int8_weights
from ondevice.engines.simd.kernels.isa.memory import prefetch_line, read_f32, read_half
from ondevice.engines.simd.kernels.isa.vector import fma, full, load, load_bfloat16, load_int4, store, sum_lanes
from ondevice.native.functions import kernel

_ZERO, _ONE = np.float32(0.0), np.float32(1.0)


@kernel
def scale_at(scales: int, index: int, half: int) -> Any:
    """The scale at an index, from fp16 scales, or from float32 scales if `half` is 0."""
    return read_half(scales + 2 * index) if half else read_f32(scales + 4 * index)


@kernel
def weights_at(codes: int, index: int, bits: int) -> Any:
    """Weights index..index + 15, each of `bits` bits, without scale."""
    if bits == 4:
        return int4_weights(codes, index)
    if bits == 8:
        return int8_weights(codes, index)
    if bits == 2:
        return int2_weights(codes, index)
    return load_bfloat16(codes + 2 * index) if bits == 16 else load(codes + 4 * index)


@kernel
def scale_of(scales: int, half: int, group: int, index: int) -> Any:
    """The scale of the number at an index of a table in all 16 lanes; 1 if the numbers have none."""
    return full(scale_at(scales, index // group, half) if group else _ONE)


@kernel
def affine_weights(codes: int, index: int, scale: Any, minimum: Any) -> Any:
    """Weights index..index + 15 of 4 bits with minimums: scale * code + minimum, rounded once."""
    return fma(load_int4(codes + index // 2), scale, minimum)


@kernel
def read_row(
    codes: int,
    scales: int,
    minimums: int,
    half: int,
    bits: int,
    group: int,
    row: int,
    width: int,
    factor: float,
    out: int,
) -> None:
    """out = table[row] * factor, float32[width]."""
    first = row * width
    for i in range(0, width, 32):
        scale = scale_of(scales, half, group, first + i)
        if minimums:
            minimum = scale_of(minimums, half, group, first + i)
            for part in (i, i + 16):
                store(out + 4 * part, affine_weights(codes, first + part, scale, minimum) * full(factor))
        else:
            for part in (i, i + 16):
                store(out + 4 * part, weights_at(codes, first + part, bits) * scale * full(factor))


@kernel
def prefetch_row(
    codes: int, scales: int, minimums: int, half: int, bits: int, group: int, row: int, width: int
) -> None:
    """Prefetch the cache lines of a table's row."""
    size = width * bits // 8
    for offset in range(0, size, 64):
        prefetch_line(codes + row * size + offset)
    if group:
        scale_bytes = width // group * (2 if half else 4)
        for offset in range(0, scale_bytes, 64):
            prefetch_line(scales + row * scale_bytes + offset)
            if minimums:
                prefetch_line(minimums + row * scale_bytes + offset)


@kernel
def dot_row(
    codes: int, scales: int, minimums: int, half: int, bits: int, group: int, row: int, width: int, x: int
) -> Any:
    """The dot product of a table's row and x float32[width], in float32."""
    first = row * width
    a, b = full(_ZERO), full(_ZERO)
    for i in range(0, width, 32):
        scale = scale_of(scales, half, group, first + i)
        if minimums:
            minimum = scale_of(minimums, half, group, first + i)
            low = affine_weights(codes, first + i, scale, minimum)
            high = affine_weights(codes, first + i + 16, scale, minimum)
        else:
            low = weights_at(codes, first + i, bits) * scale
            high = weights_at(codes, first + i + 16, bits) * scale
        a = fma(low, load(x + 4 * i), a)
        b = fma(high, load(x + 4 * i + 64), b)
    return sum_lanes(a + b)


@kernel
def dot(a: int, b: int, width: int) -> Any:
    """The dot product of a and b, float32[width]."""
    low, high = full(_ZERO), full(_ZERO)
    for i in range(0, 4 * width, 128):
        low, high = fma(load(a + i), load(b + i), low), fma(load(a + i + 64), load(b + i + 64), high)
    return sum_lanes(low + high)
