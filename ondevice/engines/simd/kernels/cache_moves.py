"""Moves rows of an int8 cache, whose numbers lie between those of other rows: see `integer_tile`."""

from __future__ import annotations

import numpy as np

from ondevice.engines.simd.kernels.integer_tile import UNIT
from ondevice.engines.simd.kernels.jit import kernel
from ondevice.engines.simd.kernels.memory import read_i8, read_i32, write_i8, write_i32
from ondevice.engines.simd.kernels.sizes import TILE


@kernel
def move_keys(cache: int, source: np.ndarray, first: int, kv_heads: int, head_dim: int) -> None:
    """Copy the rows `source`, which ascend, to those from `first` on, none of which lies behind its source."""
    tile = TILE * (head_dim + 4)
    for i in range(len(source)):
        for head in range(kv_heads):
            start = cache + UNIT * (head_dim + 4) * head
            old, new = source[i], first + i
            at = start + old // UNIT * kv_heads * 2 * tile + old % UNIT // TILE * tile + 4 * (old % TILE)
            to = start + new // UNIT * kv_heads * 2 * tile + new % UNIT // TILE * tile + 4 * (new % TILE)
            for offset in range(0, tile, 4 * TILE):  # the last is the scale
                write_i32(to + offset, read_i32(at + offset))


@kernel
def move_values(cache: int, source: np.ndarray, first: int, kv_heads: int, head_dim: int) -> None:
    """`move_keys` of values."""
    size = UNIT * (head_dim + 4)
    for i in range(len(source)):
        for head in range(kv_heads):
            old, new = source[i], first + i
            at, to = cache + size * (old // UNIT * kv_heads + head), cache + size * (new // UNIT * kv_heads + head)
            old, new = old % UNIT, new % UNIT
            write_i32(to + UNIT * head_dim + 4 * new, read_i32(at + UNIT * head_dim + 4 * old))
            at, to = at + old // 4 * 4 * TILE + old % 4, to + new // 4 * 4 * TILE + new % 4
            for tile in range(0, UNIT * head_dim, UNIT * TILE):
                for offset in range(tile, tile + 4 * TILE, 4):
                    write_i8(to + offset, read_i8(at + offset))
