"""The layout of an int8 cache, and its two products in integers: queries with keys, and weights with values.

A unit of the cache holds UNIT positions of a KV head, from a multiple of UNIT on, in UNIT * (head_dim + 4) bytes:

    keys     two tiles of 16: codes + 128, uint8[head_dim / 4][16 keys][4 dims], then float32[16], a scale for each key
    values   codes + 128, uint8[head_dim / 16][8][16 dims][4 positions], then float32[32], a scale for each position

Both products work like `tiles`: 64 bytes of the cache give 16 sums of four products, and up to eight pairs of
row and head share the loads. Integer sums are exact, so their order does not matter.

Codes have an offset of 128, like those of int8 weights, because x86 multiplies unsigned bytes with signed ones and can
repeat only the signed ones from memory at no cost. So the quantised weights of values are 0..127, not 0..255.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from llvmlite import ir
from numba import types
from numba.core import cgutils

from ondevice.bundle_format.weight_format import INT8
from ondevice.engines.simd.kernels import formats
from ondevice.engines.simd.kernels.contract.attention_memory import UNIT
from ondevice.engines.simd.kernels.contract.instruction_sets import InstructionSet, instruction_set
from ondevice.engines.simd.kernels.contract.matrices import TILE
from ondevice.engines.simd.kernels.isa.dot import Vectors, accumulate, add_dots, groups_of_four, vectors_of_a_pass
from ondevice.engines.simd.kernels.isa.jit import LITERAL, emits
from ondevice.engines.simd.kernels.isa.memory import read_i8, read_i32, write_i8, write_i32
from ondevice.engines.simd.kernels.isa.vector import (
    F32,
    I32,
    I64,
    L2,
    constant,
    element,
    fused,
    pointer_to,
    prefetch,
    read,
    splat,
)
from ondevice.native.functions import kernel

TILE_PAIRS = 8
"""Most pairs of row and head in a tile."""
KEYS_AHEAD, VALUES_AHEAD = 2, 8
"""Units from that whose keys, or values, are read to the one that is prefetched: whole keys, but values by 16 numbers.

