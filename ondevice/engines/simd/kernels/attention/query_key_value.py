"""Queries, keys and values between projection and attention: head norm, rotation, and writing them to the cache.

The step is `head`; where all heads of queries, or of keys, are normed together, `whole_norm` comes before it. The
layouts of caches are described in `float_tile` and `integer_tile`.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ondevice.engines.simd.kernels.activations import norm
from ondevice.engines.simd.kernels.attention.float_tile import (
    move_half_key,
    move_half_value,
    to_half_key,
    to_half_value,
)
from ondevice.engines.simd.kernels.attention.integer_tile import move_int8_key, move_int8_value
from ondevice.engines.simd.kernels.attention.scratch import read_sequence, sequence_of, source_row
from ondevice.engines.simd.kernels.contract.attention_memory import UNIT
from ondevice.engines.simd.kernels.contract.matrices import TILE
from ondevice.engines.simd.kernels.contract.slots import CACHE_BITS, CACHES, COSINES, ROTARY_STRIDE, SINES
from ondevice.engines.simd.kernels.contract.steps import Head, WholeNorm
from ondevice.engines.simd.kernels.isa.jit import read_step
from ondevice.engines.simd.kernels.isa.memory import (
    bits_float,
    first_unit,
    read_i8,
    read_i32,
    read_i64,
    write_f32,
    write_i8,
    write_i32,
)
from ondevice.engines.simd.kernels.isa.vector import (
    fma,
    full,
    load,
    magnitude,
    max_lanes,
    maximum,
    round_even,
    store,
    store_rounded_int8,
    sum_lanes,
)
from ondevice.native.functions import kernel

_ZERO, _ONE, _MOST = np.float32(0.0), np.float32(1.0), np.float32(127.0)
_OFFSET = np.int32(-0x7F7F7F80)
"""128 in each of four bytes: exclusive or with it adds 128 to signed bytes."""
_LEAST = np.float32(1e-30)
"""A vector whose numbers are all smaller becomes zeros: the inverse of its scale would overflow."""


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
    """x = rotate(norm(x) * weight), in place, float32[head_dim]; without what has the address 0."""
    if weight:
        norm(x, weight, x, head_dim, eps)
    if cosines:
        rotate(x, cosines, sines, head_dim)


@kernel
def copy(x: int, out: int, count: int) -> None:
    """out = x, float32[count]."""
    for i in range(0, 4 * count, 64):
        store(out + i, load(x + i))


@kernel
def multiply(x: int, factor: float, count: int) -> None:
    """x *= factor, float32[count]."""
    for i in range(0, 4 * count, 64):
        store(x + i, load(x + i) * full(factor))


@kernel
def part_bytes(bits: int, head_dim: int) -> Any:
    """Bytes of a KV head in a unit of a cache of 16 or 8 bits."""
    return UNIT * 2 * head_dim if bits == 16 else UNIT * (head_dim + 4)


@kernel
def quantize_head(x: int, out: int, count: int) -> Any:
    """Round `count` floats to int8 codes and return their scale, 1/127 of the largest magnitude; `out` may be `x`.

    The scale is NaN if a number is NaN or infinite, because an int8 code is neither.
    """
    largest, zeros = full(_LEAST), full(_ZERO)
    for i in range(0, 4 * count, 64):
        size = magnitude(load(x + i))
        largest, zeros = maximum(largest, size), fma(size, full(_ZERO), zeros)
    scale = max_lanes(largest) / _MOST
    inverse = full(_ONE / scale)
    for i in range(0, count, 16):
        store_rounded_int8(out + i, round_even(load(x + 4 * i) * inverse))
    return scale + sum_lanes(zeros)


@kernel
def to_key(bits: int, x: int, cache: int, row: int, stride: int, head_dim: int) -> None:
    """Write a key to row `row` of a KV head in a cache (`scratch.KVHead`). x float32[head_dim] is overwritten."""
    if bits == 16:
        to_half_key(x, cache, row, stride, head_dim)
        return
    scale = quantize_head(x, x, head_dim)
    tile = cache + row // UNIT * stride + row % UNIT // TILE * TILE * (head_dim + 4)
    to = tile + 4 * (row % TILE)
    for at in range(0, head_dim, 4):
        write_i32(to + TILE * at, read_i32(x + at) ^ _OFFSET)
    write_f32(to + TILE * head_dim, scale)


@kernel
def to_value(bits: int, x: int, cache: int, row: int, stride: int, head_dim: int) -> None:
    """Write a value to row `row` of a KV head in a cache, with arguments as in `to_key`."""
    if bits == 16:
        to_half_value(x, cache, row, stride, head_dim)
        return
    scale = quantize_head(x, x, head_dim)
    unit, place = cache + row // UNIT * stride, row % UNIT
    to = unit + place // 4 * 4 * TILE + place % 4
    for at in range(head_dim):
        write_i8(to + at // TILE * TILE * UNIT + at % TILE * 4, read_i8(x + at) ^ _OFFSET)
    write_f32(unit + UNIT * head_dim + 4 * place, scale)


@kernel
def move_rows(bits: int, keys: int, values: int, source: np.ndarray, first: int, kv_heads: int, head_dim: int) -> None:
    """Copy row `source[i]` of a layer's cache to row `first + i`. `source` is ascending, and no row moves to the back.

    keys, values : addresses of the layer's keys and values
    """
    for i in range(len(source)):
        if source[i] != first + i:
            move_row(bits, keys, values, source[i], first + i, kv_heads, head_dim)


@kernel
def move_row(bits: int, keys: int, values: int, old: int, new: int, kv_heads: int, head_dim: int) -> None:
    """Copy row `old` of a layer's cache to row `new`. Other arguments as for `move_rows`."""
    part = part_bytes(bits, head_dim)
    stride = kv_heads * part
    for own in range(0, stride, part):
        if bits == 16:
            move_half_key(keys + own, old, new, stride, head_dim)
            move_half_value(values + own, old, new, stride, head_dim)
        else:
            move_int8_key(keys + own, old, new, stride, head_dim)
            move_int8_value(values + own, old, new, stride, head_dim)


