"""The two products of attention over an fp16 cache: queries with keys, and weights with values, of four heads at a
time.

A tile is as large as the registers allow, so that what is loaded and widened to float32 is used by several FMAs. Its
size changes no bit: a score is 16 sums over the numbers of a head, then their sum in one order; an output number adds
value after value.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types

from ondevice.engines.simd.kernels.contract import LANES, instruction_set
from ondevice.engines.simd.kernels.isa.dot import Vectors, accumulate
from ondevice.engines.simd.kernels.isa.jit import LITERAL, emits
from ondevice.engines.simd.kernels.isa.vector import (
    F32,
    I8,
    I16,
    I32,
    I64,
    POINTER,
    VF32,
    constant,
    fused,
    prefetch,
    read,
    splat,
    widen_half,
)

HEADS = 4
"""Query heads of a tile."""
WIDE = 4 if instruction_set().lanes == LANES else 1
"""Keys of a tile of scores, and vectors of 16 numbers of a tile of values. With four heads these are 16 sums, half of
the registers of AVX-512; other instruction sets have registers for four sums."""
AHEAD = 16
"""Distance in rows from the keys or values that are read to those that are prefetched. Without the prefetch, a
verification of 8 rows after 8,192 tokens takes 1.7 times as long, because a new page begins every four keys (AMD Zen
4)."""


@emits(types.void, LITERAL, *[types.int64] * 7)
def score_tile(
    builder: Any,
    keys: int,
    query: Any,
    heads: Any,
    head_dim: Any,
    key: Any,
    stride: Any,
    out: Any,
    out_stride: Any,
) -> None:
    """out[h, j] = q[h] . k[j] for HEADS heads.

    Args:
        keys: number of keys of the tile, 1 or 4.
        query: address of float32[heads, head_dim]; missing heads repeat the last one.
        heads: 1..HEADS.
        head_dim: a multiple of 32.
        key: address of the first key, fp16.
        stride: bytes to the next key.
        out: address of the first head's float32[keys].
        out_stride: bytes to the next head's.
    """
    width = builder.mul(head_dim, I64(4))
    queries = [builder.add(query, builder.mul(number, width)) for number in _numbers_of(builder, heads)]
    rows = [builder.add(key, builder.mul(stride, I64(j))) for j in range(keys)]
    following = builder.mul(stride, I64(AHEAD))

    def step(index: Any, sums: Vectors) -> Vectors:
        """Add the products of 32 numbers of a head, one cache line of each key."""
        for row in rows:
            prefetch(builder, _pointer(builder, builder.add(row, following), index, 64))
        for half in range(2):
            k = [_halves(builder, _pointer(builder, row, index, 64), half) for row in rows]
            q = [read(builder, _pointer(builder, row, index, 128), VF32, 64 * half) for row in queries]
            sums = [fused(builder, q[i // keys], k[i % keys], total) for i, total in enumerate(sums)]
        return sums

    zeros = [constant(0.0, VF32)] * (HEADS * keys)
    totals = sums_of_lanes(builder, accumulate(builder, builder.sdiv(head_dim, I64(32)), zeros, step))
    for head in range(HEADS):
        own = _shuffle(builder, totals, totals, list(range(head * keys, (head + 1) * keys)))
        builder.store(own, _pointer(builder, out, out_stride, head), align=4)


@emits(types.void, LITERAL, *[types.int64] * 8)
def mix_tile(
    builder: Any,
    width: int,
    weight: Any,
    weight_stride: Any,
    heads: Any,
    value: Any,
    stride: Any,
    count: Any,
    out: Any,
    out_stride: Any,
) -> None:
    """out[h] += sum over j of weight[h, j] * value[j], in the order of j, for HEADS heads.

    Args:
        width: vectors of 16 numbers of a value, 1 or 4.
        weight: address of the first head's float32[count].
        weight_stride: bytes to the next head's.
        heads: 1..HEADS; missing heads repeat the last one.
        value: address of the first value, fp16.
        stride: bytes to the next value.
        count: number of values, at least 1.
        out: address of the first head's float32[width, 16].
        out_stride: bytes to the next head's.
    """
    numbers = _numbers_of(builder, heads)
    weights = [builder.add(weight, builder.mul(weight_stride, number)) for number in numbers]
    targets = [
        builder.gep(_pointer(builder, out, out_stride, number), [I64(64 * part)], source_etype=I8)
        for number in numbers
        for part in range(width)
    ]

    def step(index: Any, sums: Vectors) -> Vectors:
        row = _pointer(builder, value, index, stride)
        following = _pointer(builder, value, builder.add(index, I64(AHEAD)), stride)
        for line in range(0, 32 * width, 64):
            prefetch(builder, following, line)
        v = [_halves(builder, row, part) for part in range(width)]
        w = [splat(builder, read(builder, _pointer(builder, at, index, 4), F32), LANES) for at in weights]
        return [fused(builder, w[i // width], v[i % width], total) for i, total in enumerate(sums)]

    sums = [builder.load(target, typ=VF32, align=4) for target in targets]
    for total, target in zip(accumulate(builder, count, sums, step), targets, strict=True):
        builder.store(total, target, align=4)


def sums_of_lanes(builder: Any, vectors: Vectors) -> Any:
    """The sums of the lanes of 4 or 16 vectors, in one vector: lane i has the bits of `vector.sum_lanes` of vector i.

    As there, a vector is summed by four additions of lanes that are 8, 4, 2 and 1 apart. Two vectors share an addition
    as soon as their lanes fit into one: a third of the instructions. For four vectors a to d, redefined by every line:

        8 apart: a = [a0 .. a7] + [a8 .. a15], and so b, c, d
        4 apart: a = [a0 a1 a2 a3] + [a4 a5 a6 a7], and so b, c, d
        2 apart: ab = [a0 a1 b0 b1] + [a2 a3 b2 b3], and so cd
        1 apart: [a0 b0 c0 d0] + [a1 b1 c1 d1], the four sums

    Sixteen vectors, a to p, share all additions, 8 + 4 + 2 + 1 of 16 lanes each. The last two keep pieces of 4 lanes in
    place, so the sums come out as a e i m, b f j n, c g k o, d h l p. The shuffle at the end puts them in order, by
    `owners`, the vector that each lane belongs to.
    """
    owners, width = [[i] * LANES for i in range(len(vectors))], len(vectors)
    for distance in (8, 4, 2, 1):
        size = len(owners[0])
        groups = [[i] if size > width else [i, i + 1] for i in range(0, len(vectors), 1 if size > width else 2)]
        chunk = size if distance >= 4 else 4  # one instruction moves pieces of less than 128 bits within 128 bits
        sums, owned = [], []
        for group in groups:
            halves = [
                (n, lane)
                for start in range(0, size, chunk)
                for n in range(len(group))
                for lane in range(start, start + chunk)
                if not lane & distance
            ]
            low, high = ([n * size + lane + offset for n, lane in halves] for offset in (0, distance))
            first, second = vectors[group[0]], vectors[group[-1]]
            sums.append(builder.fadd(_shuffle(builder, first, second, low), _shuffle(builder, first, second, high)))
            owned.append([owners[group[n]][lane] for n, lane in halves])
        vectors, owners = sums, owned
    return _shuffle(builder, vectors[0], vectors[0], [owners[0].index(i) for i in range(width)])


def _numbers_of(builder: Any, heads: Any) -> list[Any]:
    """The indices of HEADS heads, the last one repeated if there are fewer."""
    last = builder.sub(heads, I64(1))
    return [builder.select(builder.icmp_signed("<", I64(h), last), I64(h), last) for h in range(HEADS)]


def _halves(builder: Any, pointer: Any, index: int) -> Any:
    """Numbers 16 * index .. 16 * index + 15 of fp16 as float32."""
    return widen_half(builder, read(builder, pointer, ir.VectorType(I16, LANES), 2 * LANES * index, align=2))


def _shuffle(builder: Any, a: Any, b: Any, lanes: list[int]) -> Any:
    return builder.shuffle_vector(a, b, ir.Constant(ir.VectorType(I32, len(lanes)), lanes))


def _pointer(builder: Any, base: Any, index: Any, stride: Any) -> Any:
    """The pointer to base + index * stride; `index` and `stride` are ints or LLVM values."""
    index, stride = (I64(value) if isinstance(value, int) else value for value in (index, stride))
    return builder.inttoptr(builder.add(base, builder.mul(index, stride)), POINTER)
