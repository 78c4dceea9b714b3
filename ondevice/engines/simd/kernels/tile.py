"""Matrix product of a weight tile: 16 output rows in blocks of 32 weights, times up to 8 rows of int8 activations.

It takes 80 % of a forward's time.

A quantised block of activations is ACTIVATION_BYTES: 32 int8 `q`, an int32 `start`, a float32 `shift`; its scale is a
power of two, 2**e. `shift` is 1.5 * 2**(23 + e), and `start` is the bits of `shift` less zero * sum(q), where `zero` is
the code of a zero weight. So after the integer dot product the accumulator, taken as a float, *is* shift + 2**e * dot,
no bit rounded: what remains per block is one subtraction and one FMA with the weight's scale. A free scale would take a
conversion, a multiplication and an FMA, 12 % of the time at 8 rows. The price is half a bit of the activations: their
error is 1.45 times that of a free scale, a tenth of what int4 weights lose.

Weights of a tile lie block by block, as many vectors of 64 bytes as a code has bits; `int4` and `int8` say which weight
lies where. Row n has bytes 4n .. 4n + 3 of each, so a narrower CPU reads a part of every vector, and one layout serves
all. Scales are fp16 [block][16].
"""

from __future__ import annotations

from typing import Any, NamedTuple

from llvmlite import ir
from numba import types
from numba.core import cgutils

from ondevice.engines.simd.kernels import instruction_set
from ondevice.engines.simd.kernels.codes import CODES
from ondevice.engines.simd.kernels.dot import add_dots, groups_of_four
from ondevice.engines.simd.kernels.instruction_set import InstructionSet
from ondevice.engines.simd.kernels.jit import LITERAL, emits
from ondevice.engines.simd.kernels.loop import Vectors, accumulate
from ondevice.engines.simd.kernels.sizes import TILE
from ondevice.engines.simd.kernels.vector import (
    F32,
    I16,
    I32,
    I64,
    L1,
    L2,
    constant,
    fused,
    pointer_to,
    prefetch,
    read,
    splat,
    widen_half,
)

ACTIVATION_BYTES = 40
"""Bytes of a quantised block of activations."""
START, SHIFT = 32, 36
"""Offsets in such a block; `q` comes first."""
AHEAD = 6144
"""Bytes from the weights that are read to those that are prefetched."""
CHUNK = 4096
"""Bytes of weights that one pass multiplies before the next has its turn, where a tile takes several: less than AHEAD,
so that all passes together read memory evenly. A pass over a whole tile would wait for memory, and the others not."""
MOST_ROWS = 8
"""Rows of activations of one pass: 12 or 16 are no faster, their accumulators do not fit in the registers."""


