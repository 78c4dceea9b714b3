"""The layout of an fp16 cache, and its two products in float32: queries with keys, and weights with values.

A unit of the cache holds UNIT positions of a KV head, from a multiple of UNIT on, in 2 * UNIT * head_dim bytes:

    keys     fp16[head_dim][32 keys]
    values   fp16[head_dim / 32][32 positions][32 numbers]

So both products read memory line by line, and a score is one lane's sum. When a key was a row, a score had 16 sums;
adding them up, and a tile that only the heads of one row could share, made a verification of 5 rows after 1,500 tokens
take 1.6 times as long (SmolLM2-135M, two cores of a Xeon with AVX-512).

A tile is as large as the registers allow, so that what is loaded and widened to float32 is used by several FMAs. Its
size changes no bit: a score adds the products of a head's numbers in their order, an output number adds value after
value.

While a unit is read, the next one is prefetched into level 2. Level 1 can wait for fewer lines than a unit has: with
prefetches into it a thread read keys of 64 numbers at 10 GB/s in place of 15, and forwards of one row after 1,024 and
7,900 tokens took 1.10 and 1.25 to 1.33 times as long (SmolLM2-135M, two cores of an AMD Zen 4).
"""

from __future__ import annotations

from functools import partial
from typing import Any

from llvmlite import ir
from numba import types

from ondevice.engines.simd.kernels.contract.attention_memory import SCORE_BYTES, UNIT
from ondevice.engines.simd.kernels.contract.instruction_sets import LANES, instruction_set
from ondevice.engines.simd.kernels.isa.dot import Vectors, accumulate, emit_cases, keep_order
from ondevice.engines.simd.kernels.isa.jit import emits
from ondevice.engines.simd.kernels.isa.memory import read_i16, read_i64, write_i16, write_i64
from ondevice.engines.simd.kernels.isa.vector import (
    F32,
    I16,
    I32,
    I64,
    L2,
    VF32,
    constant,
    element,
    fused,
    load,
    pointer_to,
    prefetch,
    read,
    splat,
    store_half,
    widen_half,
)
from ondevice.native.functions import kernel

_ISA = instruction_set()
_LANES = _ISA.lanes
_FLOATS, _HALVES = ir.VectorType(F32, _LANES), ir.VectorType(I16, _LANES)
SUMS, TILE_PAIRS = {16: (24, 12), 8: (12, 6), 4: (16, 4)}[_LANES]
"""Most vectors of sums in registers at a time, of the 32 of AVX-512 and ARM or the 16 of AVX2; and most pairs of row
and head in a tile.

There is code for each number of pairs. While three pairs were computed as four, and six as eight, attention took 1.2
times as long with one row and with two (SmolLM2, which has three heads for a KV head, after 512 tokens, AMD Zen 3).
"""
LINE_BYTES = 2 * UNIT
"""Bytes of a line: a number of 32 keys, or 32 numbers of a value."""


@emits(types.void, *[types.int64] * 7)
def score_tile(
    builder: Any, pairs: Any, keys: Any, ahead: Any, queries: Any, head_dim: Any, out: Any, stride: Any
) -> None:
    """out[i, j] = q[i] . k[j] for the 32 keys of a unit.

    Args:
        pairs: number of queries, 1..TILE_PAIRS.
        keys: address of the unit.
        ahead: distance in bytes to the keys that are prefetched.
        queries: address of float32[head_dim, pairs].
        head_dim: a multiple of 32.
        out: address of float32[pairs, 32].
        stride: bytes from a row of `out` to the next.
    """
    emit = partial(_score, builder, keys, ahead, queries, head_dim, out, stride)
    emit_cases(builder, pairs, range(1, TILE_PAIRS + 1), emit)


