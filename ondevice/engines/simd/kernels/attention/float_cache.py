"""Attention over an fp16 cache, in float32: a tile of up to TILE_PAIRS pairs over a block of positions.

Values are added one after the other in the order of positions. The pairs of a tile share the positions that all of them
see; before and after these, pairs of one row go together. A weight of 0 in place of that would add a NaN to rows that
do not see its position.

In a tree, a row's ancestors lie among other pending rows of the cache, and yet the row must give the same bits as after
they were committed. So all pending keys (the tail) are scored where they lie, and then the scores are put in the order
of the row's path; their values are added one by one.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ondevice.engines.simd.kernels.attention.float_tile import (
    LINE_BYTES,
    TILE_PAIRS,
    lay_four,
    mix_tile,
    score_tile,
    value_line,
)
from ondevice.engines.simd.kernels.attention.scratch import (
    NOWHERE,
    KVHead,
    Pairs,
    States,
    cache_row,
    order_tail,
    query_of,
    raise_peak,
    score_row,
    score_stride,
    seen,
    seen_by_any,
    weight_of,
)
from ondevice.engines.simd.kernels.contract.attention_memory import SCORE_BLOCK, TAIL, UNIT, Scratch
from ondevice.engines.simd.kernels.contract.instruction_sets import LANES
from ondevice.engines.simd.kernels.isa.memory import read_f32, write_f32
from ondevice.engines.simd.kernels.isa.vector import full, load, max_lanes, maximum, softcap, store, sum_lanes, within
from ondevice.native.functions import kernel

_ZERO, _LOWEST = np.float32(0.0), np.float32(-1e30)


@kernel
def tile_size(pairs: int) -> Any:
    """The number of pairs in the next tile of some pairs."""
    return min(np.int64(TILE_PAIRS), pairs)


@kernel
def lay_queries(scratch: Scratch, count: int, head_dim: int) -> None:
    """Lay the queries of `count` pairs tile by tile, float32[head_dim, members].

    Four queries are written at a time. Where a tile has fewer, the last one is written beyond the end of a row, and
    overwritten: by the next row, by the first queries of its own tile, which come last, or by the next tile. After the
    last tile there is room: MAX_PAIRS end with a tile of four.
    """
    first = 0
    while first < count:
        members = tile_size(count - first)
        last = first + members - 1
        for four in range((members - 1) // 4 * 4, -1, -4):
            a, b, c, d = (
                query_of(scratch.table, first + four),
                query_of(scratch.table, min(first + four + 1, last)),
                query_of(scratch.table, min(first + four + 2, last)),
                query_of(scratch.table, min(first + four + 3, last)),
            )
            to = scratch.queries + 4 * (first * head_dim + four)
            for i in range(0, head_dim, LANES):
                lay_four(a + 4 * i, b + 4 * i, c + 4 * i, d + 4 * i, to + 4 * members * i, 4 * members)
        first += members


@kernel
def score(
    queries: int, members: int, head_dim: int, keys: int, units: int, stride: int, out: int, out_stride: int
) -> None:
    """Scores of a tile of queries with the keys of some units.

    Args:
        queries: address of the tile's queries: see `lay_queries`.
        members: number of pairs of the tile.
        head_dim: numbers of a head.
        keys: address of the first unit.
        units: number of units.
        stride: bytes from a unit to the next.
        out: address of float32[members, UNIT * units].
        out_stride: bytes from a row of `out` to the next.
    """
    for unit in range(units):
        score_tile(members, keys + unit * stride, stride, queries, head_dim, out + 4 * UNIT * unit, out_stride)


@kernel
def mix(weights: int, members: int, head: KVHead, row: int, count: int, head_dim: int, out: int, stride: int) -> None:
    """Add `count` values of one unit times their weights to the sums of some pairs.

    Args:
        weights: address of the first pair's weights; `score_stride()` bytes to the next pair's.
        members: number of pairs, 1..TILE_PAIRS.
        head: the KV head.
        row: the first value's row in the cache.
        count: number of values, at least 1.
        head_dim: numbers of a head.
        out: address of the first pair's float32[head_dim].
        stride: bytes to the next pair's.
    """
    values = value_line(head.values, row, head.stride)
    for first in range(0, head_dim, UNIT):
        mix_tile(members, weights, values + LINE_BYTES * first, head.stride, count, out + 4 * first, stride)


@kernel
def weigh(scores: int, states: States, pair: int, head_dim: int, begin: int, end: int) -> None:
    """Turn the scores begin..end - 1 of a pair into weights, in place, and add their sum to the pair's state."""
    first = begin // LANES * LANES
    largest, total = full(_LOWEST), full(_ZERO)
    for i in range(first, end, LANES):
        largest = maximum(largest, within(load(scores + 4 * i), begin - i, end - i, _LOWEST))
    peak = full(raise_peak(states, pair, head_dim, max_lanes(largest)))
    for i in range(first, end, LANES):
        weight = within(weight_of(load(scores + 4 * i) - peak), begin - i, end - i, _ZERO)
        store(scores + 4 * i, weight)
        total = total + weight
    at = states.address + pair * states.stride + 4 * head_dim + 4
    write_f32(at, read_f32(at) + sum_lanes(total))