@emits(types.void, LITERAL, LITERAL, *[types.int64] * 6)
def tile_product(
    builder: Any, bits: int, rows: int, weights: Any, scales: Any, activations: Any, blocks: Any, out: Any, stride: Any
) -> None:
    """out[r, n] = sum over blocks of scale[n] * 2**e[r] * (w[n] . q[r]), block after block.

    Args:
        bits: of a weight.
        rows: of activations, 1..8.
        weights, scales: addresses of the tile's.
        activations: address of quantised blocks [blocks][rows].
        blocks: at least 1.
        out: address of float32[rows, 16].
        stride: bytes from a row of `out` to the next.
    """
    isa = instruction_set.current()
    tile = _Tile(isa, bits, rows, weights, scales, activations, out, stride)
    vectors, whole = isa.vectors_of_a_pass(rows), TILE // isa.lanes
    zeros = [constant(0.0, ir.VectorType(F32, isa.lanes))] * (whole * rows)
    if vectors == whole:
        tile.store(builder, I64(0), tile.add(builder, _Part(I64(0), I64(0), I64(0), blocks), zeros))
        return
    tile.store(builder, I64(0), zeros)
    chunk = I64(CHUNK // tile.block_bytes)
    chunks = builder.sdiv(builder.add(blocks, I64(CHUNK // tile.block_bytes - 1)), chunk)
    with cgutils.for_range(builder, chunks) as loop:
        first = builder.mul(loop.index, chunk)
        left = builder.sub(blocks, first)
        count = builder.select(builder.icmp_signed("<", left, chunk), left, chunk)
        with cgutils.for_range(builder, I64(whole // vectors)) as turn:
            lane = builder.mul(turn.index, I64(vectors * isa.lanes))
            sums = tile.load(builder, lane, vectors * rows)
            tile.store(builder, lane, tile.add(builder, _Part(turn.index, lane, first, count), sums))


class _Part(NamedTuple):
    """What one pass computes."""

    number: Any
    """Of the pass, from 0."""
    lane: Any
    """Its first output row."""
    first: Any
    """Its first block."""
    count: Any
    """Of blocks."""


class _Tile(NamedTuple):
    """How a tile's product is computed, and the arguments of `tile_product`.

    Sums are vectors of output rows, in each of them a sum per row of activations.
    """

    isa: InstructionSet
    bits: int
    rows: int
    weights: Any
    scales: Any
    activations: Any
    out: Any
    stride: Any

    @property
    def block_bytes(self) -> int:
        """Of a block's weights."""
        return 4 * TILE * self.bits

    def add(self, builder: Any, part: _Part, sums: Vectors) -> Vectors:
        """The sums after the blocks of one pass."""
        isa, rows, size = self.isa, self.rows, self.block_bytes
        vectors = len(sums) // rows
        share = size * vectors * isa.lanes // TILE
        weights = builder.add(self.weights, builder.mul(part.first, I64(size)))
        ahead = builder.add(weights, builder.mul(part.number, I64(share)))
        weights = builder.add(weights, builder.mul(part.lane, I64(4)))
        first_scale = builder.add(builder.mul(part.first, I64(TILE)), part.lane)
        scales = builder.add(self.scales, builder.mul(first_scale, I64(2)))
        record_bytes = ACTIVATION_BYTES * rows
        activations = builder.add(self.activations, builder.mul(part.first, I64(record_bytes)))

        def step(block: Any, sums: Vectors) -> Vectors:
            prefetch_weights(builder, _at(builder, ahead, block, size), share, rows)
            codes_at, scales_at = _at(builder, weights, block, size), _at(builder, scales, block, 2 * TILE)
            base = _at(builder, activations, block, record_bytes)
            results = []
            for vector in range(vectors):
                codes = CODES[self.bits](builder, isa, codes_at, 4 * isa.lanes * vector)
                kind = ir.VectorType(I16, isa.lanes)
                scale = widen_half(builder, read(builder, scales_at, kind, 2 * isa.lanes * vector, align=2))
                for row in range(rows):
                    value = _block_sum(builder, isa, self.bits, codes, base, ACTIVATION_BYTES * row)
                    results.append(fused(builder, value, scale, sums[vector * rows + row]))
            return results

        return accumulate(builder, part.count, sums, step)

    def load(self, builder: Any, lane: Any, count: int) -> Vectors:
        """That many sums from `out`, where those of the output rows from `lane` on lie."""
        kind = ir.VectorType(F32, self.isa.lanes)
        return [builder.load(self._pointer(builder, lane, index), typ=kind, align=4) for index in range(count)]

    def store(self, builder: Any, lane: Any, sums: Vectors) -> None:
        """Write sums to `out`, where those of the output rows from `lane` on lie."""
        for index, total in enumerate(sums):
            builder.store(total, self._pointer(builder, lane, index), align=4)

    def _pointer(self, builder: Any, lane: Any, index: int) -> Any:
        vector, row = divmod(index, self.rows)
        column = builder.add(lane, I64(vector * self.isa.lanes))
        line = builder.add(self.out, builder.mul(self.stride, I64(row)))
        return pointer_to(builder, builder.add(line, builder.mul(column, I64(4))))


def _at(builder: Any, base: Any, index: Any, size: int) -> Any:
    """The pointer to element `index` of an array of elements of `size` bytes."""
    return pointer_to(builder, builder.add(base, builder.mul(index, I64(size))))


def prefetch_weights(builder: Any, pointer: Any, size: int, rows: int) -> None:
    """Prefetch `size` bytes of weights AHEAD of those at a pointer, past a tile's end those of the next tile.

    The arithmetic of several rows fills the reorder window, so loads alone start too late: without this, 5 to 8 rows
    take 1.3 to 1.5 times as long (AMD Zen 4). They go to the level-2 cache, because the activations of several rows
    need level 1: 7 % faster at 5 to 8 rows; one row is 2 % faster from level 1. 4 or 12 KiB ahead is no better for
    several rows, and costs one row 6 %. Where a tile takes several passes, each fetches its share of every block.
    """
    level = L1 if rows < 3 else L2
    for line in range(0, size, 64):
        prefetch(builder, pointer, AHEAD + line, level)


def _block_sum(builder: Any, isa: InstructionSet, bits: int, codes: list[Any], base: Any, offset: int) -> Any:
    """2**e * (w . q) of one row of activations, whose block lies `offset` bytes behind `base`; exact."""
    start = splat(builder, read(builder, base, I32, offset + START), isa.lanes)
    total = add_dots(builder, isa, bits, start, codes, groups_of_four(builder, isa, base, offset))
    shift = splat(builder, read(builder, base, F32, offset + SHIFT), isa.lanes)
    return builder.fsub(builder.bitcast(total, ir.VectorType(F32, isa.lanes)), shift)
