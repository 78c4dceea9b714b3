"""Rearranges up to 16 rows of a matrix from the layout of MatMulNBits into a tile; `tile` describes it.

Eight bytes of a row at a time, and scales here too: with numpy and byte by byte it took several times as long.
"""

from __future__ import annotations

import numpy as np

from ondevice.engines.simd.kernels.codes import INT4_NUMBER
from ondevice.engines.simd.kernels.int4 import pack_tile4
from ondevice.engines.simd.kernels.int8 import pack_tile8
from ondevice.engines.simd.kernels.jit import kernel
from ondevice.engines.simd.kernels.memory import read_f32, write_f32
from ondevice.engines.simd.kernels.vector import full, load, store, store_half

_ZERO = np.float32(0.0)


@kernel
def pack_tile(number: int, codes: int, rows: int, blocks: int, out: int) -> None:
    """Pack codes of the format with that number; the other arguments are those of `int4.pack_tile4`."""
    if number == INT4_NUMBER:
        pack_tile4(codes, rows, blocks, out)
    else:
        pack_tile8(codes, rows, blocks, out)


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
