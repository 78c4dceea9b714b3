"""Weights of 4 bits: in a tile, in a row of a table, and from one to the other.

A block of a tile is 4 vectors of 64 bytes, vector j with k = 8j .. 8j + 3 of the 16 rows in its low nibbles and
k = 8j + 4 .. 8j + 7 in the high ones.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir

from ondevice.engines.simd.kernels.instruction_set import InstructionSet
from ondevice.engines.simd.kernels.jit import kernel
from ondevice.engines.simd.kernels.memory import read_i64, write_i32
from ondevice.engines.simd.kernels.sizes import TILE
from ondevice.engines.simd.kernels.vector import I8, I16, constant, full, load_int4, read

_ZERO = np.float32(8.0)
_HALVES, _BYTES, _NIBBLES = 0x0000FFFF0000FFFF, 0x00FF00FF00FF00FF, 0x0F0F0F0F0F0F0F0F
_ZEROS = -0x7777777777777778
"""Eight bytes of zero weights: 0x88 each."""


def codes(builder: Any, isa: InstructionSet, pointer: Any, offset: int) -> list[Any]:
    """Weights of a block as eight vectors of bytes, vector j with k = 4j .. 4j + 3 of the output rows.

    Args:
        offset: bytes from the first of 64 bytes to those of these output rows.
    """
    kind = ir.VectorType(I8, 4 * isa.lanes)
    packed = [read(builder, pointer, kind, offset + 4 * TILE * j) for j in range(4)]
    return [code for pair in packed for code in (builder.and_(pair, constant(15, kind)), _high(builder, isa, pair))]


def split_codes(builder: Any, isa: InstructionSet, pointer: Any, offset: int, ways: int) -> list[tuple[Any, int]]:
    """As `int2.split_codes`: with 2 ways, which bytes without a sign can go, high nibbles stay where they are."""
    if ways == 1:
        return [(code, 0) for code in codes(builder, isa, pointer, offset)]
    kind = ir.VectorType(I8, 4 * isa.lanes)
    packed = [read(builder, pointer, kind, offset + 4 * TILE * j) for j in range(4)]
    return [(builder.and_(pair, constant(15 << place, kind)), place) for pair in packed for place in (0, 4)]


def _high(builder: Any, isa: InstructionSet, pairs: Any) -> Any:
    """The high nibbles of bytes. x86 shifts words alone, and of a shift of bytes LLVM makes what it likes with GFNI."""
    if isa.by_lane:
        return builder.lshr(pairs, constant(4, pairs.type))
    words = ir.VectorType(I16, pairs.type.count // 2)
    shifted = builder.bitcast(builder.lshr(builder.bitcast(pairs, words), constant(4, words)), pairs.type)
    return builder.and_(shifted, constant(15, pairs.type))


@kernel
def weights4(row: int, index: int) -> Any:
    """Sixteen weights from `index` on of a row at an address, without their scale: float32[16]."""
    return load_int4(row + index // 2) - full(_ZERO)


@kernel
def spread(halves: int) -> Any:
    """The nibbles of the low 16 bits of each 32, one to a byte."""
    pairs = (halves | (halves << 8)) & _BYTES
    return (pairs | (pairs << 4)) & _NIBBLES


@kernel
def pack_tile4(codes: int, rows: int, blocks: int, out: int) -> None:
    """Pack codes uint8[rows, blocks, 16], low nibbles first, into uint8[blocks, 4, 64].

    Args:
        codes: address, a multiple of 8.
        rows: 1..16; those that are missing become zero weights.
        out: address.
    """
    stride = 16 * blocks
    for at in range(0, stride, 8):
        to = out + 16 * at
        for row in range(TILE):
            eight = read_i64(codes + row * stride + at) if row < rows else _ZEROS
            packed = spread(eight & _HALVES) | (spread((eight >> 16) & _HALVES) << 4)
            write_i32(to + 4 * row, np.int32(packed))
            write_i32(to + 64 + 4 * row, np.int32(packed >> 32))
