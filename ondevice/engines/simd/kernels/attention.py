"""Exact attention over a cache of fp16 or int8, some neighbouring rows and up to four query heads at a time.

Keys are visited in the order of their positions, whatever lies between them in the cache: a row of a tree sums exactly
what it would sum after its ancestors had been committed. What rows are computed together changes no bit.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from ondevice.engines.simd.kernels.attention_tile import HEADS, WIDE, mix_tile, score_tile
from ondevice.engines.simd.kernels.functions import exp
from ondevice.engines.simd.kernels.jit import kernel
from ondevice.engines.simd.kernels.memory import read_f32, read_i64, write_f32
from ondevice.engines.simd.kernels.quantize import activation_address, quantize_block
from ondevice.engines.simd.kernels.slots import (
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
from ondevice.engines.simd.kernels.vector import full, load, max_lanes, maximum, store, sum_lanes

ROWS = 4
"""Rows that read a key together."""
BLOCK = 16
"""Keys, or values, that stay in the nearest cache while all rows read them."""
LINES = ROWS * HEADS
"""Pairs of a row and a head that are worked on together."""
PADDING = 16
"""Floats that the last vector of a line may reach beyond its scores."""

_ZERO, _ONE = np.float32(0.0), np.float32(1.0)
_LOWEST = np.float32(-1e30)


class Rows(NamedTuple):
    """Some neighbours of a set of rows, up to ROWS."""

    state: np.ndarray
    kind: int
    row_set: int
    first: int
    """Index in the set."""
    size: int


class Queries(NamedTuple):
    address: int
    """Of the first row's float32[heads, head_dim]."""
    stride: int
    """Bytes to the next row's."""
    heads: int
    """That share a KV head, up to HEADS."""
    head_dim: int


class Cache(NamedTuple):
    bits: int
    """Of a number: 16, or 8 with a float32 scale behind a head's numbers."""
    keys: int
    """Address of the KV head's part of the first row."""
    values: int
    stride: int
    """Bytes to the next row's."""


class Lines(NamedTuple):
    """LINES lines to work in: of a row and head, float32[head_dim] mixed values, then scores, and PADDING."""

    address: int
    stride: int
    """Bytes to the next one."""


class Output(NamedTuple):
    records: int
    """Address of all rows'."""
    block: int
    """The first head's first one in a row."""
    blocks: int
    """Of a row."""
    zero: int
    """Of the matrix that reads them."""


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
def seen(rows: Rows, i: int) -> Any:
    """Which of the new rows the i-th is, the first position that it sees, and the one after the last."""
    new_row, slots = source_row(rows.state, rows.row_set, rows.first + i), KINDS + rows.kind * KIND_SLOTS
    return new_row, read_i64(rows.state[slots + FIRST] + 8 * new_row), read_i64(rows.state[slots + STOP] + 8 * new_row)


@kernel
def seen_by_any(rows: Rows) -> Any:
    """The first position that one of the rows sees, and the one after the last."""
    _, begin, end = seen(rows, 0)
    for i in range(1, rows.size):
        _, first, stop = seen(rows, i)
        begin, end = min(begin, first), max(end, stop)
    return begin, end


@kernel
def neighbours(state: np.ndarray, position: int, end: int) -> Any:
    """How many positions from this one on lie side by side in the cache, whatever the row: up to BLOCK."""
    if state[PATHS]:
        end = min(end, max(state[LENGTH], position + 1))
    return min(BLOCK, end - position)


@kernel
def score(
    bits: int, query: int, heads: int, head_dim: int, key: int, stride: int, count: int, out: int, out_stride: int
) -> None:
    """The products of up to HEADS queries with `count` keys, `stride` bytes apart: see `score_tile`."""
    tiled = count - count % WIDE
    if bits == 16:
        for j in range(0, tiled, WIDE):
            score_tile(16, WIDE, query, heads, head_dim, key + j * stride, stride, out + 4 * j, out_stride)
        for j in range(tiled, count):
            score_tile(16, 1, query, heads, head_dim, key + j * stride, stride, out + 4 * j, out_stride)
    else:
        for j in range(0, tiled, WIDE):
            score_tile(8, WIDE, query, heads, head_dim, key + j * stride, stride, out + 4 * j, out_stride)
        for j in range(tiled, count):
            score_tile(8, 1, query, heads, head_dim, key + j * stride, stride, out + 4 * j, out_stride)


