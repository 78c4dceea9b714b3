"""Conversions between numpy arrays and the memory layouts of the kernels, which take addresses of aligned arrays."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from ondevice.engines.protocol import KVCacheType
from ondevice.engines.simd.caches import BITS, unit_type
from ondevice.engines.simd.kernels.activations import (
    MAX_GROUP_ROWS,
    PAIR_SCALE,
    PAIRED_ROWS,
    PAIRS,
    ROW_BYTES,
    SCALE,
    quantize_row,
)
from ondevice.engines.simd.kernels.attention.query_key_value import to_key, to_value
from ondevice.engines.simd.kernels.contract.attention_memory import UNIT
from ondevice.engines.simd.kernels.contract.matrices import FLOATS, FORM_SHIFT, GROUPS, STEPS
from tests.simd.kernels.twins import Floats, Quantized


def cache_of(x: Floats, kind: KVCacheType) -> npt.NDArray[Any]:
    """Convert the keys and values [2, rows, head_dim] of one head to a cache [2, units]."""
    cache = np.zeros((2, -(-x.shape[1] // UNIT)), unit_type(kind, 1, x.shape[2]))
    for part, write in zip(range(2), (to_key, to_value), strict=True):
        for row in range(x.shape[1]):
            used = x[part, row].copy()
            write(BITS[kind], used.ctypes.data, cache[part].ctypes.data, row, cache.strides[1], x.shape[2])
    return cache


def numbers_of(cache: npt.NDArray[Any], rows: int) -> Floats:
    """The keys and values in a cache of one head, [2, rows, head_dim]."""
    if cache.dtype == np.float16:
        units, head_dim = cache.shape[1], cache.shape[3] // UNIT
        keys = cache[0].reshape(units, head_dim, UNIT).swapaxes(1, 2).reshape(-1, head_dim)
        values = cache[1].reshape(units, head_dim // 32, UNIT, 32).swapaxes(1, 2).reshape(-1, head_dim)
        return np.stack([keys, values])[:, :rows].astype(np.float32)
    codes, scales = codes_of(cache)
    return (codes * scales[..., None])[:, :rows].astype(np.float32)


def codes_of(cache: npt.NDArray[np.uint8]) -> tuple[npt.NDArray[np.int64], Floats]:
    """Signed codes [2, rows, head_dim] and scales [2, rows] of an int8 cache of one head."""
    units, head_dim = cache.shape[1], cache.shape[3] // 32 - 4
    tiles = cache[0].reshape(units * 2, 16 * (head_dim + 4))
    keys = tiles[:, : 16 * head_dim].reshape(-1, head_dim // 4, 16, 4).transpose(0, 2, 1, 3)
    key_scales = np.ascontiguousarray(tiles[:, 16 * head_dim :]).view(np.float32)
    parts = cache[1].reshape(units, 32 * (head_dim + 4))
    values = parts[:, : 32 * head_dim].reshape(units, head_dim // 16, 8, 16, 4).transpose(0, 2, 4, 1, 3)
    value_scales = np.ascontiguousarray(parts[:, 32 * head_dim :]).view(np.float32)
    codes = [part.astype(np.int64) - 128 for part in (keys, values)]
    return (
        np.stack([part.reshape(units * 32, head_dim) for part in codes]),
        np.stack([part.reshape(units * 32) for part in (key_scales, value_scales)]),
    )


def records_of(x: Floats, form: int) -> npt.NDArray[np.uint8]:
    """The activation records that the kernel writes for rows `x` in a form."""
    (rows, width), blocks = x.shape, x.shape[1] // 32
    row_bytes = {GROUPS: ROW_BYTES * blocks, STEPS: 36 * blocks + 4, FLOATS: 128 * blocks}[form >> FORM_SHIFT]
    records = np.zeros(rows * row_bytes, np.uint8)
    for row in range(rows):
        quantize_row(x[row].ctypes.data, records.ctypes.data, row, rows, width, form)
    return records


def read_records(records: npt.NDArray[np.uint8], rows: int) -> Quantized:
    """Decode the activation records of `rows` rows."""
    blocks = len(records) // ROW_BYTES // rows
    codes = np.zeros((rows, blocks, 32), np.int64)
    scales = np.zeros((rows, blocks), np.float32)
    start = 0
    for first in range(0, rows, MAX_GROUP_ROWS):
        members = min(MAX_GROUP_ROWS, rows - first)
        group = records[start : start + members * blocks * ROW_BYTES].reshape(blocks, members, ROW_BYTES)
        start += group.size
        for row in range(members):
            if PAIRS and members >= PAIRED_ROWS:
                pair, count = row // 2 * 2, min(2, members - row // 2 * 2)
                own = group[:, pair : pair + count].reshape(blocks, count * ROW_BYTES)
                eights = own[:, : 32 * count].reshape(blocks, 2, 2, count, 2, 4)[:, :, :, row - pair]
                numbers = eights.swapaxes(2, 3).reshape(blocks, 32)
                at = SCALE if count == 1 else PAIR_SCALE + 4 * (row - pair)
            else:
                own, numbers, at = group[:, row], group[:, row, :32], SCALE
            codes[first + row] = numbers.view(np.int8)
            scales[first + row] = np.ascontiguousarray(own[:, at : at + 4]).view(np.float32)[:, 0]
    return Quantized(codes, scales)
