"""Weights of 2 bits: in a tile, in a row of a table, and from one to the other.

A block of a tile is 2 vectors of 64 bytes, vector j with k = 16j .. 16j + 3 of the 16 rows in the lowest two bits of
its bytes, k = 16j + 4 .. 16j + 7 in the next two, and so on: as the bytes of a row have them, four bytes turned.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types

from ondevice.engines.simd.kernels.instruction_set import InstructionSet
from ondevice.engines.simd.kernels.jit import emits, kernel
from ondevice.engines.simd.kernels.memory import read_i32, write_i32
from ondevice.engines.simd.kernels.sizes import TILE
from ondevice.engines.simd.kernels.vector import (
    I8,
    I16,
    I32,
    LANES,
    VF32,
    constant,
    floats16,
    full,
    pointer_to,
    read,
    splat,
)

_ZERO = np.float32(2.0)
_ZEROS = 0xAAAAAAAA
"""Sixteen zero weights."""

Split = list[tuple[Any, int]]


def split_codes(builder: Any, isa: InstructionSet, pointer: Any, offset: int, ways: int) -> Split:
    """Weights of a block as eight vectors of bytes, each with the power of two that its codes are multiplied with.

    A mask leaves two bits where they are, and a shift is an instruction more: so with several ways to add products up,
    codes at different places of a byte go different ways.

    Args:
        offset: bytes from the first of 64 bytes to those of these output rows.
        ways: 1 where all codes must be at the lowest bits; with 2, every second one may be two bits up; with 4, a code
            is at any place, which bytes without a sign can be.
    """
    kind = ir.VectorType(I8, 4 * isa.lanes)
    found: Split = []
    for vector in (read(builder, pointer, kind, offset + 4 * TILE * j) for j in range(2)):
        if ways == 4:
            found += [(builder.and_(vector, constant(3 << place, kind)), place) for place in (0, 2, 4, 6)]
            continue
        for half in (vector, _shifted(builder, isa, vector, 4)):
            found.append((builder.and_(half, constant(3, kind)), 0))
            if ways == 2:
                found.append((builder.and_(half, constant(12, kind)), 2))
            else:
                found.append((builder.and_(_shifted(builder, isa, half, 2), constant(3, kind)), 0))
    return found


def _shifted(builder: Any, isa: InstructionSet, vector: Any, bits: int) -> Any:
    """Bytes shifted right; on x86, whose shifts take words, with the neighbour's bits above them."""
    if isa.by_lane:
        return builder.lshr(vector, constant(bits, vector.type))
    words = ir.VectorType(I16, vector.type.count // 2)
    return builder.bitcast(builder.lshr(builder.bitcast(vector, words), constant(bits, words)), vector.type)


@emits(floats16, types.int64)
def load_int2(builder: Any, address: Any) -> Any:
    """Load 16 codes of 2 bits, the lowest of a byte first, as float32."""
    four = builder.load(pointer_to(builder, address), typ=I32, align=1)
    wide = ir.VectorType(I32, LANES)
    places = ir.Constant(wide, [2 * lane for lane in range(LANES)])
    codes = builder.and_(builder.lshr(splat(builder, four, LANES), places), constant(3, wide))
    return builder.sitofp(codes, VF32)


@kernel
def weights2(row: int, index: int) -> Any:
    """Sixteen weights from `index` on of a row at an address, without their scale: float32[16]."""
    return load_int2(row + index // 4) - full(_ZERO)


@kernel
def pack_tile2(codes: int, rows: int, blocks: int, out: int) -> None:
    """Pack codes uint8[rows, blocks, 8] into uint8[blocks, 2, 64]; the arguments are those of `int4.pack_tile4`."""
    stride = 8 * blocks
    for at in range(0, stride, 4):
        to = out + 16 * at
        for row in range(TILE):
            four = np.int64(read_i32(codes + row * stride + at)) & 0xFFFFFFFF if row < rows else np.int64(_ZEROS)
            write_i32(to + 4 * row, turned(four))


@kernel
def turned(codes: int) -> Any:
    """Sixteen codes, k = 4b + f at place f of byte b, with k = 4f + b there: the 4 x 4 matrix of codes, transposed."""
    swapped = (codes ^ (codes >> 6)) & 0x00CC00CC
    codes ^= swapped ^ (swapped << 6)
    swapped = (codes ^ (codes >> 12)) & 0x0000F0F0
    return np.int32(codes ^ swapped ^ (swapped << 12))
