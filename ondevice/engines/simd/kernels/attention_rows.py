"""What a row of a forward sees of its sequence, and the working memory in which it attends.

A pair is a row and a query head. The pairs of a sequence and a KV head are numbered row by row.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from ondevice.engines.simd.kernels.integer_tile import MOST, UNIT
from ondevice.engines.simd.kernels.jit import kernel
from ondevice.engines.simd.kernels.memory import read_i64, write_i64
from ondevice.engines.simd.kernels.slots import (
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

PAIRS = 64
"""Pairs that are worked on together: all of them read what lies in a nearer cache."""
BLOCK = 256
"""Positions that are weighed together, from a multiple of BLOCK on: keys and values of a head of 512 numbers in fp16
are half a megabyte."""
MOST_NEW = 512
"""Rows of a forward at most."""

_WORDS = 4
"""Of a pair in the table: the first position that it sees, the one behind the last, its path, its queries."""
_SCORE_BYTES = 4 * BLOCK + 64
"""Of a pair's scores: less than a power of two, or all pairs' would lie in the same lines of the nearest cache."""
TAIL = MOST_NEW + UNIT
"""Positions of the units that may hold pending rows of a tree."""


class Sequence(NamedTuple):
    """What attention of one kind needs of a sequence's record: see `slots`."""

    first_row: int
    length: int
    rows: int
    """New rows in all."""
    paths: int
    path_width: int
    base: int


class Pairs(NamedTuple):
    """Some neighbouring pairs of a sequence and a KV head."""

    sequence: Sequence
    kind: int
    row_set: int
    first_row: int
    """The sequence's, in the row set."""
    group: int
    """Query heads that share the KV head."""
    first: int
    size: int
    """1..PAIRS."""


class Queries(NamedTuple):
    """The queries of the row set's rows in the query heads of one KV head: float32[group, head_dim] per row."""

    address: int
    """Of the set's first row's."""
    stride: int
    """Bytes to the next row's."""
    head_dim: int


class KVHead(NamedTuple):
    """The keys and values of one KV head in a sequence's cache."""

    bits: int
    """Of a number: 16, or 8 with scales."""
    keys: int
    """Address of the head's part of the cache's first row, or unit."""
    values: int
    stride: int
    """Bytes to the next row's, or unit's."""


class Scratch(NamedTuple):
    """Working memory of a thread, as addresses of its parts."""

    table: int
    """int64[PAIRS, _WORDS]."""
    codes: int
    """int8[PAIRS, head_dim], queries in tiles of some pairs: see `integer_tile.score_tile`."""
    starts: int
    """int32[PAIRS]."""
    query_scales: int
    """float32[PAIRS]."""
    scores: int
    """[MOST] times _SCORE_BYTES."""
    weights: int
    """int8[BLOCK / UNIT][tile's pairs][UNIT]."""
    weight_starts: int
    """int32[BLOCK / UNIT][tile's pairs]."""
    weight_scales: int
    """float32[BLOCK / UNIT][tile's pairs]."""
    tail_scores: int
    """float32[MOST, TAIL]."""
    tail_weights: int
    """int8[TAIL / UNIT][tile's pairs][UNIT]."""
    tail_scales: int
    """float32[UNIT], of values on a path."""
    part: int
    """States of PAIRS pairs."""
    whole: int
    """States of PAIRS pairs."""
    end: int