@kernel
def mix(
    bits: int, weight: int, weight_stride: int, value: int, stride: int, count: int, head_dim: int, out: int
) -> None:
    """Add `count` values, `stride` bytes apart, times their weights in HEADS heads: see `mix_tile`.

    The weights of int8 values are multiplied by their scales, where they lie.
    """
    tiled = head_dim - head_dim % (16 * WIDE)
    if bits == 16:
        for i in range(0, tiled, 16 * WIDE):
            mix_tile(16, WIDE, weight, weight_stride, value + 2 * i, stride, count, out + 4 * i)
        for i in range(tiled, head_dim, 16):
            mix_tile(16, 1, weight, weight_stride, value + 2 * i, stride, count, out + 4 * i)
    else:
        for j in range(count):
            scale = read_f32(value + j * stride + head_dim)
            for at in range(weight + 4 * j, weight + 4 * j + HEADS * weight_stride, weight_stride):
                write_f32(at, read_f32(at) * scale)
        for i in range(0, tiled, 16 * WIDE):
            mix_tile(8, WIDE, weight, weight_stride, value + i, stride, count, out + 4 * i)
        for i in range(tiled, head_dim, 16):
            mix_tile(8, 1, weight, weight_stride, value + i, stride, count, out + 4 * i)


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
def score_rows(rows: Rows, queries: Queries, cache: Cache, lines: Lines, begin: int, end: int) -> None:
    """Every row's scores of what it sees of the positions begin..end - 1, and of some that it does not see."""
    at = begin
    while at < end:
        count = neighbours(rows.state, at, end)
        for i in range(rows.size):
            new_row, first, stop = seen(rows, i)
            if first < at + count and at < stop:
                key = cache.keys + cache_row(rows.state, rows.kind, new_row, at) * cache.stride
                out = lines.address + i * HEADS * lines.stride + 4 * (queries.head_dim + at - begin)
                query = queries.address + i * queries.stride
                score(cache.bits, query, queries.heads, queries.head_dim, key, cache.stride, count, out, lines.stride)
        at += count


@kernel
def weigh_rows(rows: Rows, head_dim: int, lines: Lines, begin: int) -> None:
    """Scores to weights, in every line."""
    for line in range(rows.size * HEADS):
        _, first, stop = seen(rows, line // HEADS)
        softmax(lines.address + line * lines.stride + 4 * (head_dim + first - begin), stop - first)


@kernel
def mix_rows(rows: Rows, head_dim: int, cache: Cache, lines: Lines, begin: int, end: int) -> None:
    """Every row's values times its weights."""
    for line in range(rows.size * HEADS):
        for i in range(0, 4 * head_dim, 64):
            store(lines.address + line * lines.stride + i, full(_ZERO))
    at = begin
    while at < end:
        count = neighbours(rows.state, at, end)
        for i in range(rows.size):
            new_row, first, stop = seen(rows, i)
            first, stop = max(first, at), min(stop, at + count)
            if first < stop:
                value = cache.values + cache_row(rows.state, rows.kind, new_row, first) * cache.stride
                out = lines.address + i * HEADS * lines.stride
                weight = out + 4 * (head_dim + first - begin)
                mix(cache.bits, weight, lines.stride, value, cache.stride, stop - first, head_dim, out)
        at += count


@kernel
def write_rows(rows: Rows, heads: int, head_dim: int, lines: Lines, output: Output) -> None:
    """Quantise what was mixed."""
    for i in range(rows.size):
        for head in range(heads):
            for part in range(head_dim // 32):
                mixed = lines.address + (i * HEADS + head) * lines.stride + 128 * part
                block = output.block + head * (head_dim // 32) + part
                to = activation_address(output.records, rows.first + i, rows.state[rows.row_set], block, output.blocks)
                quantize_block(load(mixed), load(mixed + 64), output.zero, to)


@kernel
def attend(rows: Rows, queries: Queries, cache: Cache, lines: Lines, output: Output) -> None:
    """softmax(q . k) . v of some rows and up to HEADS heads that share a KV head, quantised."""
    begin, end = seen_by_any(rows)
    score_rows(rows, queries, cache, lines, begin, end)
    weigh_rows(rows, queries.head_dim, lines, begin)
    mix_rows(rows, queries.head_dim, cache, lines, begin, end)
    write_rows(rows, queries.heads, queries.head_dim, lines, output)
