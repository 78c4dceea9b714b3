"""Which units of keys a row's heads attend to, told by table lookups over the keys' codes.

For every unit of 32 positions and every head: the largest score, and the sum of exponentials beside it. So what a
unit's share of a head's softmax would be is known, as far as codes tell, and units are chosen by their share.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from ondevice.engines.simd.kernels.functions import exp
from ondevice.engines.simd.kernels.integer_tile import UNIT
from ondevice.engines.simd.kernels.jit import kernel
from ondevice.engines.simd.kernels.key_codes import Codebook
from ondevice.engines.simd.kernels.lookup_tile import CODES, SUMS, look_up_tile
from ondevice.engines.simd.kernels.memory import (
    bits_float,
    float_bits,
    read_f32,
    write_f32,
    write_i64,
)
from ondevice.engines.simd.kernels.vector import (
    count_at_least,
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

NEAR_BYTES = 1 << 15
"""Tables that are read together: they stay in the nearest cache."""
LANES = 16

_ZERO, _ONE, _MOST = np.float32(0.0), np.float32(1.0), np.float32(255.0)
_LOWEST, _LEAST = np.float32(-1e30), np.float32(1e-30)


class Tables(NamedTuple):
    """The tables of some heads: uint8[heads, codes, 16], and a scale for each head."""

    address: int
    scales: int
    """Address of float32[2, heads], the scales, and what is added to a head's sums of bytes, scaled, for its scores."""
    heads: int
    codes: int


class Codes(NamedTuple):
    """The codes of a KV head's keys: see `key_codes.encode`."""

    address: int
    stride: int
    """Bytes from a span to the next."""


class Scores(NamedTuple):
    """What the codes say of every unit, for each head: float32[heads, spans, 2, 16], largest scores and sums."""

    address: int
    stride: int
    """Bytes to the next head's."""


class Budget(NamedTuple):
    """How many units are chosen."""

    least: int
    most: int
    share: float
    """Of all heads' weights; so much at least, where `most` allows it."""


@kernel
def make_tables(query: int, codebook: Codebook, products: int, tables: Tables) -> None:
    """The products of float32[heads, codes * width] with all centroids, as bytes.

    Sums of bytes mean something only if all of a head's have one scale. A table's least product is its zero: it is the
    same for all keys, and the softmax does not see it.

    Args:
        query: address of the first head's.
        codebook: of the KV head.
        products: address of working memory, float32[codes, 16].
        tables: that are written.
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
    """`look_up_tile` with some heads from `first` on."""
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
    """How many heads from `first` on are looked up together: a power of two."""
    heads = SUMS
    while heads > 1 and (heads > tables.heads - first or heads * tables.codes * LANES > NEAR_BYTES):
        heads //= 2
    return heads


@kernel
def scan(tables: Tables, codes: Codes, start: int, stop: int, sums: int, scores: Scores) -> None:
    """What the codes of spans start..stop - 1 say of their units.

    Args:
        tables: of the heads.
        codes: of the keys.
        start, stop: spans.
        sums: address of working memory, float32[UNIT, SUMS, 16].
        scores: that are written.
    """
    key_bytes = tables.codes // 2
    first = 0
    while first < tables.heads:
        heads = together(tables, first)
        vectors = SUMS // heads
        for span in range(start, stop):
            at = codes.address + span * codes.stride
            for vector in range(0, UNIT, vectors):
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
    """Forget what was said of units start..stop - 1."""
    for head in range(heads):
        for unit in range(start, stop):
            at = scores.address + head * scores.stride + unit // LANES * 128 + unit % LANES * 4
            write_f32(at, _LOWEST)
            write_f32(at + 64, _ZERO)


@kernel
def weigh(scores: Scores, heads: int, spans: int, shares: int) -> None:
    """Every unit's share of the heads' weights, float32[spans, 16]; all of them are `heads`."""
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
    """How many units have at least this share."""
    count = 0
    for i in range(0, 64 * spans, 64):
        count += count_at_least(load(shares + i), full(least))
    return count


@kernel
def share_of(shares: int, spans: int, least: float) -> Any:
    """The shares of all units that have at least this one."""
    total = full(_ZERO)
    for i in range(0, 64 * spans, 64):
        total = total + where_at_least(load(shares + i), full(least))
    return sum_lanes(total)


@kernel
def share_of_best(shares: int, spans: int, count: int) -> Any:
    """The largest share that `count` units have at least."""
    low, high = np.int64(0), np.int64(0x7F000000)  # in the order of their bits, as positive floats are
    while high - low > 1:
        middle = (low + high) // 2
        if count_of(shares, spans, bits_float(np.int32(middle))) >= count:
            low = middle
        else:
            high = middle
    return bits_float(np.int32(low))


@kernel
def count_for(shares: int, spans: int, wanted: float) -> Any:
    """The least number of best units that have `wanted` of the shares."""
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
    """Write the numbers of the best of units start..stop - 1, int64, in their order; the lower of equal ones wins.

    Returns:
        How many they are: budget.most at most, and no more than there are.
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
        if share >= above or (share == least and equal > 0):
            if share == least:
                equal -= 1
            write_i64(out + 8 * found, np.int64(unit))
            found += 1
    return found
