"""The step that looks keys up: a thread's share of it."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ondevice.engines.simd.kernels.attention_layouts import LookUp
from ondevice.engines.simd.kernels.attention_rows import sequence_of, source_row
from ondevice.engines.simd.kernels.integer_tile import UNIT
from ondevice.engines.simd.kernels.jit import kernel
from ondevice.engines.simd.kernels.key_codes import SPAN, Codebook
from ondevice.engines.simd.kernels.lookup import (
    LANES,
    Budget,
    Codes,
    Scores,
    Tables,
    choose,
    leave_out,
    make_tables,
    scan,
    weigh,
)
from ondevice.engines.simd.kernels.lookup_tile import SUMS
from ondevice.engines.simd.kernels.memory import bits_float, fetch_add, read_i64, write_i64
from ondevice.engines.simd.kernels.shares import claim
from ondevice.engines.simd.kernels.slots import (
    CACHES,
    LOOK_UP,
    LOOK_UP_STRIDE,
    SHARES,
    SHARES_STRIDE,
    STOP,
)
from ondevice.engines.simd.kernels.step_layouts import read_step

SHARED_UNITS = 4
"""Rows' KV heads for each thread: with fewer, threads share the keys of each, and with more they take one each."""
FIRST = 1
"""Units at the beginning of a sequence that are always attended to: much of the weight that means nothing is there."""
LINE = 64

_ONE, _ALL = np.int64(1), np.int64(-1)
_WHOLE = np.float32(1.0)


class Workspace(NamedTuple):
    """Where a thread makes tables and sums: addresses, see `lookup`."""

    tables: int
    scales: int
    products: int
    sums: int

    end: int


@kernel
def workspace_at(address: int, heads: int, codes: int) -> Workspace:
    """The parts of a thread's workspace, for heads of one KV head; with address 0, `end` is the size that it needs."""
    scales = address + heads * codes * LANES
    products = scales + LINE * heads
    sums = products + 64 * codes
    return Workspace(address, scales, products, sums, sums + UNIT * SUMS * 64)


def shares_bytes(heads: int, keys: int) -> int:
    """Bytes for what codes say of so many keys: a counter of threads, shares, and scores of every head."""
    spans = (keys + SPAN - 1) // SPAN
    return LINE + spans * (64 + 128 * heads)


@kernel
def look_up_share(words: np.ndarray, state: np.ndarray, thread: int, threads: int, claims: int) -> None:
    """chosen = the units with the largest shares of the weights of the heads that share a KV head, for every row.

    All heads of a KV head attend to the same units: so each key that is read serves all of them, and 8 queries are a
    whole tile, whatever other rows choose. Threads claim a row's KV head, or a part of its keys where rows are few; the
    last one to have looked chooses.
    """
    step = read_step(LookUp, words)
    row_set, query_heads, kv_heads, size = step.row_set, step.query_heads, step.kv_heads, step.size
    group, codes = query_heads // kv_heads, size // step.width
    work = workspace_at(state[LOOK_UP] + thread * state[LOOK_UP_STRIDE], group, codes)
    budget = Budget(step.least, step.most, _WHOLE - bits_float(np.int32(step.left)))
    units = state[row_set] * kv_heads
    parts = threads if units < SHARED_UNITS * threads else 1
    item = claim(claims, _ONE)
    while item < units * parts:
        unit, part = item // parts, item % parts
        row, head = unit // kv_heads, unit % kv_heads
        record = sequence_of(state, row_set, row)
        stop = read_i64(state[STOP] + 8 * source_row(state, row_set, row))
        end = (stop - step.window) // UNIT
        book = read_i64(record + 8 * (CACHES + step.codes + 1))
        chosen = step.chosen + 8 * (1 + step.most) * unit
        if not book or stop < step.begin or end - FIRST <= step.least:
            if part == 0:
                write_i64(chosen, _ALL)
        else:
            place = unit if parts > 1 else thread
            area = state[SHARES] + place * state[SHARES_STRIDE]
            spans = (end + LANES - 1) // LANES
            scores = Scores(area + LINE + 64 * spans, 128 * spans)
            book += head * codes * (step.width + 1) * 64
            key_codes = SPAN * codes // 2
            keys = Codes(read_i64(record + 8 * (CACHES + step.codes)) + head * key_codes, kv_heads * key_codes)
            tables = Tables(work.tables, work.scales, group, codes)
            begin, until = spans * part // parts, spans * (part + 1) // parts
            if begin < until:
                make_tables(
                    step.x + row * step.stride + 4 * head * group * size,
                    Codebook(book, codes, step.width),
                    work.products,
                    tables,
                )
                scan(tables, keys, begin, until, work.sums, scores)
            if parts == 1 or fetch_add(area, _ONE) == parts - 1:
                write_i64(area, np.int64(0))
                leave_out(scores, group, 0, FIRST)
                leave_out(scores, group, end, spans * LANES)
                weigh(scores, group, spans, area + LINE)
                write_i64(chosen, np.int64(choose(area + LINE, group, FIRST, end, budget, chosen + 8)))
        item = claim(claims, _ONE)
