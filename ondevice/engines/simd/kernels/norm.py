"""RMS norms, residual additions and quantisation of single rows of float32, whose width is a multiple of 32.

All rows are addresses.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ondevice.engines.simd.kernels.inputs import write_input
from ondevice.engines.simd.kernels.jit import kernel
from ondevice.engines.simd.kernels.memory import read_f32
from ondevice.engines.simd.kernels.vector import fma, full, load, store, sum_lanes

_ONE = np.float32(1.0)


@kernel
def inverse_rms(x: int, width: int, eps: float) -> Any:
    """(mean(x**2) + eps)**-0.5 of x float32[width], in four sums that are added pairwise."""
    a = full(np.float32(0.0))
    b, c, d = a, a, a
    i = 0
    while i + 64 <= width:
        p, q, r, s = load(x + 4 * i), load(x + 4 * i + 64), load(x + 4 * i + 128), load(x + 4 * i + 192)
        a, b, c, d = fma(p, p, a), fma(q, q, b), fma(r, r, c), fma(s, s, d)
        i += 64
    while i < width:
        p = load(x + 4 * i)
        a = fma(p, p, a)
        i += 16
    total = sum_lanes((a + b) + (c + d))
    return _ONE / np.sqrt(total / np.float32(width) + eps)


@kernel
def add_normed(h: int, x: int, weight: int, scalar: int, width: int, eps: float) -> None:
    """h = (h + x * inverse_rms(x) * weight) * scalar, all float32[width]; `scalar` is an address, or 0 for 1."""
    scale = full(inverse_rms(x, width, eps))
    factor = full(read_f32(scalar) if scalar else _ONE)
    for i in range(0, 4 * width, 64):
        store(h + i, (load(h + i) + (load(x + i) * scale) * load(weight + i)) * factor)


@kernel
def norm(x: int, weight: int, out: int, width: int, eps: float) -> None:
    """out = x * inverse_rms(x) * weight, all float32[width]; `out` may be `x`."""
    scale = full(inverse_rms(x, width, eps))
    for i in range(0, 4 * width, 64):
        store(out + i, (load(x + i) * scale) * load(weight + i))


@kernel
def quantize_row(x: int, activations: int, row: int, rows: int, width: int, form: int) -> None:
    """Write x float32[width] to row `row` of the activations of `rows` rows, in a form of `inputs`."""
    blocks = width // 32
    for block in range(blocks):
        at = x + 128 * block
        write_input(load(at), load(at + 64), form, activations, row, rows, block, blocks)


@kernel
def norm_quantize_row(
    x: int, weight: int, activations: int, row: int, rows: int, width: int, form: int, eps: float
) -> None:
    """`quantize_row` of x * inverse_rms(x) * weight."""
    scale = full(inverse_rms(x, width, eps))
    blocks = width // 32
    for block in range(blocks):
        i = 128 * block
        low = (load(x + i) * scale) * load(weight + i)
        high = (load(x + i + 64) * scale) * load(weight + i + 64)
        write_input(low, high, form, activations, row, rows, block, blocks)
