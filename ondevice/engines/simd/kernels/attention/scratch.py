"""The positions that a row sees, the working memory of attention, and softmax states.

A pair is a row and a query head. The pairs of a sequence and one KV head are numbered row by row: number = row in the
sequence * group + query head in the group, where a group is the query heads that share the KV head.

A softmax over many positions is computed part by part. A pair's state after some positions is float32[head_dim], the
sum of weighted values, then the largest score so far and the sum of weights; the weights are relative to that score.
States are combined in the order of positions, whichever thread computed them.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from ondevice.engines.simd.kernels.contract import attention_memory
from ondevice.engines.simd.kernels.contract.attention_memory import PAIR_WORDS, SCORE_BLOCK, SCORE_BYTES, TAIL, Scratch
from ondevice.engines.simd.kernels.contract.slots import (
    ALL,
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
from ondevice.engines.simd.kernels.isa.memory import read_f32, read_i64, write_f32, write_i64
from ondevice.engines.simd.kernels.isa.vector import exp, fma, full, load, max_lanes, maximum, store
from ondevice.native.functions import kernel

scratch_at = kernel(attention_memory.scratch_at)
state_bytes = kernel(attention_memory.state_bytes)


NOWHERE = 1 << 62
"""The start of a sequence's tail, the pending rows of a tree, if it has none."""


class Sequence(NamedTuple):
    """The fields of a sequence's record that one kind of attention needs, for the row set ALL: see `contract.slots`."""

    first_row: int
    length: int
    rows: int
    paths: int
    path_width: int
    base: int


class Pairs(NamedTuple):
    """Some neighbouring pairs of a sequence and a KV head.

    kind : kind of attention, 0 full, 1 sliding
    row_set : ALL or WANTED
    first_row : index of the sequence's first row in the row set
    group : number of query heads that share the KV head
    first : number of the first pair
    size : number of pairs, 1..MAX_PAIRS where they are computed
    """

    sequence: Sequence
    kind: int
    row_set: int
    first_row: int
    group: int
    first: int
    size: int


class Queries(NamedTuple):
    """The queries of a row set in the query heads of one KV head: float32[group, head_dim] per row.

    address : address of the first row's queries
    stride : bytes to the next row's
    """

    address: int
    stride: int
    head_dim: int


class KVHead(NamedTuple):
    """The keys and values of one KV head in a sequence's cache.

    bits : bits of a number: 16, or 8 with scales
    keys, values : address of the head's part of the first unit of the cache
    stride : bytes to the next unit
    softcap : of the scores of its keys; 0 for none
    """

    bits: int
    keys: int
    values: int
    stride: int
    softcap: float


@kernel
def sequence_of(state: np.ndarray, row_set: int, row: int) -> Any:
    """The address of the record of the sequence to which row `row` of a row set belongs."""
    at = state[SEQUENCES]
    record = read_i64(at)
    while row >= read_i64(record + 8 * (FIRST_ROW + row_set)) + read_i64(record + 8 * (ROW_COUNT + row_set)):
        at += 8
        record = read_i64(at)
    return record


@kernel
def source_row(state: np.ndarray, row_set: int, row: int) -> Any:
    """The index among all new rows of row `row` of a row set."""
    if row_set == WANTED:
        return read_i64(state[WANTED_ROWS] + 8 * row)
    return row


@kernel
def score_row(scratch: Scratch, pair: int) -> Any:
    """Address of the scores of pair `pair` of a tile, float32[SCORE_BLOCK]."""
    return scratch.scores + pair * SCORE_BYTES


@kernel
def score_stride() -> Any:
    """Bytes from a pair's scores to the next pair's."""
    return np.int64(SCORE_BYTES)


@kernel
def read_sequence(record: int, kind: int) -> Any:
    """The part of a sequence's record that attention of one kind needs."""
    return Sequence(
        read_i64(record + 8 * (FIRST_ROW + ALL)),
        read_i64(record + 8 * LENGTH),
        read_i64(record + 8 * (ROW_COUNT + ALL)),
        read_i64(record + 8 * PATHS),
        read_i64(record + 8 * PATH_WIDTH),
        read_i64(record + 8 * (BASE + kind)),
    )


@kernel
def row_range(state: np.ndarray, row_set: int, kind: int, row: int) -> Any:
    """The positions (start, stop) that row `row` of a row set sees: start..stop - 1.

    Rows that see each other in sliding layers see later positions than their own, but no earlier ones for that.
    """
    place = 8 * source_row(state, row_set, row)
    return max(0, read_i64(state[STOP] + place) - state[WINDOW + kind]), read_i64(state[STOP + kind] + place)


@kernel
def write_table(state: np.ndarray, pairs: Pairs, queries: Queries, table: int) -> None:
    """Write the table of some pairs: the positions that each sees, its path, its query."""
    sequence = pairs.sequence
    for i in range(pairs.size):
        number = pairs.first + i
        row, head = pairs.first_row + number // pairs.group, number % pairs.group
        first, stop = row_range(state, pairs.row_set, pairs.kind, row)
        own = source_row(state, pairs.row_set, row) - sequence.first_row
        at = table + 8 * PAIR_WORDS * i
        write_i64(at, np.int64(first))
        write_i64(at + 8, np.int64(stop))
        write_i64(at + 16, np.int64(sequence.paths + 8 * own * sequence.path_width if sequence.paths else 0))
        write_i64(at + 24, np.int64(queries.address + row * queries.stride + 4 * head * queries.head_dim))


