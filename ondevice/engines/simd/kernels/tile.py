"""The product that everything else waits for: sixteen output rows of a quantised matrix times up to eight activations.

Activations are blocks of 32 numbers in records of `RECORD` bytes: 32 int8 `q`, an int32 `start`, a float32 `shift`.
Their scale is a power of two, 2**e, and that is what makes the kernel short: `shift` is 1.5 * 2**(23 + e) and `start`
its bits less zero * sum(q), so after the integer dot product the accumulator *is* the float shift + 2**e * dot, no bit
rounded. One subtraction and one FMA with the weight's scale per block remain, where a free scale costs a conversion, a
multiplication and an FMA: 12 % of the time at 8 rows. It costs half a bit of the activations: their error becomes 1.45
times that of a free scale, a tenth of what int4 weights lose.

Weights of a tile, per block of 32 k: int4 is 4 vectors of 64 bytes, vector j with k = 8j .. 8j + 3 of the 16 rows in
its low nibbles, k = 8j + 4 .. 8j + 7 in the high ones; int8 is 8 vectors, vector j with k = 4j .. 4j + 3. Row n takes
bytes 4n .. 4n + 3, so a narrower CPU reads a part of each vector: one layout for all. Scales are fp16 [block][16].
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils

from ondevice.engines.simd.kernels import instruction_set
from ondevice.engines.simd.kernels.dot import dot4
from ondevice.engines.simd.kernels.instruction_set import InstructionSet
from ondevice.engines.simd.kernels.jit import intrinsic
from ondevice.engines.simd.kernels.loop import Vectors, accumulate
from ondevice.engines.simd.kernels.vector import (
    F32,
    I8,
    I16,
    I32,
    I64,
    POINTER,
    call,
    constant,
    fused,
    read,
    splat,
    widen_half,
)

TILE = 16
"""Output rows of a tile."""
BLOCK = 32
"""Weights that share a scale."""
RECORD = 40
"""Bytes of a quantised block of activations."""
START, SHIFT = 32, 36
"""Offsets in a record."""
AHEAD = 6144
"""Bytes between the weights that are read and those that are asked for."""
L1, L2 = 3, 2
"""LLVM's localities of a prefetch: which cache it ends in."""
MOST_ROWS = 8
"""Rows of one pass: 12 or 16 are no faster, their accumulators spill."""


@intrinsic
def tile_product(
    typing: Any, bits: Any, rows: Any, weights: Any, scales: Any, records: Any, blocks: Any, out: Any, stride: Any
) -> Any:
    """out[r, n] = sum over blocks of scale[n] * 2**e[r] * (w[n] . q[r]), summed block after block.

    Args:
        bits, rows: literals, 4 or 8 and 1..8.
        weights, scales: addresses of the tile's.
        records: address of the activations, [block][rows] records.
        blocks: of 32 k, at least 1.
        out: address of float32[rows, 16].
        stride: bytes between the rows of `out`.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        isa = instruction_set.current()
        _, _, *runtime = args
        with cgutils.for_range(builder, I64(TILE // isa.lanes)) as part:
            _emit(builder, isa, bits.literal_value, rows.literal_value, part.index, *runtime)
        return context.get_dummy_value()

    return types.void(bits, rows, *[types.int64] * 6), generate


def _emit(
    builder: Any,
    isa: InstructionSet,
    bits: int,
    rows: int,
    part: Any,
    weights: Any,
    scales: Any,
    records: Any,
    blocks: Any,
    out: Any,
    stride: Any,
) -> None:
    """The loop over blocks for lanes part * isa.lanes .. of the tile."""
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
        base = _at(builder, records, block, RECORD * rows)
        values = (_block_sum(builder, isa, bits, codes, base, RECORD * row) for row in range(rows))
        return [fused(builder, value, scale, total) for value, total in zip(values, sums, strict=True)]

    for row, total in enumerate(accumulate(builder, blocks, [constant(0.0, floats)] * rows, step)):
        address = builder.add(out, builder.mul(stride, I64(row)))
        builder.store(total, builder.inttoptr(address, POINTER), align=4)


def _at(builder: Any, base: Any, index: Any, size: int) -> Any:
    return builder.inttoptr(builder.add(base, builder.mul(index, I64(size))), POINTER)


def _prefetch(builder: Any, pointer: Any, size: int, rows: int) -> None:
    """Ask for the weights of a later block, beyond a tile's end those of the next tile.

    The arithmetic of several rows fills the reorder window, so loads alone start too late: without this, 5 to 8 rows
    take 1.3 to 1.5 times as long (AMD Zen 4). Into the level-2 cache, because the records of several rows need the
    first one: 7 % faster at 5 to 8 rows than into level 1, which is 2 % faster for one row. 4 or 12 KiB ahead is no
    better for several rows, and costs one row 6 %.
    """
    level = L1 if rows < 3 else L2
    for line in range(0, size, 64):
        ahead = builder.gep(pointer, [I64(AHEAD + line)], source_etype=I8)
        call(builder, "llvm.prefetch.p0", ir.VoidType(), ahead, I32(0), I32(level), I32(1))


def _codes(builder: Any, isa: InstructionSet, bits: int, pointer: Any) -> list[Any]:
    """Eight vectors, vector j with k = 4j .. 4j + 3 of the rows."""
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


def _block_sum(builder: Any, isa: InstructionSet, bits: int, codes: list[Any], base: Any, record: int) -> Any:
    """2**e * (w . q) of one row, exact."""
    total = splat(builder, read(builder, base, I32, record + START), isa.lanes)
    bytes4 = ir.VectorType(I8, 4 * isa.lanes)
    for j, code in enumerate(codes):
        group = splat(builder, read(builder, base, I32, record + 4 * j), isa.lanes)
        total = dot4(builder, isa, bits, total, code, builder.bitcast(group, bytes4))
    shift = splat(builder, read(builder, base, F32, record + SHIFT), isa.lanes)
    return builder.fsub(builder.bitcast(total, ir.VectorType(F32, isa.lanes)), shift)
