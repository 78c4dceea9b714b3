"""Exact attention to the units that lookups have chosen, and to the first and the newest positions.

A unit of work is a row in the query heads of a KV head. What it attends to is a list of its own, taken in the order of
positions, so what other rows attend to changes no bit.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from ondevice.engines.simd.kernels.attention import (
    Output,
    attend_all,
    begin_unit,
    parts_of,
    write_out,
)
from ondevice.engines.simd.kernels.attention_layouts import AttendChosen
from ondevice.engines.simd.kernels.attention_rows import (
    BLOCK,
    KVHead,
    Pairs,
    Queries,
    Scratch,
    read_sequence,
    row_range,
    scratch_at,
    see,
    sequence_of,
    state_bytes,
)
from ondevice.engines.simd.kernels.attention_state import States, clear
from ondevice.engines.simd.kernels.attention_tile import HEADS
from ondevice.engines.simd.kernels.float_attention import attend_heads
from ondevice.engines.simd.kernels.heads import part_bytes
from ondevice.engines.simd.kernels.integer_attention import attend_tile, tile_size
from ondevice.engines.simd.kernels.integer_tile import UNIT
from ondevice.engines.simd.kernels.jit import kernel
from ondevice.engines.simd.kernels.looking_up import FIRST
from ondevice.engines.simd.kernels.memory import read_i64
from ondevice.engines.simd.kernels.shares import claim
from ondevice.engines.simd.kernels.slots import CACHE_BITS, CACHES, FIRST_ROW, SCRATCH, SCRATCH_STRIDE
from ondevice.engines.simd.kernels.step_layouts import read_step

_ONE = np.int64(1)


class RowUnit(NamedTuple):
    """A row in the query heads of a KV head, ready to attend."""

    row: int
    kv_head: int
    record: int
    """Address of its sequence's."""
    pairs: Pairs
    head: KVHead
    output: Output


@kernel
def begin_row(step: Any, state: np.ndarray, unit: int, scratch: Scratch) -> Any:
    """The `unit`-th of a step that has all of `Attend`."""
    row_set, kind, size, query_heads, kv_heads = step.row_set, step.kind, step.size, step.query_heads, step.kv_heads
    group, cache, skipped = query_heads // kv_heads, CACHES + step.cache, part_bytes(state[CACHE_BITS], size)
    row, kv_head = unit // kv_heads, unit % kv_heads
    record = sequence_of(state, row_set, row)
    keys, values = read_i64(record + 8 * cache), read_i64(record + 8 * (cache + 1))
    head = KVHead(state[CACHE_BITS], keys + kv_head * skipped, values + kv_head * skipped, kv_heads * skipped)
    first_row = read_i64(record + 8 * (FIRST_ROW + row_set))
    pairs = Pairs(read_sequence(record, kind), kind, row_set, first_row, group, (row - first_row) * group, group)
    queries = Queries(step.x + 4 * kv_head * group * size, step.stride, size)
    block = kv_head * group * size // 32
    output = Output(step.activations, state[row_set], block, query_heads * size // 32, step.form)
    begin_unit(state, pairs, queries, head, scratch)
    return RowUnit(row, kv_head, record, pairs, head, output)


@kernel
def attend_range(
    pairs: Pairs, head: KVHead, head_dim: int, scratch: Scratch, states: States, begin: int, end: int
) -> None:
    """Add positions begin..end - 1, all of which the pairs of one row see, to their states."""
    see(scratch.table, pairs.size, begin, end)
    for block in range(begin // BLOCK * BLOCK, end, BLOCK):
        pair = np.int64(0)
        while pair < pairs.size:
            if head.bits == 8:
                size = tile_size(pairs.size - pair)
                attend_tile(scratch, states, pairs.sequence, head, head_dim, pair, size, block)
            else:
                size = min(pairs.size - pair, HEADS)
                attend_heads(scratch, states, pairs.sequence, head, head_dim, pair, size, block)
            pair += size


@kernel
def attend_to_chosen(
    pairs: Pairs, head: KVHead, head_dim: int, scratch: Scratch, states: States, chosen: int, window: int, stop: int
) -> None:
    """Make states those of the first positions, of chosen units and of the newest positions.

    Args:
        pairs, head, head_dim, scratch, states: of a row, as in `attention`.
        chosen: address of int64[1 + n], n and the numbers of units.
        window: newest positions at least.
        stop: behind the last position that the row sees.
    """
    clear(states, pairs.size, head_dim)
    count, begin = read_i64(chosen), np.int64(0)
    end = np.int64(FIRST * UNIT)
    for i in range(count):
        unit = read_i64(chosen + 8 * (1 + i)) * UNIT
        if unit > end or unit % BLOCK == 0:  # neighbours are taken together
            attend_range(pairs, head, head_dim, scratch, states, begin, end)
            begin = unit
        end = unit + UNIT
    attend_range(pairs, head, head_dim, scratch, states, begin, end)
    attend_range(pairs, head, head_dim, scratch, states, (stop - window) // UNIT * UNIT, stop)


@kernel
def attend_chosen_share(words: np.ndarray, state: np.ndarray, thread: int, claims: int) -> None:
    """activations = softmax(queries @ keys.T) @ values, quantised, over the chosen positions of every row.

    Threads claim a row in the query heads of a KV head at a time.
    """
    step = read_step(AttendChosen, words)
    size, kv_heads, most = step.size, step.kv_heads, 1 + step.most
    scratch = scratch_at(state[SCRATCH] + thread * state[SCRATCH_STRIDE], size)
    unit = claim(claims, _ONE)
    while unit < state[step.row_set] * kv_heads:
        this = begin_row(step, state, unit, scratch)
        chosen = step.chosen + 8 * most * unit
        if read_i64(chosen) < 0:
            first_part, parts = parts_of(state, this.pairs)
            attend_all(this.pairs, this.head, size, scratch, first_part, parts, this.output)
        else:
            _, stop = row_range(state, step.row_set, step.kind, this.row)
            states = States(scratch.whole, state_bytes(size))
            attend_to_chosen(this.pairs, this.head, size, scratch, states, chosen, step.window, stop)
            write_out(this.pairs, size, states, this.output)
        unit = claim(claims, _ONE)