@kernel
def seen(table: int, pair: int) -> Any:
    """The positions (start, stop) that a pair sees, from the table."""
    at = table + 8 * PAIR_WORDS * pair
    return read_i64(at), read_i64(at + 8)


@kernel
def see(table: int, pairs: int, begin: int, end: int) -> None:
    """Set the positions that pairs see to begin..end - 1."""
    for at in range(table, table + 8 * PAIR_WORDS * pairs, 8 * PAIR_WORDS):
        write_i64(at, np.int64(begin))
        write_i64(at + 8, np.int64(end))


@kernel
def seen_by_any(table: int, first: int, count: int) -> Any:
    """The smallest range (start, stop) with all positions that some pairs see."""
    begin, end = seen(table, first)
    for pair in range(first + 1, first + count):
        low, high = seen(table, pair)
        begin, end = min(begin, low), max(end, high)
    return begin, end


@kernel
def query_of(table: int, pair: int) -> Any:
    """The address of a pair's query."""
    return read_i64(table + 8 * PAIR_WORDS * pair + 24)


@kernel
def cache_row(sequence: Sequence, table: int, pair: int, position: int) -> Any:
    """The row of the cache that holds `position` for a pair: in a tree, that of its ancestor at this position."""
    depth = position - sequence.length
    path = read_i64(table + 8 * PAIR_WORDS * pair + 16)
    if depth >= 0 and path:
        position = sequence.length + read_i64(path + 8 * depth)
    return position - sequence.base


@kernel
def order_tail(scratch: Scratch, sequence: Sequence, pair: int, member: int, tail: int, start: int, stop: int) -> None:
    """Put the scores of positions start..stop - 1, none before `tail`, from cache order into that of a pair's path.

    `member` is the pair's number in its tile.
    """
    scores, found = score_row(scratch, member), scratch.tail_scores + 4 * TAIL * member
    for position in range(start, stop):
        place = cache_row(sequence, scratch.table, pair, position) + sequence.base - tail
        write_f32(scores + 4 * (position % SCORE_BLOCK), read_f32(found + 4 * place))


# Softmax states

_ZERO, _ONE = np.float32(0.0), np.float32(1.0)
_LOWEST = np.float32(-1e30)


class States(NamedTuple):
    """The states of some pairs.

    address : address of the first pair's state
    stride : bytes to the next pair's
    """

    address: int
    stride: int


@kernel
def clear(states: States, pairs: int, head_dim: int) -> None:
    """Set states to those of no positions."""
    for pair in range(pairs):
        state = states.address + pair * states.stride
        for at in range(0, 4 * head_dim, 64):
            store(state + at, full(_ZERO))
        write_f32(state + 4 * head_dim, _LOWEST)
        write_f32(state + 4 * head_dim + 4, _ZERO)


FLOOR = np.float32(-60.0)
"""Scores are clamped to this distance below the largest one: 1e-26 is nothing beside a weight of 1, but sums of smaller
weights would be denormal, and arithmetic on denormals takes a hundred cycles. It was a third of a prefill of 512 rows
where scores spread that far (E2B's shape, random weights)."""


@kernel
def weight_of(distance: Any) -> Any:
    """The weights of 16 scores at this distance from the largest one, 0 or less."""
    return exp(maximum(distance, full(FLOOR)))


@kernel
def power(x: float) -> Any:
    """e**x of a float32, with the bits of `weight_of`."""
    return max_lanes(weight_of(full(x)))


@kernel
def raise_peak(states: States, pair: int, head_dim: int, score: float) -> Any:
    """Make the weights of a state relative to `score` if this is larger than its largest score; returns the largest."""
    state = states.address + pair * states.stride
    peak = read_f32(state + 4 * head_dim)
    if not score > peak:
        return peak
    total = read_f32(state + 4 * head_dim + 4)
    if total > _ZERO:
        factor = power(peak - score)
        for at in range(0, 4 * head_dim, 64):
            store(state + at, load(state + at) * full(factor))
        write_f32(state + 4 * head_dim + 4, total * factor)
    write_f32(state + 4 * head_dim, score)
    return score


@kernel
def fold(state: int, part: int, head_dim: int) -> None:
    """Add the positions of the state `part` after those of the state `state`."""
    added = read_f32(part + 4 * head_dim + 4)
    if added == _ZERO:  # NaN is added
        return
    total, peak = read_f32(state + 4 * head_dim + 4), read_f32(state + 4 * head_dim)
    largest = read_f32(part + 4 * head_dim)
    own, other = _ONE, _ONE
    if not total > _ZERO:
        own, peak = _ZERO, largest
    elif largest > peak:
        own, peak = power(peak - largest), largest
    else:
        other = power(largest - peak)
    for at in range(0, 4 * head_dim, 64):
        store(state + at, fma(load(part + at), full(other), load(state + at) * full(own)))
    write_f32(state + 4 * head_dim, peak)
    write_f32(state + 4 * head_dim + 4, total * own + added * other)


@kernel
def fold_all(states: States, parts: States, pairs: int, head_dim: int) -> None:
    """`fold` the parts of some pairs into their states."""
    for i in range(pairs):
        fold(states.address + i * states.stride, parts.address + i * parts.stride, head_dim)