@kernel
def scratch_at(address: int, head_dim: int) -> Scratch:
    """The parts of a thread's memory; with address 0, `end` is the size that it needs."""
    table = address
    codes = table + 8 * _WORDS * PAIRS
    starts = codes + PAIRS * head_dim
    query_scales = starts + 4 * PAIRS
    scores = query_scales + 4 * PAIRS
    weights = scores + MOST * _SCORE_BYTES
    weight_starts = weights + MOST * BLOCK
    weight_scales = weight_starts + 4 * MOST * (BLOCK // UNIT)
    tail_scores = weight_scales + 4 * MOST * (BLOCK // UNIT)
    tail_weights = tail_scores + 4 * MOST * TAIL
    tail_scales = tail_weights + MOST * TAIL
    part = tail_scales + 4 * UNIT
    whole = part + PAIRS * state_bytes(head_dim)
    end = whole + PAIRS * state_bytes(head_dim)
    return Scratch(
        table, codes, starts, query_scales, scores, weights, weight_starts, weight_scales, tail_scores, tail_weights,
        tail_scales, part, whole, end,
    )  # fmt: skip


@kernel
def state_bytes(head_dim: int) -> Any:
    """Bytes of a pair's state: float32[head_dim], the sum of weighed values, then largest score and sum of weights."""
    return 4 * head_dim + 64


@kernel
def score_row(scratch: Scratch, pair: int) -> Any:
    """Address of the scores of the `pair`-th pair of a tile, float32[BLOCK]."""
    return scratch.scores + pair * _SCORE_BYTES


@kernel
def score_stride() -> Any:
    """Bytes from a pair's scores to the next pair's."""
    return np.int64(_SCORE_BYTES)


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
        read_i64(record + 8 * (FIRST_ROW + ALL)),
        read_i64(record + 8 * LENGTH),
        read_i64(record + 8 * (ROW_COUNT + ALL)),
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
def row_range(state: np.ndarray, row_set: int, kind: int, row: int) -> Any:
    """The first position that the `row`-th row of a set sees, and the one behind the last."""
    stop = read_i64(state[STOP] + 8 * source_row(state, row_set, row))
    return max(0, stop - state[WINDOW + kind]), stop


@kernel
def write_table(state: np.ndarray, pairs: Pairs, queries: Queries, table: int) -> None:
    """What is looked up of each pair again and again."""
    sequence = pairs.sequence
    for i in range(pairs.size):
        number = pairs.first + i
        row, head = pairs.first_row + number // pairs.group, number % pairs.group
        first, stop = row_range(state, pairs.row_set, pairs.kind, row)
        own = source_row(state, pairs.row_set, row) - sequence.first_row
        at = table + 8 * _WORDS * i
        write_i64(at, np.int64(first))
        write_i64(at + 8, np.int64(stop))
        write_i64(at + 16, np.int64(sequence.paths + 8 * own * sequence.path_width if sequence.paths else 0))
        write_i64(at + 24, np.int64(queries.address + row * queries.stride + 4 * head * queries.head_dim))


@kernel
def seen(table: int, pair: int) -> Any:
    """The first position that a pair sees, and the one behind the last."""
    at = table + 8 * _WORDS * pair
    return read_i64(at), read_i64(at + 8)


@kernel
def see(table: int, pairs: int, begin: int, end: int) -> None:
    """Let pairs see the positions begin..end - 1 alone."""
    for at in range(table, table + 8 * _WORDS * pairs, 8 * _WORDS):
        write_i64(at, np.int64(begin))
        write_i64(at + 8, np.int64(end))


@kernel
def seen_by_any(table: int, first: int, count: int) -> Any:
    """The first position that one of some pairs sees, and the one behind the last."""
    begin, end = seen(table, first)
    for pair in range(first + 1, first + count):
        low, high = seen(table, pair)
        begin, end = min(begin, low), max(end, high)
    return begin, end


@kernel
def query_of(table: int, pair: int) -> Any:
    """The address of a pair's query."""
    return read_i64(table + 8 * _WORDS * pair + 24)


@kernel
def cache_row(sequence: Sequence, table: int, pair: int, position: int) -> Any:
    """The row of its sequence's cache in which a pair finds `position`."""
    depth = position - sequence.length
    path = read_i64(table + 8 * _WORDS * pair + 16)
    if depth >= 0 and path:
        position = sequence.length + read_i64(path + 8 * depth)
    return position - sequence.base
