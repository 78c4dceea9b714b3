"""Rearranges 16 rows of a matrix from the layout of MatMulNBits into a tile; `tile` describes it."""

from __future__ import annotations

import numpy as np

from ondevice.engines.simd.kernels.jit import kernel
from ondevice.engines.simd.kernels.tile import TILE


@kernel
def pack_tile4(codes: np.ndarray, first: int, out: np.ndarray) -> None:
    """Pack rows first..first + 15 of int4 codes uint8[rows, blocks, 16] into out uint8[blocks, 4, 64].

    Rows beyond the last become zero weights.
    """
    rows, blocks = codes.shape[0], codes.shape[1]
    for row in range(TILE):
        for block in range(blocks):
            for j in range(4):
                for pair in range(2):
                    low, high = np.uint8(0x88), np.uint8(0x88)
                    if first + row < rows:
                        low = codes[first + row, block, 4 * j + pair]
                        high = codes[first + row, block, 4 * j + pair + 2]
                    at = 4 * row + 2 * pair
                    out[block, j, at] = (low & 15) | ((high & 15) << 4)
                    out[block, j, at + 1] = (low >> 4) | (high & 240)


@kernel
def pack_tile8(codes: np.ndarray, first: int, out: np.ndarray) -> None:
    """Pack rows first..first + 15 of int8 codes uint8[rows, blocks, 32] into out uint8[blocks, 8, 64].

    Rows beyond the last become zero weights.
    """
    rows, blocks = codes.shape[0], codes.shape[1]
    for row in range(TILE):
        for block in range(blocks):
            for k in range(32):
                code = codes[first + row, block, k] if first + row < rows else np.uint8(128)
                out[block, k // 4, 4 * row + k % 4] = code
