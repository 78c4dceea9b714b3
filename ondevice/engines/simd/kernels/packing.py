"""From MatMulNBits' layout to tiles: see `tile`."""

from __future__ import annotations

import numpy as np

from ondevice.engines.simd.kernels.jit import kernel
from ondevice.engines.simd.kernels.tile import TILE


@kernel
def pack_tile4(codes: np.ndarray, first: int, out: np.ndarray) -> None:
    """codes uint8[rows, blocks, 16], two weights in a byte, from row `first` -> out uint8[blocks, 4, 64].

    Rows beyond the last are zero weights.
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
    """codes uint8[rows, blocks, 32] from row `first` -> out uint8[blocks, 8, 64]; rows beyond the last are zero."""
    rows, blocks = codes.shape[0], codes.shape[1]
    for row in range(TILE):
        for block in range(blocks):
            for k in range(32):
                code = codes[first + row, block, k] if first + row < rows else np.uint8(128)
                out[block, k // 4, 4 * row + k % 4] = code
