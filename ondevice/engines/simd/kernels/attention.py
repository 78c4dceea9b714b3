"""Exact attention: pairs of a row and a query head over the parts of their positions.

Positions are taken in parts from multiples of PART on, and a pair's parts are put together in their order. Where there
are few rows, threads share the parts, so one row of one KV head keeps all of them busy; where there are many, a unit of
work is some pairs over all their parts. Both compute the same: what rows, or threads, there are changes no bit.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from ondevice.engines.simd.kernels.attention_rows import (
    BLOCK,
    PAIRS,
    KVHead,
    Pairs,
    Queries,
    Scratch,
    row_range,
    seen_by_any,
    state_bytes,
    write_table,
)
from ondevice.engines.simd.kernels.attention_state import States, clear, fold_all
from ondevice.engines.simd.kernels.attention_tile import HEADS
from ondevice.engines.simd.kernels.float_attention import attend_heads
from ondevice.engines.simd.kernels.inputs import write_input
from ondevice.engines.simd.kernels.integer_attention import attend_tile, quantize_queries, tile_size
from ondevice.engines.simd.kernels.integer_tile import MOST
from ondevice.engines.simd.kernels.jit import kernel
from ondevice.engines.simd.kernels.memory import fetch_add, read_f32, write_i64
from ondevice.engines.simd.kernels.vector import full, load

PART = 1024
"""Positions that are one thread's at a time: 2 KB of states for each pair and 1 MB of keys and values in int8, at a
head_dim of 512."""
SPLIT_ROWS = 16
"""Rows of a forward up to which parts are shared: beyond, rows are work enough."""

_ZERO, _ONE = np.float32(0.0), np.float32(1.0)


class Partials(NamedTuple):
    """Where the states of parts that several threads compute lie: [pairs][most_parts] states."""

    address: int
    """Of the first pair's of a unit."""
    most_parts: int
    counter: int
    """Address of an int64 that counts the unit's parts that are complete; 0 before and afterwards."""


_ALONE = Partials(0, 0, 0)
"""Nobody else has parts of these pairs."""


class Output(NamedTuple):
    """Where the results go: quantised blocks of 32, as `quantize` writes them."""

    activations: int
    """Address of all rows'."""
    rows: int
    block: int
    """The first query head's first one in a row."""
    blocks: int
    """Of a row."""
    form: int
    """Of the activations: see `inputs`."""


@kernel
def parts_of(state: np.ndarray, pairs: Pairs) -> Any:
    """The number of the first part that one of some pairs sees, and how many they see."""
    first = pairs.first_row + pairs.first // pairs.group
    last = pairs.first_row + (pairs.first + pairs.size - 1) // pairs.group
    begin, end = row_range(state, pairs.row_set, pairs.kind, first)
    for row in range(first + 1, last + 1):
        low, high = row_range(state, pairs.row_set, pairs.kind, row)
        begin, end = min(begin, low), max(end, high)
    begin //= PART
    return begin, max(1, (end + PART - 1) // PART - begin)


@kernel
def share_of_pairs(total: int, threads: int) -> Any:
    """How many pairs a unit of work has, if there are so many pairs, each as often as it has parts."""
    share = total // threads
    return min(PAIRS, share // MOST * MOST) if share >= MOST else HEADS


@kernel
def write_out(pairs: Pairs, head_dim: int, states: States, output: Output) -> None:
    """Quantise the results of complete states."""
    for i in range(pairs.size):
        number = pairs.first + i
        row, head = pairs.first_row + number // pairs.group, number % pairs.group
        state = states.address + i * states.stride
        total = read_f32(state + 4 * head_dim + 4)
        share = full(_ONE / total if total > _ZERO else _ZERO)
        for part in range(head_dim // 32):
            block = output.block + head * (head_dim // 32) + part
            at = state + 128 * part
            low, high = load(at) * share, load(at + 64) * share
            write_input(low, high, output.form, output.activations, row, output.rows, block, output.blocks)


@kernel
def begin_unit(state: np.ndarray, pairs: Pairs, queries: Queries, head: KVHead, scratch: Scratch) -> None:
    """Look up, and quantise, what all parts of a unit need."""
    write_table(state, pairs, queries, scratch.table)
    if head.bits == 8:
        quantize_queries(scratch, pairs.size, queries.head_dim)


@kernel
def attend_unit(
    pairs: Pairs,
    head: KVHead,
    head_dim: int,
    scratch: Scratch,
    partials: Partials,
    first: int,
    parts: int,
    number: int,
    output: Output,
) -> None:
    """Pairs over all their parts, of which `first` is the first; or over one of them, with a number 0 or larger.

    The thread whose part is complete last puts all of them together.
    """
    stride = state_bytes(head_dim)
    own, whole = States(scratch.part, stride), States(scratch.whole, stride)
    start, stop = first, first + parts
    if number >= 0:
        own = States(partials.address + number * stride, partials.most_parts * stride)
        start, stop = first + number, first + number + 1
    low, high = seen_by_any(scratch.table, 0, pairs.size)
    clear(whole, pairs.size, head_dim)
    for part in range(start, stop):
        clear(own, pairs.size, head_dim)
        begin, end = max(low, part * PART), min(high, (part + 1) * PART)
        for block in range(begin // BLOCK * BLOCK, end, BLOCK):
            pair = np.int64(0)
            while pair < pairs.size:
                left = pairs.size - pair
                if head.bits == 8:
                    size = tile_size(left)
                    attend_tile(scratch, own, pairs.sequence, head, head_dim, pair, size, block)
                else:
                    size = min(left, HEADS, pairs.group - (pairs.first + pair) % pairs.group)
                    attend_heads(scratch, own, pairs.sequence, head, head_dim, pair, size, block)
                pair += size
        if number < 0:
            fold_all(whole, own, pairs.size, head_dim)
    if number >= 0:
        if fetch_add(partials.counter, np.int64(1)) + 1 < parts:
            return
        write_i64(partials.counter, np.int64(0))
        for part in range(parts):
            fold_all(whole, States(partials.address + part * stride, own.stride), pairs.size, head_dim)
    write_out(pairs, head_dim, whole, output)


@kernel
def attend_all(
    pairs: Pairs, head: KVHead, head_dim: int, scratch: Scratch, first: int, parts: int, output: Output
) -> None:
    """`attend_unit` of pairs over all their parts."""
    attend_unit(pairs, head, head_dim, scratch, _ALONE, first, parts, np.int64(-1), output)
