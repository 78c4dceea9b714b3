"""The layout of weights in a tile, for weights of 2, 4, 8, 16 and 32 bits, and how they are packed and unpacked.

A packed matrix is tiles of 16 output rows n; a tile is blocks of 32 inputs k. A block of b-bit weights, b < 16, is b
vectors of 64 bytes. Row n has bytes 4n .. 4n + 3 of each vector, so a CPU with narrower vectors reads a part of each,
and one layout serves all. Vector j holds these k in its four bytes per row:

    8 bits   k = 4j .. 4j + 3                                                           j = 0..7
    4 bits   k = 8j .. 8j + 3 in the low nibbles, 8j + 4 .. 8j + 7 in the high ones     j = 0..3
    2 bits   k = 16j .. 16j + 3 in the lowest two bits, the next four k in the next two bits, and so on     j = 0..1

A code c stands for the weight c - 2**(b - 1), times a scale. Scales of weights in groups of 32 are fp16[block][16]. If
the groups have minimums, c stands for c times a scale plus a minimum, and both are fp16[block][2][16]: a cache line per
block. In a table format, c stands for a number of its table (`weight_format.TABLES`), times a scale. A matrix with one
scale per row has an epilogue for each tile instead: see `epilogue_tiles`. Weights of 16 bits (bfloat16) and 32 bits
(float32) are plain numbers [32][16] per block, k by k.

In a file, a row's codes lie one after the other, the lowest bits of a byte first: uint8[rows, width * b / 8].
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types

from ondevice.bundle_format.weight_format import (
    E2M1,
    INT4,
    INT4_AFFINE,
    INT4_TABLE,
    INT8,
    IQ4_NL,
    MXFP4,
    WeightFormat,
)
from ondevice.engines.simd.kernels.contract.instruction_sets import LANES, InstructionSet
from ondevice.engines.simd.kernels.contract.matrices import BLOCK, TILE
from ondevice.engines.simd.kernels.isa.dot import interleaved
from ondevice.engines.simd.kernels.isa.jit import emits
from ondevice.engines.simd.kernels.isa.memory import (
    read_f32,
    read_i16,
    read_i32,
    read_i64,
    write_f32,
    write_i16,
    write_i32,
)
from ondevice.engines.simd.kernels.isa.shuffle import byte_shuffle, level_table, look_up, look_up_wide
from ondevice.engines.simd.kernels.isa.vector import (
    I8,
    I16,
    I32,
    VF32,
    constant,
    floats16,
    full,
    load,
    load_int4,
    load_int8,
    pointer_to,
    read,
    splat,
    store,
    store_half,
)
from ondevice.native.functions import kernel

Split = list[tuple[Any, int]]
"""Vectors of codes, each with the exponent of the power of two that its codes are multiplied by."""


# 2 bits

_INT2_ZERO = np.float32(2.0)
"""The code of a zero weight."""
_INT2_ZERO_WEIGHTS = 0xAAAAAAAA
"""Four bytes with 16 zero weights."""


def split_int2_codes(builder: Any, isa: InstructionSet, pointer: Any, offset: int, ways: int) -> Split:
    """Unpack a block of 2-bit weights into eight vectors of bytes; in some, codes stay shifted up within their byte.

    A mask leaves two bits where they are; to shift them down takes one more instruction. So products of codes at
    different bit positions are added in different sums ("ways"), and a way's sum is shifted down once at the end.

    Args:
        pointer: of the block.
        offset: bytes from the start of a 64-byte vector to the part of these output rows.
        ways: 1 needs all codes at bit 0. 2 allows bits 0 and 2. 4 allows all positions, for unsigned bytes only.
    """
    kind = ir.VectorType(I8, 4 * isa.lanes)
    found: Split = []
    for vector in (read(builder, pointer, kind, offset + 4 * TILE * j) for j in range(2)):
        if ways == 4:
            found += [(builder.and_(vector, constant(3 << place, kind)), place) for place in (0, 2, 4, 6)]
            continue
        for half in (vector, _shift_bytes(builder, isa, vector, 4)):
            found.append((builder.and_(half, constant(3, kind)), 0))
            if ways == 2:
                found.append((builder.and_(half, constant(12, kind)), 2))
            else:
                found.append((builder.and_(_shift_bytes(builder, isa, half, 2), constant(3, kind)), 0))
    return found


def _shift_bytes(builder: Any, isa: InstructionSet, vector: Any, bits: int) -> Any:
    """Bytes shifted right. x86 shifts 16-bit words only, so there a byte's upper bits come from its neighbour.

    A shift of bytes is not written there, because LLVM turns it into GFNI instructions.
    """
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
def int2_weights(row: int, index: int) -> Any:
    """Weights index..index + 15 of a row in the layout of a file, float32[16] without scale."""
    return load_int2(row + index // 4) - full(_INT2_ZERO)


@kernel
def pack_int2_tile(codes: int, rows: int, blocks: int, out: int) -> None:
    """Pack codes uint8[rows, blocks, 8] into uint8[blocks, 2, 64]. Arguments as in `pack_int4_tile`."""
    stride = 8 * blocks
    for at in range(0, stride, 4):
        to = out + 16 * at
        for row in range(TILE):
            four = (
                np.int64(read_i32(codes + row * stride + at)) & 0xFFFFFFFF
                if row < rows
                else np.int64(_INT2_ZERO_WEIGHTS)
            )
            write_i32(to + 4 * row, transpose_int2(four))


@kernel
def transpose_int2(codes: int) -> Any:
    """Transpose the 4 x 4 matrix of 16 codes: k = 4b + f, at field f of byte b in a file, goes to field b of byte f."""
    swapped = (codes ^ (codes >> 6)) & 0x00CC00CC
    codes ^= swapped ^ (swapped << 6)
    swapped = (codes ^ (codes >> 12)) & 0x0000F0F0
    return np.int32(codes ^ swapped ^ (swapped << 12))


# 4 bits

_INT4_ZERO = np.float32(8.0)
"""The code of a zero weight."""
_INT4_ZERO_WEIGHTS = -0x7777777777777778
"""Eight bytes with 16 zero weights: 0x88 each."""
_HALVES, _BYTES, _NIBBLES = 0x0000FFFF0000FFFF, 0x00FF00FF00FF00FF, 0x0F0F0F0F0F0F0F0F


def split_int4_codes(builder: Any, isa: InstructionSet, pointer: Any, offset: int, ways: int) -> Split:
    """As `split_int2_codes`. With 2 ways, for unsigned bytes only, high nibbles stay where they are."""
    if ways == 1:
        return [(code, 0) for code in unpack(builder, isa, INT4, pointer, offset)]
    packed = _packed(builder, isa, pointer, offset)
    return [(builder.and_(pairs, constant(15 << place, pairs.type)), place) for pairs in packed for place in (0, 4)]


def _packed(builder: Any, isa: InstructionSet, pointer: Any, offset: int) -> list[Any]:
    """The four vectors of a block of 4-bit weights, two codes in a byte. Arguments as in `unpack`."""
    return [read(builder, pointer, ir.VectorType(I8, 4 * isa.lanes), offset + 4 * TILE * j) for j in range(4)]


def _nibbles(builder: Any, isa: InstructionSet, pairs: Any) -> list[Any]:
    """The low and the high nibbles of bytes."""
    low, high = builder.and_(pairs, constant(15, pairs.type)), _shift_bytes(builder, isa, pairs, 4)
    return [low, high if isa.by_lane else builder.and_(high, constant(15, pairs.type))]


def _levels(builder: Any, isa: InstructionSet, pairs: Any, number: int) -> list[Any]:
    """The levels of the low and of the high nibbles of bytes, in the table of this number: signed bytes, or 128 more if
    the instruction set needs unsigned ones. Products with them are those of 8-bit weights.
    """
    table = level_table(isa, number, pairs.type.count)
    if byte_shuffle() == "vpermb":  # the table is there four times, so no mask: as many instructions as `_nibbles`
        low, high = pairs, _shift_bytes(builder, isa, pairs, 4)
        return [look_up_wide(builder, table, low), look_up_wide(builder, table, high)]
    return [look_up(builder, table, codes) for codes in _nibbles(builder, isa, pairs)]


def _bytes(builder: Any, isa: InstructionSet, codes: Any) -> list[Any]:
    """Codes of 8 bits, as signed bytes if the instruction set needs these."""
    return [builder.xor(codes, constant(128, codes.type)) if isa.signed else codes]


@kernel
def int4_weights(row: int, index: int) -> Any:
    """Weights index..index + 15 of a row in the layout of a file, float32[16] without scale."""
    return load_int4(row + index // 2) - full(_INT4_ZERO)


@kernel
def spread_nibbles(halves: int) -> Any:
    """Spread the four nibbles in the low 16 bits of each 32-bit half over its four bytes."""
    pairs = (halves | (halves << 8)) & _BYTES
    return (pairs | (pairs << 4)) & _NIBBLES


@kernel
def pack_int4_tile(codes: int, rows: int, blocks: int, out: int) -> None:
    """Pack codes uint8[rows, blocks, 16], low nibbles first, into uint8[blocks, 4, 64].

    Args:
        codes: address of the rows in a file, a multiple of 8.
        rows: 1..16; missing rows become zero weights.
        blocks: blocks of a row.
        out: address of the tile.
    """
    stride = 16 * blocks
    for at in range(0, stride, 8):
        to = out + 16 * at
        for row in range(TILE):
            eight = read_i64(codes + row * stride + at) if row < rows else _INT4_ZERO_WEIGHTS
            packed = spread_nibbles(eight & _HALVES) | (spread_nibbles((eight >> 16) & _HALVES) << 4)
            write_i32(to + 4 * row, np.int32(packed))
            write_i32(to + 64 + 4 * row, np.int32(packed >> 32))


# 8 bits

_INT8_ZERO = np.float32(128.0)
"""The code of a zero weight."""
_INT8_ZERO_WEIGHTS = -0x7F7F7F7F7F7F7F80
"""Eight bytes with 8 zero weights: 0x80 each."""


def paired_codes(
    builder: Any, isa: InstructionSet, form: WeightFormat, pointer: Any, offset: int
) -> list[tuple[Any, Any]]:
    """A block of weights for `dot.multiply_pairs`: four pairs of vectors, of output rows 0 and 1, and 2 and 3, with
    eight numbers of each row. These are k = 0-3 and 8-11, 4-7 and 12-15, 16-19 and 24-27, 20-23 and 28-31.
    """
    if form == INT8:
        codes = unpack(builder, isa, INT8, pointer, offset)
        return [interleaved(builder, codes[first], codes[first + 2]) for first in (0, 1, 4, 5)]
    packed, halves, found = _packed(builder, isa, pointer, offset), _UNPACK[form], []
    for j in (0, 2):  # two vectors are interleaved before each becomes two
        rows = [halves(builder, isa, own) for own in interleaved(builder, packed[j], packed[j + 1])]
        found += list(zip(*rows, strict=True))
    return found


def split_int8_codes(builder: Any, isa: InstructionSet, pointer: Any, offset: int, ways: int) -> Split:
    """As `split_int2_codes`, with one way."""
    return [(code, 0) for code in unpack(builder, isa, INT8, pointer, offset)]


@kernel
def int8_weights(row: int, index: int) -> Any:
    """Weights index..index + 15 of a row in the layout of a file, float32[16] without scale."""
    return load_int8(row + index) - full(_INT8_ZERO)


@kernel
def pack_int8_tile(codes: int, rows: int, blocks: int, out: int) -> None:
    """Pack codes uint8[rows, blocks, 32] into uint8[blocks, 8, 64]. Arguments as in `pack_int4_tile`."""
    stride = 32 * blocks
    for at in range(0, stride, 8):
        to = out + 16 * at
        for row in range(TILE):
            eight = read_i64(codes + row * stride + at) if row < rows else _INT8_ZERO_WEIGHTS
            write_i32(to + 4 * row, np.int32(eight))
            write_i32(to + 64 + 4 * row, np.int32(eight >> 32))


# All widths

_UNPACK: dict[WeightFormat, Callable[[Any, InstructionSet, Any], list[Any]]] = {
    INT4: _nibbles,
    INT4_AFFINE: _nibbles,
    INT4_TABLE: partial(_levels, number=IQ4_NL),
    MXFP4: partial(_levels, number=E2M1),
    INT8: _bytes,
}


def unpack(
    builder: Any, isa: InstructionSet, form: WeightFormat, pointer: Any, offset: int, lines: range | None = None
) -> list[Any]:
    """Unpack a block of weights in groups into eight vectors of bytes, vector j with k = 4j .. 4j + 3 of the rows.

    Args:
        pointer: of the block.
        offset: bytes from the start of a 64-byte vector to the part of these output rows.
        lines: the 64-byte vectors that are unpacked, in two vectors each of 4 bits, one of 8; None for all.
    """
    kind = ir.VectorType(I8, 4 * isa.lanes)
    packed = [read(builder, pointer, kind, offset + 4 * TILE * line) for line in lines or range(form.bits)]
    return [codes for line in packed for codes in _UNPACK[form](builder, isa, line)]


UNPACK_SPLIT = {2: split_int2_codes, 4: split_int4_codes, 8: split_int8_codes}
"""Bits -> function that unpacks a block into eight vectors, whose codes may stay shifted up within their bytes."""


def most_ways(isa: InstructionSet, bits: int) -> int:
    """The most ways into which `UNPACK_SPLIT` can split the codes of a block."""
    if bits == 2:
        return 2 if isa.signed else 4
    return 1 if bits == 8 or isa.signed else 2


@kernel
def pack_tile(bits: int, codes: int, rows: int, blocks: int, out: int) -> None:
    """Pack up to 16 rows of weights of `bits` bits. Other arguments as in `pack_int4_tile`.

    The packing kernels move eight bytes of a row at a time: numpy, byte by byte, took several times as long.
    """
    if bits == 4:
        pack_int4_tile(codes, rows, blocks, out)
    elif bits == 8:
        pack_int8_tile(codes, rows, blocks, out)
    elif bits == 2:
        pack_int2_tile(codes, rows, blocks, out)
    else:
        pack_numbers(bits // 8, codes, rows, BLOCK * blocks, out)


@kernel
def pack_numbers(size: int, numbers: int, rows: int, width: int, out: int) -> None:
    """Transpose plain numbers [rows, width] of `size` bytes, 2 or 4, to [width, 16]. Missing rows are zeros already."""
    for k in range(width):
        for row in range(rows):
            at, to = numbers + size * (row * width + k), out + size * (TILE * k + row)
            if size == 2:
                write_i16(to, read_i16(at))
            else:
                write_i32(to, read_i32(at))


@kernel
def pack_epilogue(factors: int, step: float, rows: int, out: int) -> None:
    """Write the epilogue of a tile (see `epilogue_tiles`): float32[rows] factors, and one step for all rows.

    Missing rows are zeros already.
    """
    for row in range(rows):
        write_f32(out + 4 * row, read_f32(factors + 4 * row))
        write_f32(out + 4 * (TILE + row), step)


@kernel
def pack_scales(scales: int, rows: int, blocks: int, out: int, stride: int, scratch: int) -> None:
    """Round scales or minimums float32[rows, blocks] to fp16 and transpose them to [blocks, 16], with zeros for missing
    rows.

    Args:
        stride: bytes from a block of `out` to the next.
        scratch: address of working memory, float32[16].
    """
    store(scratch, full(np.float32(0.0)))
    for block in range(blocks):
        for row in range(rows):
            write_f32(scratch + 4 * row, read_f32(scales + 4 * (row * blocks + block)))
        store_half(out + stride * block, load(scratch))
