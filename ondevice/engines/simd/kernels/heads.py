"""What happens to q, k and v between projection and attention: head norm, rotation, the way into the cache."""

from __future__ import annotations

from typing import Any

import numpy as np

from ondevice.engines.simd.kernels.integer_tile import UNIT
from ondevice.engines.simd.kernels.jit import kernel
from ondevice.engines.simd.kernels.memory import read_i8, read_i32, write_f32, write_i8, write_i32
from ondevice.engines.simd.kernels.norm import norm
from ondevice.engines.simd.kernels.sizes import TILE
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
_OFFSET = np.int32(-0x7F7F7F80)
"""128 in each of four bytes: an exclusive or with it adds that to signed bytes."""
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
def part_bytes(bits: int, head_dim: int) -> Any:
    """Bytes of a KV head's part in a row of a cache, or in a unit."""
    return 2 * head_dim if bits == 16 else UNIT * (head_dim + 4)


@kernel
def to_half(x: int, out: int, count: int) -> None:
    """Round `count` floats to fp16."""
    for i in range(0, count, 16):
        store_half(out + 2 * i, load(x + 4 * i))


@kernel
def quantize_head(x: int, out: int, count: int) -> Any:
    """Round floats to int8 codes and return their scale, a 127th of the largest magnitude; `out` may be `x`."""
    largest = full(_LEAST)
    for i in range(0, 4 * count, 64):
        largest = maximum(largest, magnitude(load(x + i)))
    scale = max_lanes(largest) / _MOST
    inverse = full(_ONE / scale)
    for i in range(0, count, 16):
        store_rounded_int8(out + i, round_even(load(x + 4 * i) * inverse))
    return scale


@kernel
def to_key(bits: int, x: int, cache: int, row: int, stride: int, head_dim: int) -> None:
    """Write a key to row `row` of a KV head; see `attention_rows.KVHead`. In int8, x float32[head_dim] is used up."""
    if bits == 16:
        to_half(x, cache + row * stride, head_dim)
        return
    scale = quantize_head(x, x, head_dim)
    tile = cache + row // UNIT * stride + row % UNIT // TILE * TILE * (head_dim + 4)
    to = tile + 4 * (row % TILE)
    for at in range(0, head_dim, 4):
        write_i32(to + TILE * at, read_i32(x + at) ^ _OFFSET)
    write_f32(to + TILE * head_dim, scale)


@kernel
def to_value(bits: int, x: int, cache: int, row: int, stride: int, head_dim: int) -> None:
    """Write a value, as `to_key` does."""
    if bits == 16:
        to_half(x, cache + row * stride, head_dim)
        return
    scale = quantize_head(x, x, head_dim)
    unit, place = cache + row // UNIT * stride, row % UNIT
    to = unit + place // 4 * 4 * TILE + place % 4
    for at in range(head_dim):
        write_i8(to + at // TILE * TILE * UNIT + at % TILE * 4, read_i8(x + at) ^ _OFFSET)
    write_f32(unit + UNIT * head_dim + 4 * place, scale)
