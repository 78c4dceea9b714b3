"""Single rows of embedding tables, read and multiplied in float32 in the layout of the mapped file (`Table`)."""

from __future__ import annotations

from typing import Any

import numpy as np

from ondevice.bundle_format.weight_format import E2M1, IQ4_NL
from ondevice.engines.simd.kernels.contract.steps import Table
from ondevice.engines.simd.kernels.formats import int2_weights, int4_weights, int8_weights
from ondevice.engines.simd.kernels.isa.memory import prefetch_line, read_f32, read_half
from ondevice.engines.simd.kernels.isa.shuffle import load_levels
from ondevice.engines.simd.kernels.isa.vector import fma, full, load, load_bfloat16, load_int4, store, sum_lanes
from ondevice.native.functions import kernel

_ZERO, _ONE = np.float32(0.0), np.float32(1.0)


@kernel
def scale_of(table: Table, scales: int, index: int) -> Any:
    """The scale, or minimum, of the number at an index of a table in all 16 lanes; 1 if the numbers have none.

    scales : address of the table's scales, or of its minimums
    """
    if not table.group:
        return full(_ONE)
    place = index // table.group
    return full(read_half(scales + 2 * place) if table.half else read_f32(scales + 4 * place))


@kernel
def weights_at(table: Table, index: int) -> Any:
    """Weights index..index + 15 of a table, without scale."""
    codes, bits = table.codes, table.bits
    if bits == 4:
        if table.looked_up == IQ4_NL:
            return load_levels(IQ4_NL, codes + index // 2)
        return load_levels(E2M1, codes + index // 2) if table.looked_up == E2M1 else int4_weights(codes, index)
    if bits == 8:
        return int8_weights(codes, index)
    if bits == 2:
        return int2_weights(codes, index)
    return load_bfloat16(codes + 2 * index) if bits == 16 else load(codes + 4 * index)


@kernel
def affine_weights(table: Table, index: int, scale: Any, minimum: Any) -> Any:
    """Weights index..index + 15 of a table of 4 bits with minimums: scale * code + minimum, rounded once."""
    return fma(load_int4(table.codes + index // 2), scale, minimum)


@kernel
def read_row(table: Table, row: int, factor: float, out: int) -> None:
    """out = table[row] * factor, float32[width]."""
    first = row * table.width
    for i in range(0, table.width, 32):
        scale = scale_of(table, table.scales, first + i)
        if table.minimums:
            minimum = scale_of(table, table.minimums, first + i)
            for part in (i, i + 16):
                store(out + 4 * part, affine_weights(table, first + part, scale, minimum) * full(factor))
        else:
            for part in (i, i + 16):
                store(out + 4 * part, weights_at(table, first + part) * scale * full(factor))


@kernel
def prefetch_row(table: Table, row: int) -> None:
    """Prefetch the cache lines of a table's row."""
    size = table.width * table.bits // 8
    for offset in range(0, size, 64):
        prefetch_line(table.codes + row * size + offset)
    if table.group:
        scale_bytes = table.width // table.group * (2 if table.half else 4)
        for offset in range(0, scale_bytes, 64):
            prefetch_line(table.scales + row * scale_bytes + offset)
            if table.minimums:
                prefetch_line(table.minimums + row * scale_bytes + offset)


@kernel
def dot_row(table: Table, row: int, x: int) -> Any:
    """The dot product of a table's row and x float32[width], in float32."""
    first = row * table.width
    a, b = full(_ZERO), full(_ZERO)
    for i in range(0, table.width, 32):
        scale = scale_of(table, table.scales, first + i)
        if table.minimums:
            minimum = scale_of(table, table.minimums, first + i)
            low = affine_weights(table, first + i, scale, minimum)
            high = affine_weights(table, first + i + 16, scale, minimum)
        else:
            low = weights_at(table, first + i) * scale
            high = weights_at(table, first + i + 16) * scale
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
