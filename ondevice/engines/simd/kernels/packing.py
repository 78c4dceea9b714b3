"""Rearranges up to 16 rows of a matrix from the layout of a file into a tile; `tile` and its siblings describe it.

Eight bytes of a row at a time, and scales here too: with numpy and byte by byte it took several times as long.
"""

from __future__ import annotations

import numpy as np

from ondevice.engines.simd.kernels.int2 import pack_tile2
from ondevice.engines.simd.kernels.int4 import pack_tile4
from ondevice.engines.simd.kernels.int8 import pack_tile8
from ondevice.engines.simd.kernels.jit import kernel
from ondevice.engines.simd.kernels.memory import read_f32, read_i16, read_i32, write_f32, write_i16, write_i32
from ondevice.engines.simd.kernels.sizes import BLOCK, TILE
from ondevice.engines.simd.kernels.vector import full, load, store, store_half

_ZERO = np.float32(0.0)


@kernel
def pack_tile(bits: int, codes: int, rows: int, blocks: int, out: int) -> None:
    """Pack weights of `bits` bits; the other arguments are those of `int4.pack_tile4`."""
    if bits == 4:
        pack_tile4(codes, rows, blocks, out)
    elif bits == 8:
        pack_tile8(codes, rows, blocks, out)
    elif bits == 2:
        pack_tile2(codes, rows, blocks, out)
    else:
        pack_numbers(bits // 8, codes, rows, BLOCK * blocks, out)


@kernel
def pack_numbers(size: int, numbers: int, rows: int, width: int, out: int) -> None:
    """Plain numbers [rows, width] of 2 or 4 bytes, turned to [width, 16]; the rest of 16 rows are zeros already."""
    for k in range(width):
        for row in range(rows):
            at, to = numbers + size * (row * width + k), out + size * (TILE * k + row)
            if size == 2:
                write_i16(to, read_i16(at))
            else:
                write_i32(to, read_i32(at))


@kernel
def pack_epilogue(factors: int, step: float, rows: int, out: int) -> None:
    """The epilogue of a tile, see `step_tile`: float32[rows] factors, the step for all; the rest are zeros already."""
    for row in range(rows):
        write_f32(out + 4 * row, read_f32(factors + 4 * row))
        write_f32(out + 4 * (TILE + row), step)


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
