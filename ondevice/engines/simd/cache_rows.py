"""What a layer's keys, or its values, are made of in a cache."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ondevice.engines.kv_cache import SINGLE, Units, Views
from ondevice.engines.protocol import KVCacheType
from ondevice.engines.simd.kernels.cache_moves import move_keys, move_values
from ondevice.engines.simd.kernels.integer_tile import UNIT
from ondevice.engines.simd.kernels.sizes import TILE
from ondevice.manifest import Layer

BITS: dict[KVCacheType, int] = {"fp16": 16, "int8": 8}
"""Of a number."""


class IntegerUnits(Units):
    """The units of `kernels.integer_tile`."""

    positions = UNIT

    def move(self, keys: NDArray[Any], values: NDArray[Any], source: NDArray[np.int64], first: int) -> None:
        assert keys.flags.c_contiguous
        assert values.flags.c_contiguous
        if min(first, source.min()) < 0 or max(first + len(source), source.max() + 1) > len(keys) * UNIT:
            raise ValueError("rows beyond the cache")
        kv_heads, size = keys.shape[1:]
        places = np.ascontiguousarray(source, np.int64)
        shape = (kv_heads, size // UNIT - 4)
        move_keys(keys.ctypes.data, places, first, *shape)
        move_values(values.ctypes.data, places, first, *shape)


UNITS: dict[KVCacheType, Units] = {"fp16": SINGLE, "int8": IntegerUnits()}
VIEWS: dict[KVCacheType, Views] = {"fp16": Views(), "int8": Views(align=UNIT, step=UNIT)}
"""Whole units, from a multiple of their positions on."""


def unit_type(kind: KVCacheType, kv_heads: int, head_dim: int) -> np.dtype[Any]:
    """The dtype of a unit: fp16 numbers of one position, or codes and float32 scales of UNIT positions.

    int8 has one scale per KV head. Keys and values are normed, so that blocks of 32 with scales of their own err only
    1.2 times less; a scale of a whole head stays out of the sums over its numbers.
    """
    if kind == "fp16":
        return np.dtype((np.float16, (kv_heads, head_dim)))
    return np.dtype((np.uint8, (kv_heads, UNIT * (head_dim + 4))))


def layer_unit_type(kind: KVCacheType, layer: Layer) -> np.dtype[Any]:
    """`unit_type` of a layer that owns a cache."""
    return unit_type(kind, layer.kv_heads, layer.head_dim)


def read_keys(keys: NDArray[Any], start: int, stop: int) -> NDArray[np.float32]:
    """The keys that a cache of either kind holds from `start`, a multiple of UNIT, to `stop`.

    Returns:
        float32[stop - start, kv_heads, head_dim]
    """
    if keys.dtype == np.float16:
        return keys[start:stop].astype(np.float32)
    units = keys[start // UNIT : -(-stop // UNIT)]
    count, kv_heads, size = units.shape
    tiles = units.reshape(count, kv_heads, 2, size // 2)
    dims = size // UNIT - 4
    codes = tiles[..., : -4 * TILE].reshape(count, kv_heads, 2, dims // 4, TILE, 4)
    rows = codes.transpose(0, 2, 4, 1, 3, 5).reshape(count * UNIT, kv_heads, dims).astype(np.float32) - np.float32(128)
    scales = np.ascontiguousarray(tiles[..., -4 * TILE :]).view(np.float32)
    rows *= scales.transpose(0, 2, 3, 1).reshape(count * UNIT, kv_heads, 1)
    return rows[: stop - start]