def _score(builder: Any, keys: Any, ahead: Any, queries: Any, head_dim: Any, out: Any, stride: Any, pairs: int) -> None:
    line_ahead = builder.add(keys, ahead)
    rows = [builder.add(out, builder.mul(stride, I64(pair))) for pair in range(pairs)]
    for vectors in _passes(pairs):

        def step(index: Any, sums: Vectors, vectors: range = vectors) -> Vectors:
            line, numbers = element(builder, keys, index, LINE_BYTES), element(builder, queries, index, 4 * pairs)
            if not vectors.start:
                prefetch(builder, element(builder, line_ahead, index, LINE_BYTES), level=L2)
            return _add_products(builder, _repeated(builder, numbers, pairs), line, vectors, sums)

        sums = accumulate(builder, head_dim, [constant(0.0, _FLOATS)] * (pairs * len(vectors)), step)
        for total, place in zip(sums, _places(builder, rows, vectors), strict=True):
            builder.store(total, place, align=4)


@emits(types.void, *[types.int64] * 7)
def mix_tile(
    builder: Any, pairs: Any, weights: Any, values: Any, ahead: Any, count: Any, out: Any, stride: Any
) -> None:
    """out[i] += sum over j of weight[i, j] * value[j], in the order of j, for 32 numbers of a value.

    Args:
        pairs: number of pairs, 1..TILE_PAIRS.
        weights: address of the first pair's float32[count]; SCORE_BYTES to the next pair's.
        values: address of these numbers of the first value; LINE_BYTES to the next value's.
        ahead: distance in bytes to the values that are prefetched.
        count: number of values, at least 1.
        out: address of the first pair's float32[32].
        stride: bytes to the next pair's.
    """
    emit = partial(_mix, builder, weights, values, ahead, count, out, stride)
    emit_cases(builder, pairs, range(1, TILE_PAIRS + 1), emit)


def _mix(builder: Any, weights: Any, values: Any, ahead: Any, count: Any, out: Any, stride: Any, pairs: int) -> None:
    line_ahead = builder.add(values, ahead)
    rows = [builder.add(out, builder.mul(stride, I64(pair))) for pair in range(pairs)]
    for vectors in _passes(pairs):
        places = _places(builder, rows, vectors)

        def step(index: Any, sums: Vectors, vectors: range = vectors) -> Vectors:
            line, own = element(builder, values, index, LINE_BYTES), element(builder, weights, index, 4)
            if not vectors.start:
                prefetch(builder, element(builder, line_ahead, index, LINE_BYTES), level=L2)
            w = [splat(builder, read(builder, own, F32, SCORE_BYTES * pair), _LANES) for pair in range(pairs)]
            return _add_products(builder, w, line, vectors, sums)

        sums = [builder.load(place, typ=_FLOATS, align=4) for place in places]
        for total, place in zip(accumulate(builder, count, sums, step), places, strict=True):
            builder.store(total, place, align=4)


def _passes(pairs: int) -> list[range]:
    """The vectors of a line, in passes over all lines: as many vectors at a time as have SUMS with each pair."""
    vectors = together = UNIT // _LANES
    while together * pairs > SUMS:
        together //= 2
    return [range(first, first + together) for first in range(0, vectors, together)]


def _places(builder: Any, rows: list[Any], vectors: range) -> list[Any]:
    """Pointers to some vectors of floats of each row, in the order of sums: vector by vector, each row by row."""
    return [pointer_to(builder, builder.add(row, I64(4 * _LANES * vector))) for vector in vectors for row in rows]


def _add_products(builder: Any, factors: Vectors, line: Any, vectors: range, sums: Vectors) -> Vectors:
    """Add the products of each factor, of a row, with some vectors of a line of fp16 to `sums`: see `_places`.

    The fewer ones, factors or vectors, stay in registers, and the others pass through one.
    """

    def widened(vector: int) -> Any:
        return widen_half(builder, read(builder, line, _HALVES, 2 * _LANES * vector, align=2))

    results, rows = list(sums), len(factors)
    if rows > len(vectors):
        numbers = [widened(vector) for vector in vectors]
        for row, factor in enumerate(factors):
            for at, number in zip(range(row, len(sums), rows), numbers, strict=True):
                results[at] = fused(builder, factor, number, sums[at])
        return results
    for first, vector in zip(range(0, len(sums), rows), vectors, strict=True):
        number, own = widened(vector), slice(first, first + rows)
        done = [fused(builder, factor, number, total) for factor, total in zip(factors, sums[own], strict=True)]
        # three pairs on AVX2: with a second vector of numbers, LLVM would move sums to the stack and back
        full = len(sums) == SUMS and _LANES == 8
        results[own] = keep_order(builder, done, loads=True) if full else done
    return results


