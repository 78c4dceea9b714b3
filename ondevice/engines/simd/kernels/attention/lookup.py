"""Lookup attention, first step: choose the units of 32 positions that a row attends to, by codes of the keys.

For each unit and head, scores from table lookups (`key_codes`) give the largest score and the sum of exponentials
relative to it. From these follows, as far as the codes are right, each unit's share of the head's softmax weight. The
units with the largest shares, summed over the heads of a KV head, are chosen; `chosen` then attends to them.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from ondevice.engines.simd.kernels.attention.key_codes import CODES, SUMS, Codebook, look_up_tile
from ondevice.engines.simd.kernels.attention.scratch import sequence_of, source_row
from ondevice.engines.simd.kernels.contract import attention_memory
from ondevice.engines.simd.kernels.contract.attention_memory import SHARED_UNITS, SPAN, UNIT
from ondevice.engines.simd.kernels.contract.entries import LINE
from ondevice.engines.simd.kernels.contract.instruction_sets import LANES
from ondevice.engines.simd.kernels.contract.slots import (
    CACHES,
    LOOKUP_SCRATCH,
    LOOKUP_SCRATCH_STRIDE,
    SHARES,
    SHARES_STRIDE,
    STOP,
)
from ondevice.engines.simd.kernels.contract.steps import LookUp
from ondevice.engines.simd.kernels.isa.jit import read_step
from ondevice.engines.simd.kernels.isa.memory import (
    bits_float,
    claim,
    fetch_add,
    float_bits,
    read_f32,
    read_i64,
    write_f32,
    write_i64,
)
from ondevice.engines.simd.kernels.isa.vector import (
    count_at_least,
    exp,
    fma,
    full,
    load,
    max_lanes,
    maximum,
    round_even,
    store,
    store_rounded_int8,
    sum_lanes,
    where_at_least,
)
from ondevice.native.functions import kernel

NEAR_BYTES = 1 << 15
"""Most bytes of tables that are read together, so that they stay in the nearest cache."""

_ZERO, _ONE, _MOST = np.float32(0.0), np.float32(1.0), np.float32(255.0)
_LOWEST, _LEAST = np.float32(-1e30), np.float32(1e-30)


class Tables(NamedTuple):
    """The tables of some heads.

    address : address of uint8[heads, codes, 16]
    scales : address of float32[2, heads]: score = scale * (sum of table entries) + constant, for each head
    heads : number of heads
    codes : number of sub-quantisers
    """

    address: int
    scales: int
    heads: int
    codes: int


class Codes(NamedTuple):
    """The codes of a KV head's keys: see `key_codes.encode`.

    address : address of the first span
    stride : bytes from a span to the next
    """

    address: int
    stride: int


class Scores(NamedTuple):
    """The largest score of every unit, and the sum of exponentials relative to it, for each head.

    address : address of float32[heads, spans, 2, 16]
    stride : bytes to the next head's
    """

    address: int
    stride: int


class Budget(NamedTuple):
    """The number of units to choose.

    least, most : bounds of the number
    share : share of all heads' weights that the chosen units must have, if `most` allows it
    """

    least: int
    most: int
    share: float


@kernel
def make_tables(query: int, codebook: Codebook, products: int, tables: Tables) -> None:
    """Write the products of queries with all centroids as tables of bytes.

    All tables of a head have one scale, because their entries are summed. A table's smallest product becomes 0. What is
    subtracted for that is the same for all keys, so a softmax over looked-up scores alone does not change.

    Args:
        query: address of the first head's query, float32[heads, codes * width].
        codebook: the codebook of the KV head.
        products: address of working memory, float32[codes, 16].
        tables: the tables to write.
    """
    codes, width = codebook.codes, codebook.width
    for head in range(tables.heads):
        widest, constant = full(_LEAST), _ZERO
        x = query + 4 * head * codes * width
        for code in range(codes):
            at = codebook.address + code * (width + 1) * 64
            product = full(_ZERO)
            for i in range(width):
                product = fma(full(read_f32(x + 4 * (code * width + i))), load(at + 64 * i), product)
            least = max_lanes(full(_ZERO) - product)
            product, constant = product + full(least), constant - least
            widest = maximum(widest, product)
            store(products + 64 * code, product)
        largest = max_lanes(widest)
        inverse, to = full(_MOST / largest), tables.address + head * codes * LANES
        for code in range(codes):
            store_rounded_int8(to + LANES * code, round_even(load(products + 64 * code) * inverse))
        write_f32(tables.scales + 4 * head, largest / _MOST)
        write_f32(tables.scales + 4 * (tables.heads + head), constant)


@kernel
def look_up(heads: int, codes: int, stride: int, tables: Tables, first: int, out: int) -> None:
    """`look_up_tile` for 1, 2, 4 or 8 heads from head `first` on."""
    tiles, table_bytes = tables.codes // CODES, tables.codes * LANES
    at, scales = tables.address + first * table_bytes, tables.scales + 4 * first
    if heads == 8:
        look_up_tile(8, codes, stride, tiles, at, table_bytes, scales, out)
    elif heads == 4:
        look_up_tile(4, codes, stride, tiles, at, table_bytes, scales, out)
    elif heads == 2:
        look_up_tile(2, codes, stride, tiles, at, table_bytes, scales, out)
    else:
        look_up_tile(1, codes, stride, tiles, at, table_bytes, scales, out)


@kernel
def together(tables: Tables, first: int) -> Any:
    """The number of heads from `first` on that are looked up together: a power of two."""
    heads = SUMS
    while heads > 1 and (heads > tables.heads - first or heads * tables.codes * LANES > NEAR_BYTES):
        heads //= 2
    return heads


@kernel
def scan(tables: Tables, codes: Codes, start: int, stop: int, sums: int, scores: Scores) -> None:
    """Write the scores of the units of spans start..stop - 1.

    Args:
        tables: tables of the heads.
        codes: codes of the keys.
        start, stop: spans.
        sums: address of working memory, float32[UNIT, SUMS, 16].
        scores: the scores to write.
    """
    key_bytes = tables.codes // 2
    first = 0
    while first < tables.heads:
        heads = together(tables, first)
        vectors = SUMS // heads
        for span in range(start, stop):
            at = codes.address + span * codes.stride
            for part in range(UNIT // vectors):
                vector = part * vectors
                look_up(
                    heads, at + vector * LANES * key_bytes, LANES * key_bytes, tables, first, sums + vector * heads * 64
                )
            for head in range(heads):
                own = sums + head * vectors * 64
                largest = full(_LOWEST)
                for vector in range(UNIT):
                    largest = maximum(largest, load(own + (vector // vectors * SUMS + vector % vectors) * 64))
                total = full(_ZERO)
                for vector in range(UNIT):
                    total = total + exp(load(own + (vector // vectors * SUMS + vector % vectors) * 64) - largest)
                to = scores.address + (first + head) * scores.stride + span * 128
                store(to, largest)
                store(to + 64, total)
        first += heads


@kernel
def leave_out(scores: Scores, heads: int, start: int, stop: int) -> None:
    """Set the scores of units start..stop - 1 to those of no positions."""
    for head in range(heads):
        for unit in range(start, stop):
            at = scores.address + head * scores.stride + unit // LANES * 128 + unit % LANES * 4
            write_f32(at, _LOWEST)
            write_f32(at + 64, _ZERO)


@kernel
def weigh(scores: Scores, heads: int, spans: int, shares: int) -> None:
    """shares = every unit's share of a head's softmax weight, summed over the heads, float32[spans, 16].

    The sum of all shares is `heads`.
    """
    for i in range(0, 64 * spans, 64):
        store(shares + i, full(_ZERO))
    for head in range(heads):
        own = scores.address + head * scores.stride
        largest = full(_LOWEST)
        for span in range(spans):
            largest = maximum(largest, load(own + 128 * span))
        peak, total = full(max_lanes(largest)), full(_ZERO)
        for span in range(spans):
            weight = exp(load(own + 128 * span) - peak) * load(own + 128 * span + 64)
            store(own + 128 * span, weight)
            total = total + weight
        factor = full(_ONE / sum_lanes(total))
        for span in range(spans):
            store(shares + 64 * span, fma(load(own + 128 * span), factor, load(shares + 64 * span)))


@kernel
def count_of(shares: int, spans: int, least: float) -> Any:
    """The number of units whose share is at least `least`."""
    count = 0
    for i in range(0, 64 * spans, 64):
        count += count_at_least(load(shares + i), full(least))
    return count


@kernel
def share_of(shares: int, spans: int, least: float) -> Any:
    """The sum of the shares that are at least `least`."""
    total = full(_ZERO)
    for i in range(0, 64 * spans, 64):
        total = total + where_at_least(load(shares + i), full(least))
    return sum_lanes(total)


@kernel
def share_of_best(shares: int, spans: int, count: int) -> Any:
    """The largest share that at least `count` units reach."""
    low, high = np.int64(0), np.int64(0x7F000000)  # a binary search over bits: positive floats are ordered like them
    while high - low > 1:
        middle = (low + high) // 2
        if count_of(shares, spans, bits_float(np.int32(middle))) >= count:
            low = middle
        else:
            high = middle
    return bits_float(np.int32(low))


@kernel
def count_for(shares: int, spans: int, wanted: float) -> Any:
    """The smallest number of best units whose shares add up to `wanted`."""
    low, high = np.int64(0), np.int64(0x7F000000)
    while high - low > 1:
        middle = (low + high) // 2
        if share_of(shares, spans, bits_float(np.int32(middle))) >= wanted:
            low = middle
        else:
            high = middle
    return count_of(shares, spans, bits_float(np.int32(low)))


@kernel
def choose(shares: int, heads: int, start: int, stop: int, budget: Budget, out: int) -> Any:
    """Write the numbers of the best of units start..stop - 1, int64, ascending; of equal shares, lower numbers win.

    Shares of NaN are never chosen. If more shares are infinite than fit, the first of them are chosen.

    Returns:
        The number of units: at most budget.most, and no more than there are.
    """
    spans = (stop + LANES - 1) // LANES
    count = budget.most
    if budget.least < count:
        wanted = np.float32(budget.share) * np.float32(heads)
        count = min(max(count_for(shares, spans, wanted), budget.least), count)
    count = min(count, stop - start)
    least = share_of_best(shares, spans, count)
    above = bits_float(np.int32(float_bits(least) + 1))
    equal = count - count_of(shares, spans, above)
    found = 0
    for unit in range(start, stop):
        share = read_f32(shares + 4 * unit)
        if found < count and (share >= above or (share == least and equal > 0)):
            if share == least:
                equal -= 1
            write_i64(out + 8 * found, np.int64(unit))
            found += 1
    return found


# The step

FIRST = 1
"""Units at the beginning of a sequence that are always attended to: attention sinks."""

_ONE_ITEM, _ALL_UNITS = np.int64(1), np.int64(-1)


workspace_at = kernel(attention_memory.workspace_at)


@kernel
def look_up_share(words: np.ndarray, state: np.ndarray, thread: int, threads: int, claims: int) -> None:
    """The step `LookUp`: chosen = the units with the largest shares, for every row and KV head.

    All heads of a KV head attend to the same units, so that each key that is read serves all of them, and 8 queries
    fill a tile whatever other rows choose. Threads claim a row's KV head, or with few rows a part of its keys; the
    thread that completes the last part chooses.
    """
    step = read_step(LookUp, words)
    row_set, query_heads, kv_heads, size = step.row_set, step.query_heads, step.kv_heads, step.size
    group, codes = query_heads // kv_heads, size // step.width
    work = workspace_at(state[LOOKUP_SCRATCH] + thread * state[LOOKUP_SCRATCH_STRIDE], group, codes)
    budget = Budget(step.least, step.most, _ONE - bits_float(np.int32(step.left)))
    units = state[row_set] * kv_heads
    parts = threads if units < SHARED_UNITS * threads else 1
    item = claim(claims, _ONE_ITEM)
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
                write_i64(chosen, _ALL_UNITS)
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
            if parts == 1 or fetch_add(area, _ONE_ITEM) == parts - 1:
                write_i64(area, np.int64(0))
                leave_out(scores, group, 0, FIRST)
                leave_out(scores, group, end, spans * LANES)
                weigh(scores, group, spans, area + LINE)
                write_i64(chosen, np.int64(choose(area + LINE, group, FIRST, end, budget, chosen + 8)))
        item = claim(claims, _ONE_ITEM)
