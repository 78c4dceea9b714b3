"""Attention over an fp16 cache, in float32: up to HEADS query heads of one row over a block of positions.

Values are added one after the other in the order of positions. In a tree, rows of other branches may lie between them.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ondevice.engines.simd.kernels.attention.float_tile import WIDE, mix_tile, score_tile
from ondevice.engines.simd.kernels.attention.scratch import (
    KVHead,
    Sequence,
    States,
    cache_row,
    query_of,
    raise_peak,
    score_row,
    score_stride,
    seen,
)
from ondevice.engines.simd.kernels.contract import SCORE_BLOCK, Scratch
from ondevice.engines.simd.kernels.isa.memory import read_f32, write_f32
from ondevice.engines.simd.kernels.isa.vector import exp, full, load, max_lanes, maximum, store, sum_lanes, within
from ondevice.native.functions import kernel

_ZERO, _LOWEST = np.float32(0.0), np.float32(-1e30)


@kernel
def score(query: int, heads: int, head_dim: int, key: int, stride: int, count: int, out: int, out_stride: int) -> None:
    """Scores of up to HEADS queries with `count` keys, `stride` bytes apart: see `score_tile`."""
    tiled = count - count % WIDE
    for j in range(0, tiled, WIDE):
        score_tile(WIDE, query, heads, head_dim, key + j * stride, stride, out + 4 * j, out_stride)
    for j in range(tiled, count):
        score_tile(1, query, heads, head_dim, key + j * stride, stride, out + 4 * j, out_stride)


@kernel
def mix(
    weight: int, weight_stride: int, heads: int, value: int, stride: int, count: int, head_dim: int, out: int, line: int
) -> None:
    """Add `count` values, `stride` bytes apart, times their weights in up to HEADS heads: see `mix_tile`."""
    tiled = head_dim - head_dim % (16 * WIDE)
    for i in range(0, tiled, 16 * WIDE):
        mix_tile(WIDE, weight, weight_stride, heads, value + 2 * i, stride, count, out + 4 * i, line)
    for i in range(tiled, head_dim, 16):
        mix_tile(1, weight, weight_stride, heads, value + 2 * i, stride, count, out + 4 * i, line)


@kernel
def weigh(scores: int, states: States, pair: int, head_dim: int, count: int) -> None:
    """Turn `count` scores of a pair into weights, in place, and add their sum to the pair's state."""
    largest, total = full(_LOWEST), full(_ZERO)
    for i in range(0, count, 16):
        largest = maximum(largest, within(load(scores + 4 * i), 0, count - i, _LOWEST))
    peak = full(raise_peak(states, pair, head_dim, max_lanes(largest)))
    for i in range(0, count, 16):
        weight = within(exp(load(scores + 4 * i) - peak), 0, count - i, _ZERO)
        store(scores + 4 * i, weight)
        total = total + weight
    at = states.address + pair * states.stride + 4 * head_dim + 4
    write_f32(at, read_f32(at) + sum_lanes(total))


@kernel
def neighbours(sequence: Sequence, position: int, end: int) -> Any:
    """The number of positions from `position` on, up to `end`, that are consecutive in the cache for every row."""
    if sequence.paths:
        end = min(end, max(sequence.length, position + 1))
    return end - position


@kernel
def attend_heads(
    scratch: Scratch, states: States, sequence: Sequence, head: KVHead, head_dim: int, pair: int, heads: int, block: int
) -> None:
    """Add the positions of a block that some neighbouring pairs of one row see to their states."""
    begin, end = seen(scratch.table, pair)
    begin, end = max(begin, block), min(end, block + SCORE_BLOCK)
    if begin >= end:
        return
    scores, query = score_row(scratch, 0), query_of(scratch.table, pair)
    at = begin
    while at < end:
        count = neighbours(sequence, at, end)
        key = head.keys + cache_row(sequence, scratch.table, pair, at) * head.stride
        score(query, heads, head_dim, key, head.stride, count, scores + 4 * (at - begin), score_stride())
        at += count
    for i in range(heads):
        weigh(score_row(scratch, i), states, pair + i, head_dim, end - begin)
    at, out = begin, states.address + pair * states.stride
    while at < end:
        count = neighbours(sequence, at, end)
        value = head.values + cache_row(sequence, scratch.table, pair, at) * head.stride
        weight = scores + 4 * (at - begin)
        mix(weight, score_stride(), heads, value, head.stride, count, head_dim, out, states.stride)
        at += count