@emits(types.void, *[types.int64] * 6)
def lay_four(builder: Any, a: Any, b: Any, c: Any, d: Any, out: Any, stride: Any) -> None:
    """out[i] = a[i], b[i], c[i], d[i] for 16 numbers of four rows.

    Args:
        a, b, c, d: addresses of float32[16].
        out: address of float32[16, 4].
        stride: bytes from a row of `out` to the next.
    """
    rows = [builder.load(pointer_to(builder, address), typ=VF32, align=4) for address in (a, b, c, d)]
    zipped = [n for i in range(16) for n in (i, 16 + i)]
    ab, cd = _shuffle(builder, rows[0], rows[1], zipped), _shuffle(builder, rows[2], rows[3], zipped)
    fours = _shuffle(builder, ab, cd, [n for i in range(0, 32, 2) for n in (i, i + 1, 32 + i, 33 + i)])
    for i in range(16):
        four = _shuffle(builder, fours, fours, list(range(4 * i, 4 * i + 4)))
        builder.store(four, element(builder, out, I64(i), stride), align=4)


def _repeated(builder: Any, pointer: Any, count: int) -> Vectors:
    """`count` float32, each repeated in all lanes of a vector.

    On x86 a load can repeat a number at no cost. On ARM an FMA can take one lane of a vector as its operand, so up to
    three numbers more are read.
    """
    if not _ISA.by_lane:
        return [splat(builder, read(builder, pointer, F32, 4 * i), _LANES) for i in range(count)]
    fours = [read(builder, pointer, ir.VectorType(F32, 4), 16 * i) for i in range(-(-count // 4))]
    return [_shuffle(builder, four, four, [lane] * _LANES) for four in fours for lane in range(4)][:count]


def _shuffle(builder: Any, a: Any, b: Any, lanes: list[int]) -> Any:
    return builder.shuffle_vector(a, b, ir.Constant(ir.VectorType(I32, len(lanes)), lanes))


# Single rows of a unit


@kernel
def to_half(x: int, out: int, count: int) -> None:
    """Round `count` floats to fp16, a multiple of 16; `out` may be `x`."""
    for i in range(0, count, LANES):
        store_half(out + 2 * i, load(x + 4 * i))


@kernel
def to_half_key(x: int, cache: int, row: int, stride: int, head_dim: int) -> None:
    """Write a key, float32[head_dim], to row `row` of a KV head in a cache of keys. `x` is overwritten."""
    to_half(x, x, head_dim)
    to = cache + row // UNIT * stride + 2 * (row % UNIT)
    for i in range(head_dim):
        write_i16(to + LINE_BYTES * i, read_i16(x + 2 * i))


@kernel
def to_half_value(x: int, cache: int, row: int, stride: int, head_dim: int) -> None:
    """`to_half_key` for a cache of values; `x` is kept."""
    to = value_line(cache, row, stride)
    for i in range(0, head_dim, UNIT):
        to_half(x + 4 * i, to + LINE_BYTES * i, UNIT)


@kernel
def value_line(cache: int, row: int, stride: int) -> Any:
    """The address of the first 32 numbers of row `row` of a KV head in a cache of values."""
    return cache + row // UNIT * stride + LINE_BYTES * (row % UNIT)


@kernel
def move_half_key(cache: int, old: int, new: int, stride: int, head_dim: int) -> None:
    """Copy row `old` of a KV head in a cache of keys to row `new`."""
    at = cache + old // UNIT * stride + 2 * (old % UNIT)
    to = cache + new // UNIT * stride + 2 * (new % UNIT)
    for i in range(0, LINE_BYTES * head_dim, LINE_BYTES):
        write_i16(to + i, read_i16(at + i))


@kernel
def move_half_value(cache: int, old: int, new: int, stride: int, head_dim: int) -> None:
    """`move_half_key` for a cache of values."""
    at, to = value_line(cache, old, stride), value_line(cache, new, stride)
    for i in range(0, LINE_BYTES * head_dim, LINE_BYTES * UNIT):
        for number in range(0, LINE_BYTES, 8):
            write_i64(to + i + number, read_i64(at + i + number))
