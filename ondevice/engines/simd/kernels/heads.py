"""What happens to q, k and v between projection and attention: head norm, rotation, the way into the cache."""

from __future__ import annotations

from typing import Any

import numpy as np

from ondevice.engines.simd.kernels.jit import kernel
from ondevice.engines.simd.kernels.memory import write_f32
from ondevice.engines.simd.kernels.norm import norm
from ondevice.engines.simd.kernels.vector import (
    fma,
    full,
    load,
    magnitude,
    max_lanes,
    maximum,
    round_even,
    store,
    store_half,
    store_rounded_int8,
)

_ONE, _MOST = np.float32(1.0), np.float32(127.0)
_LEAST = np.float32(1e-30)
"""What is smaller than this everywhere becomes zeros: its scale would have no inverse."""


@kernel
def rotate(x: int, cosines: int, sines: int, head_dim: int) -> None:
    """x * cos + rotate_half(x) * sin, in place; cosines and sines float32[head_dim / 2]."""
    half = 2 * head_dim
    for i in range(0, half, 64):
        low, high = load(x + i), load(x + half + i)
        c, s = load(cosines + i), load(sines + i)
        store(x + i, low * c - high * s)
        store(x + half + i, fma(high, c, low * s))


@kernel
def rotated_head(x: int, weight: int, cosines: int, sines: int, head_dim: int, eps: float) -> None:
    """Head norm with a weight, then rotation, in place."""
    norm(x, weight, x, head_dim, eps)
    rotate(x, cosines, sines, head_dim)


@kernel
def head_bytes(bits: int, head_dim: int) -> Any:
    """Bytes of a KV head in a row of a cache."""
    return 2 * head_dim if bits == 16 else head_dim + 4


@kernel
def to_half(x: int, out: int, count: int) -> None:
    """Round `count` floats to fp16."""
    for i in range(0, count, 16):
        store_half(out + 2 * i, load(x + 4 * i))


@kernel
def to_int8(x: int, out: int, count: int) -> None:
    """Round `count` floats to int8 codes, and the scale behind them, float32: a 127th of the largest magnitude."""
    largest = full(_LEAST)
    for i in range(0, 4 * count, 64):
        largest = maximum(largest, magnitude(load(x + i)))
    scale = max_lanes(largest) / _MOST
    inverse = full(_ONE / scale)
    for i in range(0, count, 16):
        store_rounded_int8(out + i, round_even(load(x + 4 * i) * inverse))
    write_f32(out + count, scale)


@kernel
def to_cache(bits: int, x: int, out: int, count: int) -> None:
    """Write a KV head of `count` numbers to a row of a cache."""
    if bits == 16:
        to_half(x, out, count)
    else:
        to_int8(x, out, count)
