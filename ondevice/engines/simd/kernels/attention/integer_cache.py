"""Attention over an int8 cache: a tile of up to TILE_PAIRS pairs over a block of positions.

In a tree, a row's ancestors lie among other pending rows of the cache, and yet the row must give the same bits as after
they were committed. A score depends on its key only: so all pending keys (the tail) are scored where they lie, and then
the scores are put in the order of the row's path. Weights are put back in the order of the cache, with zeros for other
rows, which do not change sums of integers.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ondevice.engines.simd.kernels.attention.integer_tile import KEYS_AHEAD, TILE_PAIRS, mix_tile, score_tile
from ondevice.engines.simd.kernels.attention.query_key_value import quantize_head
from ondevice.engines.simd.kernels.attention.scratch import (
    NOWHERE,
    KVHead,
    Sequence,
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
from ondevice.engines.simd.kernels.contract.instruction_sets import instruction_set
from ondevice.engines.simd.kernels.contract.matrices import TILE
from ondevice.engines.simd.kernels.isa.memory import (
    read_f32,
    read_i8,
    read_i32,
    write_f32,
    write_i8,
    write_i32,
    write_i64,
)
from ondevice.engines.simd.kernels.isa.vector import (
    full,
    load,
    max_lanes,
    maximum,
    round_even,
    softcap,
    store_rounded_int8,
    sum_lanes,
    within,
)
from ondevice.native.functions import kernel

_ZERO, _MAX_WEIGHT = np.float32(0.0), np.float32(127.0)
_LOWEST, _LEAST = np.float32(-1e30), np.float32(1e-30)
_OFFSET = instruction_set().int8_zero
"""The code of the number 0 in the operand of a dot product: 128 where operands are unsigned, else 0."""


@kernel
def tile_size(pairs: int) -> Any:
    """The number of pairs in the next tile of some pairs: a power of two, because every size is compiled separately."""
    size = np.int64(TILE_PAIRS)
    while size > pairs:
        size //= 2
    return size


@kernel
def quantize_queries(scratch: Scratch, count: int, head_dim: int) -> None:
    """Quantise the queries of `count` pairs to int8, tile by tile."""
    codes = scratch.scores  # not in use yet
    first = 0
    while first < count:
        members = tile_size(count - first)
        for i in range(members):
            pair = first + i
            scale = quantize_head(query_of(scratch.table, pair), codes, head_dim)
            total = np.int64(0)
            for block in range(head_dim // 32):
                to = scratch.codes + first * head_dim + 32 * (block * members + i)
                for at in range(0, 32, 4):
                    write_i32(to + at, read_i32(codes + 32 * block + at))
                for at in range(32):
                    total += read_i8(codes + 32 * block + at)
            write_i32(scratch.starts + 4 * pair, np.int32(-_OFFSET * total))
            write_f32(scratch.query_scales + 4 * pair, scale)
        first += members


@kernel
def score_keys(
    scratch: Scratch, first: int, members: int, head_dim: int, keys: int, count: int, stride: int, out: int, line: int
) -> None:
    """Scores of `count` tiles of 16 keys for the tile of `members` pairs that begins with pair `first`.

    keys : address of the first unit; the tiles begin with its first one
    stride : bytes from a unit to the next
    out : address of float32[members, 16 * count]
    line : bytes from a row of `out` to the next
    """
    queries, starts = scratch.codes + first * head_dim, scratch.starts + 4 * first
    scales, blocks, ahead = scratch.query_scales + 4 * first, head_dim // 32, KEYS_AHEAD * stride
    for tile in range(count):
        at = keys + tile // 2 * stride + tile % 2 * TILE * (head_dim + 4)
        to = out + 4 * TILE * tile
        if members == 8:
            score_tile(8, at, ahead, queries, starts, scales, blocks, to, line)
        elif members == 4:
            score_tile(4, at, ahead, queries, starts, scales, blocks, to, line)
        elif members == 2:
            score_tile(2, at, ahead, queries, starts, scales, blocks, to, line)
        else:
            score_tile(1, at, ahead, queries, starts, scales, blocks, to, line)


@kernel
def mix_values(
    members: int,
    values: int,
    stride: int,
    weights: int,
    starts: int,
    scales: int,
    count: int,
    chain: int,
    head_dim: int,
    out: int,
    line: int,
) -> None:
    """`mix_tile` for 1, 2, 4 or 8 pairs."""
    tiles = head_dim // TILE
    if members == 8:
        mix_tile(8, values, stride, weights, starts, scales, count, chain, tiles, out, line)
    elif members == 4:
        mix_tile(4, values, stride, weights, starts, scales, count, chain, tiles, out, line)
    elif members == 2:
        mix_tile(2, values, stride, weights, starts, scales, count, chain, tiles, out, line)
    else:
        mix_tile(1, values, stride, weights, starts, scales, count, chain, tiles, out, line)


@kernel
def scale_address(
    scratch: Scratch, sequence: Sequence, head: KVHead, head_dim: int, pair: int, tail: int, unit: int, stop: int
) -> Any:
    """The address of float32[UNIT]: the scales of the values of a unit of positions, for those that the pair sees."""
    if unit < tail:
        return head.values + (unit - sequence.base) // UNIT * head.stride + UNIT * head_dim
    for position in range(unit, min(unit + UNIT, stop)):
        place = cache_row(sequence, scratch.table, pair, position)
        at = head.values + place // UNIT * head.stride + UNIT * head_dim + 4 * (place % UNIT)
        write_f32(scratch.tail_scales + 4 * (position - unit), read_f32(at))
    return scratch.tail_scales


@kernel
def weigh(
    scratch: Scratch,
    states: States,
    sequence: Sequence,
    head: KVHead,
    head_dim: int,
    first: int,
    member: int,
    members: int,
    tail: int,
    begin: int,
    end: int,
) -> None:
    """Quantise a pair's weights for positions begin..end - 1, whole units of a block; add their sum to its state."""
    pair = first + member
    low, high = seen(scratch.table, pair)
    low, high = max(low, begin), min(high, end)
    scores, offset = score_row(scratch, member), begin // SCORE_BLOCK * SCORE_BLOCK
    largest = full(_LOWEST)
    for at in range(low // TILE * TILE, high, TILE):
        largest = maximum(largest, within(load(scores + 4 * (at - offset)), low - at, high - at, _LOWEST))
    peak = full(raise_peak(states, pair, head_dim, max_lanes(largest)))
    total, zeros = full(_ZERO), full(_ZERO)
    for unit in range(begin, end, UNIT):
        number = (unit - begin) // UNIT * members + member
        to, start, scale = scratch.weights + UNIT * number, np.int64(0), _ZERO
        if unit < high and low < unit + UNIT:
            at, factors = (
                scores + 4 * (unit - offset),
                scale_address(scratch, sequence, head, head_dim, pair, tail, unit, high),
            )
            left = within(weight_of(load(at) - peak), low - unit, high - unit, _ZERO)
            right = within(weight_of(load(at + 64) - peak), low - unit - TILE, high - unit - TILE, _ZERO)
            total = total + left + right
            left = within(left * load(factors), low - unit, high - unit, _ZERO)
            right = within(right * load(factors + 64), low - unit - TILE, high - unit - TILE, _ZERO)
            most = max(max_lanes(maximum(left, right)), _LEAST)
            scale, inverse = most / _MAX_WEIGHT, full(_MAX_WEIGHT / most)
            left, right = round_even(left * inverse), round_even(right * inverse)
            store_rounded_int8(to, left)
            store_rounded_int8(to + TILE, right)
            summed = sum_lanes(left + right)
            start = -_OFFSET * np.int64(summed)
            scale += summed * _ZERO  # NaN if a weight is, as an int8 code cannot be
        else:
            store_rounded_int8(to, zeros)
            store_rounded_int8(to + TILE, zeros)
        write_i32(scratch.weight_starts + 4 * number, np.int32(start))
        write_f32(scratch.weight_scales + 4 * number, scale)
    states_total = states.address + pair * states.stride + 4 * head_dim + 4
    write_f32(states_total, read_f32(states_total) + sum_lanes(total))


@kernel
def mix_tail(
    scratch: Scratch,
    states: States,
    sequence: Sequence,
    head: KVHead,
    head_dim: int,
    first: int,
    members: int,
    tail: int,
    units: int,
    begin: int,
    end: int,
) -> None:
    """Add the values of positions from `tail` on, by units of positions; they lie anywhere in `units` units there."""
    out = states.address + first * states.stride
    for unit in range(max(begin, tail), end, UNIT):
        for at in range(0, units * members * UNIT, 8):
            write_i64(scratch.tail_weights + at, np.int64(0))
        number = (unit - begin) // UNIT * members
        for member in range(members):
            low, high = seen(scratch.table, first + member)
            for position in range(max(low, unit), min(high, unit + UNIT)):
                place = cache_row(sequence, scratch.table, first + member, position) + sequence.base - tail
                code = read_i8(scratch.weights + UNIT * (number + member) + position - unit)
                write_i8(scratch.tail_weights + UNIT * (place // UNIT * members + member) + place % UNIT, code)
        values = head.values + (tail - sequence.base) // UNIT * head.stride
        mix_values(
            members,
            values,
            head.stride,
            scratch.tail_weights,
            scratch.weight_starts + 4 * number,
            scratch.weight_scales + 4 * number,
            1,
            units,
            head_dim,
            out,
            states.stride,
        )


@kernel
def attend_tile(
    scratch: Scratch,
    states: States,
    sequence: Sequence,
    head: KVHead,
    head_dim: int,
    first: int,
    members: int,
    block: int,
) -> None:
    """Add the positions of a block that the tile of pairs beginning with `first` sees to their states."""
    begin, end = seen_by_any(scratch.table, first, members)
    begin, end = max(begin, block), min(end, block + SCORE_BLOCK)
    if begin >= end:
        return
    tail, units = NOWHERE, 0
    if sequence.paths:
        tail = sequence.length // UNIT * UNIT
        units = (sequence.length + sequence.rows - tail + UNIT - 1) // UNIT
    begin, stop = begin // UNIT * UNIT, end
    end = (end + UNIT - 1) // UNIT * UNIT
    body = min(end, max(begin, tail))
    keys = head.keys + (begin - sequence.base) // UNIT * head.stride
    count = (min(stop, body) - begin + TILE - 1) // TILE
    out = score_row(scratch, 0) + 4 * (begin - block)
    score_keys(scratch, first, members, head_dim, keys, count, head.stride, out, score_stride())
    softcap(out, score_stride(), members, TILE * count, head.softcap)
    if body < end:
        keys = head.keys + (tail - sequence.base) // UNIT * head.stride
        count = (sequence.length + sequence.rows - tail + TILE - 1) // TILE
        score_keys(scratch, first, members, head_dim, keys, count, head.stride, scratch.tail_scores, 4 * TAIL)
        softcap(scratch.tail_scores, 4 * TAIL, members, TILE * count, head.softcap)
        for member in range(members):
            low, high = seen(scratch.table, first + member)
            start = max(low, body)
            order_tail(scratch, sequence, first + member, member, tail, start, min(high, stop))
    for member in range(members):
        weigh(scratch, states, sequence, head, head_dim, first, member, members, tail, begin, end)
    if begin < body:
        values = head.values + (begin - sequence.base) // UNIT * head.stride
        out = states.address + first * states.stride
        count = (body - begin) // UNIT
        mix_values(
            members,
            values,
            head.stride,
            scratch.weights,
            scratch.weight_starts,
            scratch.weight_scales,
            count,
            1,
            head_dim,
            out,
            states.stride,
        )
    if body < end:
        mix_tail(scratch, states, sequence, head, head_dim, first, members, tail, units, begin, end)
