"""Matrix product of a weight tile: 16 output rows (int4 or int8, blocks of 32) times up to 8 rows of int8 activations.

It takes 80 % of a forward's time.

A quantised block of activations is ACTIVATION_BYTES: 32 int8 `q`, an int32 `start`, a float32 `shift`; its scale is a
power of two, 2**e. `shift` is 1.5 * 2**(23 + e), and `start` is the bits of `shift` less zero * sum(q), where `zero` is
the code of a zero weight. So after the integer dot product the accumulator, taken as a float, *is* shift + 2**e * dot,
no bit rounded: what remains per block is one subtraction and one FMA with the weight's scale. A free scale would take a
conversion, a multiplication and an FMA, 12 % of the time at 8 rows. The price is half a bit of the activations: their
error is 1.45 times that of a free scale, a tenth of what int4 weights lose.

Weights of a tile lie block by block. int4: 4 vectors of 64 bytes, vector j with k = 8j .. 8j + 3 of the 16 rows in its
low nibbles and k = 8j + 4 .. 8j + 7 in the high ones. int8: 8 vectors, vector j with k = 4j .. 4j + 3. Row n has bytes
4n .. 4n + 3 of each, so a narrower CPU reads a part of every vector, and one layout serves all. Scales are fp16
[block][16].
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils

from ondevice.engines.simd.kernels import instruction_set
from ondevice.engines.simd.kernels.dot import dot4
from ondevice.engines.simd.kernels.instruction_set import InstructionSet
from ondevice.engines.simd.kernels.jit import LITERAL, emits
from ondevice.engines.simd.kernels.loop import Vectors, accumulate
from ondevice.engines.simd.kernels.vector import (
    F32,
    I8,
    I16,
    I32,
    I64,
    call,
    constant,
    fused,
    pointer_to,
    read,
    splat,
    widen_half,
)

TILE = 16
"""Output rows of a tile."""
BLOCK = 32
"""Weights, or activations, that share a scale."""
ACTIVATION_BYTES = 40
"""Bytes of a quantised block of activations."""
START, SHIFT = 32, 36
"""Offsets in such a block; `q` comes first."""
AHEAD = 6144
"""Bytes from the weights that are read to those that are prefetched."""
L1, L2 = 3, 2
"""LLVM's numbers for the cache that a prefetch goes to."""
MOST_ROWS = 8
"""Rows of activations of one pass: 12 or 16 are no faster, their accumulators do not fit in the registers."""


