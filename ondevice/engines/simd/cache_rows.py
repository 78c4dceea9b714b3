"""What one row of a layer's keys, or of its values, is made of."""

from __future__ import annotations

from typing import Any

import numpy as np

from ondevice.engines.protocol import KVCacheType
from ondevice.manifest import Layer

BITS: dict[KVCacheType, int] = {"fp16": 16, "int8": 8}
"""Of a number."""


def row_type(kind: KVCacheType, kv_heads: int, head_dim: int) -> np.dtype[Any]:
    """The dtype of a row: fp16 numbers, or int8 codes with a float32 scale behind those of each KV head.

    int8 has one scale per KV head. Keys and values are normed, so that blocks of 32 with scales of their own err only
    1.2 times less; a scale of a whole head stays out of the sums over its numbers, which cost what those of fp16 do.
    """
    if kind == "fp16":
        return np.dtype((np.float16, (kv_heads, head_dim)))
    return np.dtype(([("codes", np.int8, head_dim), ("scale", np.float32)], (kv_heads,)))


def layer_row_type(kind: KVCacheType, layer: Layer) -> np.dtype[Any]:
    """`row_type` of a layer that owns a cache."""
    return row_type(kind, layer.kv_heads, layer.head_dim)
