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
    FIRST_ROW,
    LENGTH,
    PATH_WIDTH,
    PATHS,
    ROW_COUNT,
    SEQUENCES,
    STOP,
    WANTED,
    WANTED_ROWS,
    WINDOW,
)
from ondevice.engines.simd.kernels.vector import full, load, max_lanes, maximum, store, sum_lanes

ROWS = 4
"""Rows that read a key together."""
BLOCK = 16
"""Keys, or values, that stay in the nearest cache while all rows read them."""
PAIRS = ROWS * HEADS
"""Pairs of a row and a head that are worked on together."""
PADDING = 16
"""Floats that the last vector of a pair's scores may reach beyond them."""

_ZERO, _ONE = np.float32(0.0), np.float32(1.0)
_LOWEST = np.float32(-1e30)
_BEYOND = np.int64(1 << 62)
"""A position behind all."""


class Sequence(NamedTuple):
    """What attention of one kind needs of a sequence's record: see `slots`."""

    first_row: int
    length: int
    paths: int
    path_width: int
    base: int


class RowGroup(NamedTuple):
    """Up to ROWS neighbouring rows of one sequence in a row set."""

    state: np.ndarray
    sequence: Sequence
    kind: int
    row_set: int
    first: int
    """Index in the row set."""
    size: int


class Queries(NamedTuple):
    """The queries of a row group in some heads that share a KV head: float32[heads, head_dim] per row."""

    address: int
    """Of the first row's."""
    stride: int
    """Bytes to the next row's."""
    heads: int
    """1..HEADS."""
    head_dim: int


class KVHead(NamedTuple):
    """The keys and values of one KV head in a sequence's cache."""

    bits: int
    """Of a number: 16, or 8 with a float32 scale behind a head's numbers."""
    keys: int
    """Address of the head's part of the cache's first row."""
    values: int
    stride: int
    """Bytes to the next row's."""


class Scratch(NamedTuple):
    """Working memory of a thread for PAIRS pairs of a row and a head.

    Each pair's part is float32[head_dim], the weighted sum of values, then the scores of all positions, and PADDING.
    """

    address: int
    stride: int
    """Bytes to the next pair's part."""


class Output(NamedTuple):
    """Where the results go: quantised blocks of 32, as `quantize` writes them."""

    activations: int
    """Address of all rows'."""
    block: int
    """The first head's first one in a row."""
    blocks: int
    """Of a row."""
    zero: int
    """The code of a zero weight in the matrix that reads them."""


@kernel
def sequence_of(state: np.ndarray, row_set: int, row: int) -> Any:
    """The address of the record of the sequence that the `row`-th row of a set belongs to."""
    at = state[SEQUENCES]
    record = read_i64(at)
    while row >= read_i64(record + 8 * (FIRST_ROW + row_set)) + read_i64(record + 8 * (ROW_COUNT + row_set)):
        at += 8
        record = read_i64(at)
    return record


@kernel
def read_sequence(record: int, kind: int) -> Any:
    """The part of a sequence's record that attention of one kind needs."""
    return Sequence(
        read_i64(record + 8 * FIRST_ROW),
        read_i64(record + 8 * LENGTH),
        read_i64(record + 8 * PATHS),
        read_i64(record + 8 * PATH_WIDTH),
        read_i64(record + 8 * (BASE + kind)),
    )


@kernel
def source_row(state: np.ndarray, row_set: int, row: int) -> Any:
    """Which of all new rows the `row`-th of a set is."""
    if row_set == WANTED:
        return read_i64(state[WANTED_ROWS] + 8 * row)
    return row


@kernel
def cache_row(sequence: Sequence, row: int, position: int) -> Any:
    """The row of its sequence's cache in which new row `row` finds `position`."""
    depth = position - sequence.length
    if depth >= 0 and sequence.paths:
        path = sequence.paths + 8 * (row - sequence.first_row) * sequence.path_width
        position = sequence.length + read_i64(path + 8 * depth)
    return position - sequence.base