@kernel
def mix_range(
    scratch: Scratch, states: States, head: KVHead, head_dim: int, base: int, first: int, member: int, members: int,
    begin: int, end: int,
) -> None:  # fmt: skip
    """Add the values of positions begin..end - 1 of a block, which lie in their order, to the states of some pairs.

    Args:
        base: the position of the cache's first row.
        first: the first pair of the tile.
        member, members: the first pair in the tile, and the number of pairs.
    """
    weights, out = score_row(scratch, member), states.address + (first + member) * states.stride
    while begin < end:
        stop = min(end, (begin // UNIT + 1) * UNIT)
        at = weights + 4 * (begin % SCORE_BLOCK)
        mix(at, members, head, begin - base, stop - begin, head_dim, out, states.stride)
        begin = stop


@kernel
def mix_tail(
    scratch: Scratch, states: States, pairs: Pairs, head: KVHead, head_dim: int, first: int, member: int, members: int,
    begin: int, end: int,
) -> None:  # fmt: skip
    """`mix_range` for pairs of one row and positions whose values lie anywhere among the pending rows."""
    weights, out = score_row(scratch, member), states.address + (first + member) * states.stride
    for position in range(begin, end):
        row = cache_row(pairs.sequence, scratch.table, first + member, position)
        at = weights + 4 * (position % SCORE_BLOCK)
        mix(at, members, head, row, np.int64(1), head_dim, out, states.stride)


@kernel
def attend_tile(
    scratch: Scratch, states: States, pairs: Pairs, head: KVHead, head_dim: int, first: int, members: int, block: int
) -> None:
    """Add the positions of a block that the tile of pairs beginning with `first` sees to their states."""
    sequence = pairs.sequence
    begin, end = seen_by_any(scratch.table, first, members)
    begin, end = max(begin, block), min(end, block + SCORE_BLOCK)
    if begin >= end:
        return
    tail = sequence.length // UNIT * UNIT if sequence.paths else NOWHERE
    queries, unit = scratch.queries + 4 * first * head_dim, begin // UNIT * UNIT
    body = min(end, max(unit, tail))
    if unit < body:
        keys, units = head.keys + (unit - sequence.base) // UNIT * head.stride, (body - unit + UNIT - 1) // UNIT
        out = score_row(scratch, 0) + 4 * (unit - block)
        score(queries, members, head_dim, keys, units, head.stride, out, score_stride())
        softcap(out, score_stride(), members, UNIT * units, head.softcap)
    if body < end:
        keys = head.keys + (tail - sequence.base) // UNIT * head.stride
        units = (sequence.length + sequence.rows - tail + UNIT - 1) // UNIT
        score(queries, members, head_dim, keys, units, head.stride, scratch.tail_scores, np.int64(4 * TAIL))
        softcap(scratch.tail_scores, np.int64(4 * TAIL), members, UNIT * units, head.softcap)
    low, high = begin, end
    for member in range(members):
        own_low, own_high = seen(scratch.table, first + member)
        own_low, own_high = max(own_low, begin), min(own_high, end)
        if body < end:
            order_tail(scratch, sequence, first + member, member, tail, max(own_low, body), own_high)
        if own_low < own_high:
            weigh(score_row(scratch, member), states, first + member, head_dim, own_low - block, own_high - block)
        low, high = min(max(low, own_low), end), min(high, own_high)
    high = max(low, min(high, body))  # all pairs see positions low..high - 1, and their values lie in order
    mix_rows(scratch, states, pairs, head, head_dim, first, members, begin, low, body)
    mix_range(scratch, states, head, head_dim, sequence.base, first, np.int64(0), members, low, high)
    mix_rows(scratch, states, pairs, head, head_dim, first, members, high, end, body)


@kernel
def mix_rows(
    scratch: Scratch, states: States, pairs: Pairs, head: KVHead, head_dim: int, first: int, members: int, begin: int,
    end: int, body: int,
) -> None:  # fmt: skip
    """Add those of positions begin..end - 1 that a row sees to the states of its pairs, row by row.

    body : the position from which on values lie in the order of a row's path
    """
    if begin >= end:
        return
    member = np.int64(0)
    while member < members:
        count = min(members - member, pairs.group - (pairs.first + first + member) % pairs.group)
        low, high = seen(scratch.table, first + member)
        low, high = max(low, begin), min(high, end)
        own = min(max(low, body), high)
        mix_range(scratch, states, head, head_dim, pairs.sequence.base, first, member, count, low, own)
        mix_tail(scratch, states, pairs, head, head_dim, first, member, count, own, high)
        member += count
