"""Rearranges up to 16 rows of a matrix from the layout of MatMulNBits into a tile; `tile` describes it.

Eight bytes of a row at a time, and scales here too: with numpy and byte by byte it took several times as long.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ondevice.engines.simd.kernels.jit import kernel
from ondevice.engines.simd.kernels.memory import read_f32, read_i64, write_f32, write_i32
from ondevice.engines.simd.kernels.tile import TILE
from ondevice.engines.simd.kernels.vector import full, load, store, store_half

_ZERO = np.float32(0.0)
_HALVES, _BYTES, _NIBBLES = 0x0000FFFF0000FFFF, 0x00FF00FF00FF00FF, 0x0F0F0F0F0F0F0F0F
_ZERO4, _ZERO8 = -0x7777777777777778, -0x7F7F7F7F7F7F7F80
"""Eight bytes of zero weights: 0x88 and 0x80 each."""


@kernel
def spread(halves: int) -> Any:
    """The nibbles of the low 16 bits of each 32, one to a byte."""
    pairs = (halves | (halves << 8)) & _BYTES
    return (pairs | (pairs << 4)) & _NIBBLES


@kernel
def pack_tile4(codes: int, rows: int, blocks: int, out: int) -> None:
    """Pack int4 codes uint8[rows, blocks, 16] into uint8[blocks, 4, 64].

    Args:
        codes: address, a multiple of 8.
        rows: 1..16; those that are missing become zero weights.
        out: address.
    """
    stride = 16 * blocks
    for at in range(0, stride, 8):
        to = out + 16 * at
        for row in range(TILE):
            eight = read_i64(codes + row * stride + at) if row < rows else _ZERO4
            packed = spread(eight & _HALVES) | (spread((eight >> 16) & _HALVES) << 4)
            write_i32(to + 4 * row, np.int32(packed))
            write_i32(to + 64 + 4 * row, np.int32(packed >> 32))


@kernel
def pack_tile8(codes: int, rows: int, blocks: int, out: int) -> None:
    """`pack_tile4` of int8 codes uint8[rows, blocks, 32], into uint8[blocks, 8, 64]."""
    stride = 32 * blocks
    for at in range(0, stride, 8):
        to = out + 16 * at
        for row in range(TILE):
            eight = read_i64(codes + row * stride + at) if row < rows else _ZERO8
            write_i32(to + 4 * row, np.int32(eight))
            write_i32(to + 64 + 4 * row, np.int32(eight >> 32))


@kernel
def pack_scales(scales: int, rows: int, blocks: int, out: int, scratch: int) -> None:
    """Round scales float32[rows, blocks] to fp16[blocks, 16]; zeros for rows that are missing.

    Args:
        scratch: address of float32[16].
    """
    store(scratch, full(_ZERO))
    for block in range(blocks):
        for row in range(rows):
            write_f32(scratch + 4 * row, read_f32(scales + 4 * (row * blocks + block)))
        store_half(out + 32 * block, load(scratch))
