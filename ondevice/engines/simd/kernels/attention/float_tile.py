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
"""

from __future__ import annotations

from functools import partial
from typing import Any

from llvmlite import ir
from numba import types

from ondevice.engines.simd.kernels.contract.attention_memory import SCORE_BYTES, UNIT
from ondevice.engines.simd.kernels.contract.instruction_sets import LANES, instruction_set
from ondevice.engines.simd.kernels.isa.dot import Vectors, accumulate, emit_cases
from ondevice.engines.simd.kernels.isa.jit import emits
from ondevice.engines.simd.kernels.isa.memory import read_i16, read_i64, write_i16, write_i64
from ondevice.engines.simd.kernels.isa.vector import (
    F32,
    I16,
    I32,
    I64,
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

_WIDE_REGISTERS = instruction_set().lanes == LANES
TILE_PAIRS = 12 if _WIDE_REGISTERS else 4
"""Most pairs of row and head in a tile. With two vectors of 16 numbers these are 24 sums, of the 32 registers of
AVX-512; other instruction sets have registers for four pairs and one vector."""
SIZES = range(4, TILE_PAIRS + 1, 4)
"""Pairs of a tile for which there is code."""
WIDE = 2 if _WIDE_REGISTERS else 1
"""Vectors of 16 keys of a tile of scores, and of 16 numbers of a tile of values."""
LINE_BYTES = 2 * UNIT
"""Bytes of a line: a number of 32 keys, or 32 numbers of a value."""


@emits(types.void, *[types.int64] * 7)
def score_tile(
    builder: Any, pairs: Any, keys: Any, ahead: Any, queries: Any, head_dim: Any, out: Any, stride: Any
) -> None:
    """out[i, j] = q[i] . k[j] for 16 * WIDE keys.

    Args:
        pairs: number of queries, a multiple of 4 up to TILE_PAIRS.
        keys: address of the keys in their unit.
        ahead: distance in bytes to the keys that are prefetched.
        queries: address of float32[head_dim, pairs].
        head_dim: a multiple of 32.
        out: address of float32[pairs, 16 * WIDE].
        stride: bytes from a row of `out` to the next.
    """
    emit_cases(builder, pairs, SIZES, partial(_score, builder, keys, ahead, queries, head_dim, out, stride))


def _score(builder: Any, keys: Any, ahead: Any, queries: Any, head_dim: Any, out: Any, stride: Any, pairs: int) -> None:
    line_ahead = builder.add(keys, ahead)

    def step(index: Any, sums: Vectors) -> Vectors:
        line, numbers = element(builder, keys, index, LINE_BYTES), element(builder, queries, index, 4 * pairs)
        prefetch(builder, element(builder, line_ahead, index, LINE_BYTES))
        k, q = _halves(builder, line), _repeated(builder, numbers, pairs)
        return [fused(builder, q[i // WIDE], k[i % WIDE], total) for i, total in enumerate(sums)]

    sums = accumulate(builder, head_dim, [constant(0.0, VF32)] * (pairs * WIDE), step)
    for i, total in enumerate(sums):
        row = builder.add(out, builder.mul(stride, I64(i // WIDE)))
        builder.store(total, pointer_to(builder, builder.add(row, I64(4 * LANES * (i % WIDE)))), align=4)


@emits(types.void, *[types.int64] * 8)
def mix_tile(
    builder: Any, pairs: Any, members: Any, weights: Any, values: Any, ahead: Any, count: Any, out: Any, stride: Any
) -> None:
    """out[i] += sum over j of weight[i, j] * value[j], in the order of j, for 16 * WIDE numbers of a value.

    Args:
        pairs: number of pairs that are computed, a multiple of 4 up to TILE_PAIRS.
        members: number of pairs that are stored, 1..pairs. The weights of the others are read, whatever they are.
        weights: address of the first pair's float32[count]; SCORE_BYTES to the next pair's.
        values: address of these numbers of the first value; LINE_BYTES to the next value's.
        ahead: distance in bytes to the values that are prefetched.
        count: number of values, at least 1.
        out: address of the first pair's float32[16 * WIDE].
        stride: bytes to the next pair's.
    """
    emit_cases(builder, pairs, SIZES, partial(_mix, builder, members, weights, values, ahead, count, out, stride))


def _mix(
    builder: Any,
    members: Any,
    weights: Any,
    values: Any,
    ahead: Any,
    count: Any,
    out: Any,
    stride: Any,
    pairs: int,
) -> None:
    line_ahead = builder.add(values, ahead)
    last = builder.sub(members, I64(1))
    targets = []
    for pair in range(pairs):
        number = builder.select(builder.icmp_signed("<", I64(pair), last), I64(pair), last)
        row = builder.add(out, builder.mul(stride, number))
        targets += [pointer_to(builder, builder.add(row, I64(4 * LANES * part))) for part in range(WIDE)]

    def step(index: Any, sums: Vectors) -> Vectors:
        line, own = element(builder, values, index, LINE_BYTES), element(builder, weights, index, 4)
        prefetch(builder, element(builder, line_ahead, index, LINE_BYTES))
        v = _halves(builder, line)
        w = [splat(builder, read(builder, own, F32, SCORE_BYTES * pair), LANES) for pair in range(pairs)]
        return [fused(builder, w[i // WIDE], v[i % WIDE], total) for i, total in enumerate(sums)]

    sums = [builder.load(target, typ=VF32, align=4) for target in targets]
    results = list(zip(accumulate(builder, count, sums, step), targets, strict=True))
    for total, target in reversed(results):  # those of missing pairs are written first, where the last one's follow
        builder.store(total, target, align=4)


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


def _halves(builder: Any, pointer: Any) -> Vectors:
    """WIDE vectors of 16 fp16 as float32."""
    kind = ir.VectorType(I16, LANES)
    return [widen_half(builder, read(builder, pointer, kind, 2 * LANES * part, align=2)) for part in range(WIDE)]


def _repeated(builder: Any, pointer: Any, count: int) -> Vectors:
    """`count` float32, each repeated in all lanes of a vector.

    On x86 a load can repeat a number at no cost. On ARM an FMA can take one lane of a vector as its operand.
    """
    if not instruction_set().by_lane:
        return [splat(builder, read(builder, pointer, F32, 4 * i), LANES) for i in range(count)]
    fours = [read(builder, pointer, ir.VectorType(F32, 4), 16 * i) for i in range(count // 4)]
    return [_shuffle(builder, four, four, [lane] * LANES) for four in fours for lane in range(4)]


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