@emits(types.void, LITERAL, LITERAL, *[types.int64] * 6)
def tile_product(
    builder: Any, bits: int, rows: int, weights: Any, scales: Any, activations: Any, blocks: Any, out: Any, stride: Any
) -> None:
    """out[r, n] = sum over blocks of scale[n] * 2**e[r] * (w[n] . q[r]), block after block.

    Args:
        bits: of a weight, 4 or 8.
        rows: of activations, 1..8.
        weights, scales: addresses of the tile's.
        activations: address of quantised blocks [blocks][rows].
        blocks: at least 1.
        out: address of float32[rows, 16].
        stride: bytes from a row of `out` to the next.
    """
    isa = instruction_set.current()
    with cgutils.for_range(builder, I64(TILE // isa.lanes)) as part:
        _emit_part(builder, isa, bits, rows, part.index, weights, scales, activations, blocks, out, stride)


def _emit_part(
    builder: Any,
    isa: InstructionSet,
    bits: int,
    rows: int,
    part: Any,
    weights: Any,
    scales: Any,
    activations: Any,
    blocks: Any,
    out: Any,
    stride: Any,
) -> None:
    """The product for those of the 16 output rows that a vector of this CPU holds: the part-th `isa.lanes` of them."""
    floats = ir.VectorType(F32, isa.lanes)
    lane = builder.mul(part, I64(isa.lanes))
    weights = builder.add(weights, builder.mul(lane, I64(4)))
    scales = builder.add(scales, builder.mul(lane, I64(2)))
    out = builder.add(out, builder.mul(lane, I64(4)))
    size = 4 * TILE * bits

    def step(block: Any, sums: Vectors) -> Vectors:
        pointer = _at(builder, weights, block, size)
        _prefetch(builder, pointer, size, rows)
        codes = _codes(builder, isa, bits, pointer)
        half = read(builder, _at(builder, scales, block, 2 * TILE), ir.VectorType(I16, isa.lanes), align=2)
        scale = widen_half(builder, half)
        base = _at(builder, activations, block, ACTIVATION_BYTES * rows)
        values = (_block_sum(builder, isa, bits, codes, base, ACTIVATION_BYTES * row) for row in range(rows))
        return [fused(builder, value, scale, total) for value, total in zip(values, sums, strict=True)]

    for row, total in enumerate(accumulate(builder, blocks, [constant(0.0, floats)] * rows, step)):
        address = builder.add(out, builder.mul(stride, I64(row)))
        builder.store(total, pointer_to(builder, address), align=4)


def _at(builder: Any, base: Any, index: Any, size: int) -> Any:
    """The pointer to element `index` of an array of elements of `size` bytes."""
    return pointer_to(builder, builder.add(base, builder.mul(index, I64(size))))


def _prefetch(builder: Any, pointer: Any, size: int, rows: int) -> None:
    """Prefetch the weights AHEAD of those that are read, past a tile's end those of the next tile.

    The arithmetic of several rows fills the reorder window, so loads alone start too late: without this, 5 to 8 rows
    take 1.3 to 1.5 times as long (AMD Zen 4). They go to the level-2 cache, because the activations of several rows
    need level 1: 7 % faster at 5 to 8 rows; one row is 2 % faster from level 1. 4 or 12 KiB ahead is no better for
    several rows, and costs one row 6 %.
    """
    level = L1 if rows < 3 else L2
    for line in range(0, size, 64):
        ahead = builder.gep(pointer, [I64(AHEAD + line)], source_etype=I8)
        call(builder, "llvm.prefetch.p0", ir.VoidType(), ahead, I32(0), I32(level), I32(1))


def _codes(builder: Any, isa: InstructionSet, bits: int, pointer: Any) -> list[Any]:
    """The weights of a block as eight vectors of bytes, vector j with k = 4j .. 4j + 3 of the output rows."""
    kind = ir.VectorType(I8, 4 * isa.lanes)
    if bits == 8:
        codes = [read(builder, pointer, kind, 4 * TILE * j) for j in range(8)]
        return [builder.xor(code, constant(128, kind)) for code in codes] if isa.signed else codes
    codes = []
    pairs = ir.VectorType(I16, 2 * isa.lanes)
    for j in range(4):
        packed = read(builder, pointer, kind, 4 * TILE * j)
        codes.append(builder.and_(packed, constant(15, kind)))
        high = builder.bitcast(builder.lshr(builder.bitcast(packed, pairs), constant(4, pairs)), kind)
        codes.append(builder.and_(high, constant(15, kind)))
    return codes


def _block_sum(builder: Any, isa: InstructionSet, bits: int, codes: list[Any], base: Any, offset: int) -> Any:
    """2**e * (w . q) of one row of activations, whose block lies `offset` bytes behind `base`; exact."""
    total = splat(builder, read(builder, base, I32, offset + START), isa.lanes)
    bytes4 = ir.VectorType(I8, 4 * isa.lanes)
    for j, code in enumerate(codes):
        group = splat(builder, read(builder, base, I32, offset + 4 * j), isa.lanes)
        total = dot4(builder, isa, bits, total, code, builder.bitcast(group, bytes4))
    shift = splat(builder, read(builder, base, F32, offset + SHIFT), isa.lanes)
    return builder.fsub(builder.bitcast(total, ir.VectorType(F32, isa.lanes)), shift)