@kernel
def seen(rows: RowGroup, i: int) -> Any:
    """Which of all new rows the i-th is, the first position that it sees, and the one after the last."""
    new_row = source_row(rows.state, rows.row_set, rows.first + i)
    stop = read_i64(rows.state[STOP] + 8 * new_row)
    return new_row, max(0, stop - rows.state[WINDOW + rows.kind]), stop


@kernel
def seen_by_any(rows: RowGroup) -> Any:
    """The first position that one of the rows sees, and the one after the last."""
    begin, end = _BEYOND, np.int64(0)
    for i in range(rows.size):
        _, first, stop = seen(rows, i)
        begin, end = min(begin, first), max(end, stop)
    return begin, end


@kernel
def neighbours(sequence: Sequence, position: int, end: int) -> Any:
    """How many positions from this one on lie side by side in the cache, whatever the row: up to BLOCK."""
    if sequence.paths:
        end = min(end, max(sequence.length, position + 1))
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
def score_rows(rows: RowGroup, queries: Queries, head: KVHead, scratch: Scratch, begin: int, end: int) -> None:
    """Every row's scores of what it sees of the positions begin..end - 1, and of some that it does not see."""
    at = begin
    while at < end:
        count = neighbours(rows.sequence, at, end)
        for i in range(rows.size):
            new_row, first, stop = seen(rows, i)
            if first < at + count and at < stop:
                key = head.keys + cache_row(rows.sequence, new_row, at) * head.stride
                out = scratch.address + i * HEADS * scratch.stride + 4 * (queries.head_dim + at - begin)
                query = queries.address + i * queries.stride
                score(head.bits, query, queries.heads, queries.head_dim, key, head.stride, count, out, scratch.stride)
        at += count


@kernel
def weigh_rows(rows: RowGroup, head_dim: int, scratch: Scratch, begin: int) -> None:
    """Softmax of every pair's scores, in place."""
    for pair in range(rows.size * HEADS):
        _, first, stop = seen(rows, pair // HEADS)
        softmax(scratch.address + pair * scratch.stride + 4 * (head_dim + first - begin), stop - first)


@kernel
def mix_rows(rows: RowGroup, head_dim: int, head: KVHead, scratch: Scratch, begin: int, end: int) -> None:
    """Every pair's sum of values times its weights."""
    for pair in range(rows.size * HEADS):
        for i in range(0, 4 * head_dim, 64):
            store(scratch.address + pair * scratch.stride + i, full(_ZERO))
    at = begin
    while at < end:
        count = neighbours(rows.sequence, at, end)
        for i in range(rows.size):
            new_row, first, stop = seen(rows, i)
            first, stop = max(first, at), min(stop, at + count)
            if first < stop:
                value = head.values + cache_row(rows.sequence, new_row, first) * head.stride
                out = scratch.address + i * HEADS * scratch.stride
                weight = out + 4 * (head_dim + first - begin)
                mix(head.bits, weight, scratch.stride, value, head.stride, stop - first, head_dim, out)
        at += count


@kernel
def write_rows(rows: RowGroup, heads: int, head_dim: int, scratch: Scratch, output: Output) -> None:
    """Quantise every pair's sum."""
    count = rows.state[rows.row_set]
    for i in range(rows.size):
        for head in range(heads):
            for part in range(head_dim // 32):
                mixed = scratch.address + (i * HEADS + head) * scratch.stride + 128 * part
                block = output.block + head * (head_dim // 32) + part
                to = activation_address(output.activations, rows.first + i, count, block, output.blocks)
                quantize_block(load(mixed), load(mixed + 64), output.zero, to)


@kernel
def attend(rows: RowGroup, queries: Queries, head: KVHead, scratch: Scratch, output: Output) -> None:
    """softmax(q . k) . v of a row group in up to HEADS query heads that share a KV head, quantised."""
    begin, end = seen_by_any(rows)
    score_rows(rows, queries, head, scratch, begin, end)
    weigh_rows(rows, queries.head_dim, scratch, begin)
    mix_rows(rows, queries.head_dim, head, scratch, begin, end)
    write_rows(rows, queries.heads, queries.head_dim, scratch, output)