@kernel
def whole_norm(words: np.ndarray, state: np.ndarray, thread: int, threads: int) -> None:
    """The step `WholeNorm`: query = norm(query) * weight and key = norm(key) * weight, over all heads of a row.

    It is a step of its own, because `head` changes heads in place while another thread may not have read them yet.
    """
    step = read_step(WholeNorm, words)
    eps, units = bits_float(np.int32(step.eps)), 2 * state[step.row_set]
    for unit in range(first_unit(units, thread, threads), first_unit(units, thread + 1, threads)):
        row = step.x + unit // 2 * step.stride
        if unit % 2 == 0 and step.query_norm:
            norm(row, step.query_norm, row, step.query_width, eps)
        elif unit % 2 and step.key_norm:
            key = row + 4 * step.query_width
            norm(key, step.key_norm, key, step.key_width, eps)


@kernel
def head(words: np.ndarray, state: np.ndarray, thread: int, threads: int, scratch: int) -> None:
    """The step `Head`: query = rotate(norm(query)) * scale, in place; rotate(norm(key)) and norm(value) go to the
    cache.

    A unit is a head of a row, float32[size]; threads take equal shares. Layers that read another layer's cache have no
    keys and values. `scratch` is the address of this thread's working memory, float32[size].

    All rows of a head are neighbours, and a key is followed by the queries that read it. In the order of rows, two
    threads wrote keys of neighbouring rows, which share their cache lines (`float_tile`), and a single row's keys were
    all in the last thread's share: a step of four rows took 3.5 microseconds, not 2 (SmolLM2-135M, AMD Zen 4).
    """
    step = read_step(Head, words)
    row_set, x, stride, size = step.row_set, step.x, step.stride, step.size
    query_heads, kv_heads = step.query_heads, step.kv_heads
    cache, eps, scale = CACHES + step.cache, bits_float(np.int32(step.eps)), bits_float(np.int32(step.scale))
    rows, group, keys = state[row_set], query_heads // kv_heads, 1 if step.value else 0
    units = rows * kv_heads * (keys + group)
    for unit in range(first_unit(units, thread, threads), first_unit(units, thread + 1, threads)):
        row, place = unit % rows, unit // rows
        kv_head, query = place // (keys + group), place % (keys + group) - keys
        number = query_heads + kv_head if query < 0 else kv_head * group + query
        at = x + row * stride + 4 * number * size
        cosines = sines = np.int64(0)
        if step.rotary >= 0:
            rotary = source_row(state, row_set, row) * state[ROTARY_STRIDE] + step.rotary
            cosines, sines = state[COSINES] + rotary, state[SINES] + rotary
        if number < query_heads:
            rotated_head(at, step.query_norm, cosines, sines, size, eps)
            if scale != _ONE:
                multiply(at, scale, size)
            continue
        record = sequence_of(state, row_set, row)
        sequence = read_sequence(record, step.kind)
        cache_row = sequence.length - sequence.base + row - sequence.first_row
        bits, own = state[CACHE_BITS], kv_head * part_bytes(state[CACHE_BITS], size)
        line = kv_heads * part_bytes(bits, size)
        value = x + row * stride + 4 * (step.value + kv_head * size)
        if step.value_norm:
            norm(value, step.value_norm, scratch, size, eps)
        else:
            copy(value, scratch, size)
        to_value(bits, scratch, read_i64(record + 8 * (cache + 1)) + own, cache_row, line, size)
        rotated_head(at, step.key_norm, cosines, sines, size, eps)
        to_key(bits, at, read_i64(record + 8 * cache) + own, cache_row, line, size)
