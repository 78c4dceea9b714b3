"""The two products of attention: four queries with some keys, and four heads' weights with the values they weigh.

A tile is as large as the registers allow, so that what is loaded, and widened to float32, serves several FMAs. Its size
changes no bit: a score is sixteen sums over the numbers of a head and then their sum in one order; a mixed number adds
value after value.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types

from ondevice.engines.simd.kernels import instruction_set
from ondevice.engines.simd.kernels.jit import LITERAL, emits
from ondevice.engines.simd.kernels.loop import Vectors, accumulate
from ondevice.engines.simd.kernels.vector import (
    F32,
    I8,
    I16,
    I32,
    I64,
    LANES,
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
WIDE = 4 if instruction_set.current().lanes == LANES else 1
"""Keys of a tile of scores, and vectors of a tile of values. With four heads that is 16 sums, half of the registers of
AVX-512; the others have room for four sums."""
AHEAD = 16
"""Rows between the keys or values that are read and those that are asked for. Without that, 8 rows of a verification
take 1.7 times as long behind 8,192 tokens, for a new page begins every four keys (AMD Zen 4)."""


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
        keys: of the tile, 1 or 4.
        query: address of float32[heads, head_dim]; missing heads are the last one again.
        heads: 1..HEADS.
        head_dim: a multiple of 32.
        key: address of the first key; the next is `stride` bytes on.
        out: address of the first head's float32[keys]; the next head's is `out_stride` bytes on.
    """
    width = builder.mul(head_dim, I64(4))
    queries = [builder.add(query, builder.mul(number, width)) for number in _numbers_of(builder, heads)]
    rows = [builder.add(key, builder.mul(stride, I64(j))) for j in range(keys)]
    following = builder.mul(stride, I64(AHEAD))

    def step(index: Any, sums: Vectors) -> Vectors:
        """32 numbers of a head: a cache line of keys."""
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
        width: vectors of 16 numbers, 1 or 4.
        weight: address of the first head's float32[count]; the next head's is `weight_stride` bytes on.
        heads: 1..HEADS; missing heads are the last one again.
        value: address of the first value; the next is `stride` bytes on.
        count: of values, at least 1.
        out: address of the first head's float32[width, 16]; the next head's is `out_stride` bytes on.
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
    """One vector with the sum of the lanes of each of 4 or 16: lane i is what `vector.sum_lanes` gives for vector i.

    As there, a vector becomes its sum in four additions of lanes that are 8, 4, 2 and 1 apart. Two vectors share an
    addition as soon as they fill it: a third of the instructions. An example, where a to d are four vectors and every
    line defines them anew:

        8 apart: a = [a0 .. a7] + [a8 .. a15], and so b, c, d
        4 apart: a = [a0 a1 a2 a3] + [a4 a5 a6 a7], and so b, c, d
        2 apart: ab = [a0 a1 b0 b1] + [a2 a3 b2 b3], and so cd
        1 apart: [a0 b0 c0 d0] + [a1 b1 c1 d1], the four sums

    Sixteen vectors, a to p, share all additions, which have 16 lanes: 8 + 4 + 2 + 1 of them. Pieces of 4 lanes keep
    their place in the last two, so the sums come as a e i m, b f j n, c g k o, d h l p: the shuffle at the end puts
    them in order, by `owners`, the vector that each lane belongs to.
    """
    owners, width = [[i] * LANES for i in range(len(vectors))], len(vectors)
    for distance in (8, 4, 2, 1):
        size = len(owners[0])
        groups = [[i] if size > width else [i, i + 1] for i in range(0, len(vectors), 1 if size > width else 2)]
        chunk = size if distance >= 4 else 4  # pieces of less than 128 bits are moved within these in one instruction
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
    """The numbers of HEADS heads, the last again where there are fewer."""
    last = builder.sub(heads, I64(1))
    return [builder.select(builder.icmp_signed("<", I64(h), last), I64(h), last) for h in range(HEADS)]


def _halves(builder: Any, pointer: Any, index: int) -> Any:
    """The index-th sixteen numbers of fp16, as floats."""
    return widen_half(builder, read(builder, pointer, ir.VectorType(I16, LANES), 2 * LANES * index, align=2))


def _shuffle(builder: Any, a: Any, b: Any, lanes: list[int]) -> Any:
    return builder.shuffle_vector(a, b, ir.Constant(ir.VectorType(I32, len(lanes)), lanes))


def _pointer(builder: Any, base: Any, index: Any, stride: Any) -> Any:
    """To `base` + index * stride; numbers or addresses."""
    index, stride = (I64(value) if isinstance(value, int) else value for value in (index, stride))
    return builder.inttoptr(builder.add(base, builder.mul(index, stride)), POINTER)