Between two units of a KV head lie those of the others. While 4 and 1 KiB after what is read were prefetched, wherever
they belonged, forwards of 1, 2 and 5 rows after 7,900 tokens took 1.08 to 1.18, 1.07 to 1.16 and 1.04 to 1.09 times as
long (SmolLM2-135M, two cores of an AMD Zen 4). With 4 and 16 units, and with 1 and 4, they take up to 1.07 times as
long.
"""
CHAINS = 16 if instruction_set().lanes == TILE else 4
"""Fewest sums that are computed at a time, if there are registers: each addition to a sum waits for the one before."""


@emits(types.void, LITERAL, *[types.int64] * 8)
def score_tile(
    builder: Any,
    rows: int,
    keys: Any,
    ahead: Any,
    queries: Any,
    starts: Any,
    scales: Any,
    blocks: Any,
    out: Any,
    stride: Any,
) -> None:
    """out[r, n] = (q[r] . k[n]) * query scale[r] * key scale[n], for 16 keys.

    Args:
        rows: number of queries, 1..TILE_PAIRS.
        keys: address of a tile of keys.
        ahead: distance in bytes to the keys that are prefetched.
        queries: address of int8[blocks][rows][32].
        starts: address of int32[rows], -zero * sum(q) of every query.
        scales: address of float32[rows], the queries' scales.
        blocks: head_dim / 32.
        out: address of float32[rows, 16].
        stride: bytes from a row of `out` to the next.
    """
    isa = instruction_set()
    kept = _Sums(isa, rows)
    vectors = kept.vectors
    scales_at = builder.add(keys, builder.mul(blocks, I64(8 * 4 * TILE)))
    with cgutils.for_range(builder, I64(TILE // isa.lanes // vectors)) as turn:
        lane = builder.mul(turn.index, I64(4 * vectors * isa.lanes))  # in bytes
        first = builder.add(keys, lane)

        def step(block: Any, sums: Vectors) -> Vectors:
            keys_at, base = element(builder, first, block, 8 * 4 * TILE), element(builder, queries, block, 32 * rows)
            ahead_at = element(builder, builder.add(first, ahead), block, 8 * 4 * TILE)
            for line in range(0, 8 * 4 * vectors * isa.lanes, 64):
                prefetch(builder, ahead_at, line, L2)
            return kept.add(builder, sums, keys_at, base)

        begin = kept.begin(builder, pointer_to(builder, starts))
        for index, total in enumerate(kept.totals(builder, accumulate(builder, blocks, begin, step))):
            vector, row = divmod(index, rows)
            kind = ir.VectorType(F32, isa.lanes)
            key_scale = read(builder, pointer_to(builder, builder.add(scales_at, lane)), kind, 4 * isa.lanes * vector)
            scale = splat(builder, read(builder, pointer_to(builder, scales), F32, 4 * row), isa.lanes)
            score = builder.fmul(builder.fmul(builder.sitofp(total, kind), scale), key_scale)
            line = builder.add(builder.add(out, builder.mul(stride, I64(row))), lane)
            builder.store(score, pointer_to(builder, builder.add(line, I64(4 * isa.lanes * vector))), align=4)


@emits(types.void, LITERAL, *[types.int64] * 10)
def mix_tile(
    builder: Any,
    rows: int,
    values: Any,
    stride: Any,
    weights: Any,
    starts: Any,
    scales: Any,
    count: Any,
    chain: Any,
    tiles: Any,
    out: Any,
    out_stride: Any,
) -> None:
    """out[r] += sum over i of scale[i, r] * (sum over c of w[i, c, r] . v[i, c]), in the order of i.

    Args:
        rows: number of rows of weights, 1..TILE_PAIRS.
        values: address of the first unit's values.
        stride: bytes from a unit to the next.
        weights: address of int8[count][chain][rows][32], 0..127.
        starts: address of int32[count][rows], -zero * the sum of the weights that share a scale.
        scales: address of float32[count][rows], the weights' scales.
        count: number of scales for each row, at least 1.
        chain: number of units that share a scale, at least 1.
        tiles: head_dim / 16.
        out: address of float32[rows, head_dim].
        out_stride: bytes from a row of `out` to the next.
    """
    isa = instruction_set()
    kept = _Sums(isa, rows)
    vectors, kind = kept.vectors, ir.VectorType(F32, isa.lanes)
    passes = TILE // isa.lanes // vectors
    with cgutils.for_range(builder, builder.mul(tiles, I64(passes))) as turn:
        tile, part = builder.sdiv(turn.index, I64(passes)), builder.srem(turn.index, I64(passes))
        lane = builder.mul(part, I64(4 * vectors * isa.lanes))  # in bytes
        first = builder.add(builder.add(values, builder.mul(tile, I64(8 * 4 * TILE))), lane)
        line = builder.add(builder.add(out, builder.mul(tile, I64(4 * TILE))), lane)
        targets = [
            pointer_to(builder, builder.add(line, builder.add(builder.mul(out_stride, I64(row)), I64(at))))
            for at in range(0, 4 * vectors * isa.lanes, 4 * isa.lanes)
            for row in range(rows)
        ]

        def scaled(index: Any, sums: Vectors) -> Vectors:
            def step(link: Any, ints: Vectors) -> Vectors:
                unit = builder.add(builder.mul(index, chain), link)
                pointer = pointer_to(builder, builder.add(first, builder.mul(unit, stride)))
                base = element(builder, weights, unit, 32 * rows)
                ahead = element(builder, first, builder.add(unit, I64(VALUES_AHEAD)), stride)
                for place in range(0, 8 * 4 * vectors * isa.lanes, 64):
                    prefetch(builder, ahead, place, L2)
                return kept.add(builder, ints, pointer, base)

            begin = kept.begin(builder, element(builder, starts, index, 4 * rows))
            ints = kept.totals(builder, accumulate(builder, chain, begin, step))
            base = element(builder, scales, index, 4 * rows)
            factors = [splat(builder, read(builder, base, F32, 4 * row), isa.lanes) for row in range(rows)]
            return [
                fused(builder, builder.sitofp(value, kind), factors[i % rows], total)
                for i, (value, total) in enumerate(zip(ints, sums, strict=True))
            ]

        sums = [builder.load(target, typ=kind, align=4) for target in targets]
        for total, target in zip(accumulate(builder, count, sums, scaled), targets, strict=True):
            builder.store(total, target, align=4)


class _Sums(NamedTuple):
    """The sums of a pass: for each vector of codes and each row, `chains` sums that are added at the end."""

    isa: InstructionSet
    rows: int

    @property
    def vectors(self) -> int:
        return vectors_of_a_pass(self.isa, self.rows)

    @property
    def chains(self) -> int:
        return max(1, min(8, CHAINS // (self.vectors * self.rows)))

    def begin(self, builder: Any, starts: Any) -> Vectors:
        """The sums before the first product; `starts` points to int32[rows]."""
        zeros = [constant(0, ir.VectorType(I32, self.isa.lanes))] * (self.chains - 1)
        firsts = [splat(builder, read(builder, starts, I32, 4 * row), self.isa.lanes) for row in range(self.rows)]
        return [total for first in firsts * self.vectors for total in (first, *zeros)]

    def add(self, builder: Any, sums: Vectors, codes_at: Any, rows_at: Any) -> Vectors:
        """The sums after 32 more products in each lane, of eight vectors of codes and 32 bytes of each row."""
        isa, every, added = self.isa, self.chains, []
        for index in range(self.vectors * self.rows):
            vector, row = divmod(index, self.rows)
            if row == 0:
                codes = formats.unpack(builder, isa, INT8, codes_at, 4 * isa.lanes * vector)
            groups = groups_of_four(builder, isa, rows_at, 32 * row)
            for chain, total in enumerate(sums[index * every :][:every]):
                added.append(add_dots(builder, isa, 8, total, codes[chain::every], groups[chain::every]))
        return added

    def totals(self, builder: Any, sums: Vectors) -> Vectors:
        """<n x i32> for each vector and row: the total of its chains."""
        found = []
        for first in range(0, len(sums), self.chains):
            total, *others = sums[first : first + self.chains]
            for other in others:
                total = builder.add(total, other)
            found.append(total)
        return found


@kernel
def move_int8_key(cache: int, old: int, new: int, stride: int, head_dim: int) -> None:
    """Copy row `old` of a KV head in a cache of keys to row `new`."""
    tile = TILE * (head_dim + 4)
    at = cache + old // UNIT * stride + old % UNIT // TILE * tile + 4 * (old % TILE)
    to = cache + new // UNIT * stride + new % UNIT // TILE * tile + 4 * (new % TILE)
    for offset in range(0, tile, 4 * TILE):  # the last is the scale
        write_i32(to + offset, read_i32(at + offset))


@kernel
def move_int8_value(cache: int, old: int, new: int, stride: int, head_dim: int) -> None:
    """`move_int8_key` for a cache of values."""
    at, to = cache + old // UNIT * stride, cache + new // UNIT * stride
    old, new = old % UNIT, new % UNIT
    write_i32(to + UNIT * head_dim + 4 * new, read_i32(at + UNIT * head_dim + 4 * old))
    at, to = at + old // 4 * 4 * TILE + old % 4, to + new // 4 * 4 * TILE + new % 4
    for tile in range(0, UNIT * head_dim, UNIT * TILE):
        for offset in range(tile, tile + 4 * TILE, 4):
            write_i8(to + offset, read_i8(at + offset))
