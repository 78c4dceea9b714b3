"""Aligned arrays for kernels that take addresses."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from ondevice.engines.protocol import KVCacheType
from ondevice.engines.simd.cache_rows import BITS, row_type
from ondevice.engines.simd.kernels.heads import to_cache
from ondevice.engines.simd.kernels.norm import quantize_row
from ondevice.engines.simd.kernels.tile import ACTIVATION_BYTES, SHIFT
from tests.simd.twins import Floats, Quantized


def cache_of(x: Floats, kind: KVCacheType) -> npt.NDArray[Any]:
    """Keys and values [2, rows, head_dim] of one head, as rows of a cache."""
    cache = np.zeros(x.shape[:2], row_type(kind, 1, x.shape[2]))
    for part in range(2):
        for row in range(x.shape[1]):
            to_cache(BITS[kind], x[part, row].ctypes.data, cache[part, row].ctypes.data, x.shape[2])
    return cache


def numbers_of(cache: npt.NDArray[Any]) -> Floats:
    """The numbers that a cache of one head holds, [2, rows, head_dim]."""
    if cache.dtype.names is None:
        return cache[:, :, 0].astype(np.float32)
    return (cache["codes"] * cache["scale"][..., None])[:, :, 0]


def records_of(x: Floats, zero: int) -> npt.NDArray[np.uint8]:
    """Rows quantised by the kernel."""
    rows, width = x.shape
    records = np.zeros(rows * width // 32 * ACTIVATION_BYTES, np.uint8)
    for row in range(rows):
        quantize_row(x[row].ctypes.data, records.ctypes.data, row, rows, width, zero)
    return records


def read_records(records: npt.NDArray[np.uint8], rows: int) -> Quantized:
    """What the records of `rows` rows hold."""
    blocks = len(records) // ACTIVATION_BYTES // rows
    codes = np.zeros((rows, blocks, 32), np.int64)
    exponents = np.zeros((rows, blocks), np.int64)
    start = 0
    for first in range(0, rows, 8):
        members = min(8, rows - first)
        group = records[start : start + members * blocks * ACTIVATION_BYTES].reshape(blocks, members, ACTIVATION_BYTES)
        start += group.size
        codes[first : first + members] = group[:, :, :32].view(np.int8).swapaxes(0, 1)
        shift = np.ascontiguousarray(group[:, :, SHIFT:]).view(np.int32)[..., 0]  # the bits of 1.5 * 2**(23 + e)
        exponents[first : first + members] = (shift.astype(np.int64) >> 23).T - 150
    return Quantized(codes, exponents)
