"""Exact attention over the fp16 cache, one row and up to four query heads at a time.

Keys are visited in the order of their positions, whatever lies between them in the cache: a row of a tree sums exactly
what it would sum after its ancestors had been committed.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ondevice.engines.simd.kernels.functions import exp
from ondevice.engines.simd.kernels.jit import kernel
from ondevice.engines.simd.kernels.memory import read_f32, read_i64, write_f32
from ondevice.engines.simd.kernels.quantize import quantize_block, record_address
from ondevice.engines.simd.kernels.rows import (
    BASE,
    FIRST,
    KIND_SLOTS,
    KINDS,
    LENGTH,
    PATH_WIDTH,
    PATHS,
    STOP,
    WANTED,
    WANTED_ROWS,
)
from ondevice.engines.simd.kernels.vector import fma, full, load, load_half, max_lanes, maximum, store, sum_lanes

HEADS = 4
"""Query heads that read a key together."""

_ZERO, _ONE = np.float32(0.0), np.float32(1.0)
_LOWEST = np.float32(-1e30)


@kernel
def source_row(state: np.ndarray, rows: int, row: int) -> Any:
    """Which of the new rows the `row`-th of a set is."""
    if rows == WANTED:
        return read_i64(state[WANTED_ROWS] + 8 * row)
    return row


@kernel
def cache_row(state: np.ndarray, kind: int, row: int, position: int) -> Any:
    """The row of the cache in which new row `row` finds `position`."""
    depth = position - state[LENGTH]
    if depth >= 0 and state[PATHS]:
        position = state[LENGTH] + read_i64(state[PATHS] + 8 * (row * state[PATH_WIDTH] + depth))
    return position - state[KINDS + kind * KIND_SLOTS + BASE]


@kernel
def score4(q0: int, q1: int, q2: int, q3: int, key: int, head_dim: int, out: int, stride: int) -> None:
    """The dot products of four queries with one key."""
    a = full(_ZERO)
    b, c, d = a, a, a
    for i in range(0, head_dim, 16):
        k = load_half(key + 2 * i)
        a, b = fma(load(q0 + 4 * i), k, a), fma(load(q1 + 4 * i), k, b)
        c, d = fma(load(q2 + 4 * i), k, c), fma(load(q3 + 4 * i), k, d)
    write_f32(out, sum_lanes(a))
    write_f32(out + stride, sum_lanes(b))
    write_f32(out + 2 * stride, sum_lanes(c))
    write_f32(out + 3 * stride, sum_lanes(d))


@kernel
def softmax(scores: int, count: int) -> None:
    """Softmax of `count` floats in place; room for 16 more is needed."""
    store(scores + 4 * count, full(_LOWEST))
    largest = full(_LOWEST)
    for i in range(0, 4 * count, 64):
        largest = maximum(largest, load(scores + i))
    peak = full(max_lanes(largest))
    total = full(_ZERO)
    for i in range(0, 4 * count, 64):
        weight = exp(load(scores + i) - peak)
        store(scores + i, weight)
        total = total + weight
    share = full(_ONE / sum_lanes(total))
    for i in range(0, 4 * count, 64):
        store(scores + i, load(scores + i) * share)


@kernel
def mix4(
    state: np.ndarray,
    kind: int,
    new_row: int,
    first: int,
    count: int,
    values: int,
    cache_stride: int,
    scores: int,
    scores_stride: int,
    out: int,
    out_stride: int,
) -> None:
    """32 numbers of four heads: out[i] = sum over j of scores[i, j] * value[j], in the order of positions."""
    a0 = full(_ZERO)
    a1, b0, b1, c0, c1, d0, d1 = a0, a0, a0, a0, a0, a0, a0
    for j in range(count):
        value = values + cache_row(state, kind, new_row, first + j) * cache_stride
        low, high = load_half(value), load_half(value + 32)
        at = scores + 4 * j
        weight = full(read_f32(at))
        a0, a1 = fma(weight, low, a0), fma(weight, high, a1)
        weight = full(read_f32(at + scores_stride))
        b0, b1 = fma(weight, low, b0), fma(weight, high, b1)
        weight = full(read_f32(at + 2 * scores_stride))
        c0, c1 = fma(weight, low, c0), fma(weight, high, c1)
        weight = full(read_f32(at + 3 * scores_stride))
        d0, d1 = fma(weight, low, d0), fma(weight, high, d1)
    store(out, a0)
    store(out + 64, a1)
    store(out + out_stride, b0)
    store(out + out_stride + 64, b1)
    store(out + 2 * out_stride, c0)
    store(out + 2 * out_stride + 64, c1)
    store(out + 3 * out_stride, d0)
    store(out + 3 * out_stride + 64, d1)


@kernel
def attend(
    state: np.ndarray,
    kind: int,
    row_set: int,
    row: int,
    query: int,
    heads: int,
    head_dim: int,
    keys: int,
    values: int,
    cache_stride: int,
    scores: int,
    scores_stride: int,
    records: int,
    block: int,
    blocks: int,
    zero: int,
) -> None:
    """softmax(q . k) . v of up to HEADS heads that share a KV head, quantised into their blocks of the output.

    Args:
        row_set, row: the set of rows and the index in it.
        query: address of float32[heads, head_dim].
        keys, values: addresses of the KV head's part of the first cache row, fp16; the next is `cache_stride` bytes on.
        scores: address of float32 to work in: HEADS times `scores_stride` bytes, each with room for 16 floats
            more than there are keys, and 512 bytes.
        records: address of the output's records, `blocks` to a row; the first head's begin at `block`.
        zero: of the matrix that reads the output.
    """
    new_row = source_row(state, row_set, row)
    slots = KINDS + kind * KIND_SLOTS
    first = read_i64(state[slots + FIRST] + 8 * new_row)
    count = read_i64(state[slots + STOP] + 8 * new_row) - first
    size = 4 * head_dim
    # missing heads are the last one again: one kernel for every number of heads
    q1, q2, q3 = query + min(1, heads - 1) * size, query + min(2, heads - 1) * size, query + min(3, heads - 1) * size
    for j in range(count):
        key = keys + cache_row(state, kind, new_row, first + j) * cache_stride
        score4(query, q1, q2, q3, key, head_dim, scores + 4 * j, scores_stride)
    for i in range(HEADS):
        softmax(scores + i * scores_stride, count)
    mixed = scores + HEADS * scores_stride
    for part in range(head_dim // 32):
        at = values + 64 * part
        mix4(state, kind, new_row, first, count, at, cache_stride, scores, scores_stride, mixed, 128)
        for i in range(heads):
            target = record_address(records, row, state[row_set], block + i * (head_dim // 32) + part, blocks)
            quantize_block(load(mixed + 128 * i), load(mixed + 128 * i + 64), zero, target)
