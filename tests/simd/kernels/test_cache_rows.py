"""The memory layout of KV cache units."""

from __future__ import annotations

from typing import get_args

import numpy as np
import pytest

from ondevice.engines.kv_cache import KVCache
from ondevice.engines.protocol import KVCacheType
from ondevice.engines.simd.caches import BITS, UNITS, VIEWS, unit_type
from ondevice.engines.simd.kernels.attention.query_key_value import part_bytes, to_key, to_value
from tests.simd.kernels.memory import numbers_of


@pytest.mark.parametrize(("kind", "size"), [("fp16", 2 * 2 * 64), ("int8", 2 * (64 + 4))])
def test_a_unit_holds_every_head_of_its_positions(kind: KVCacheType, size: int) -> None:
    assert unit_type(kind, 2, 64).itemsize == size * UNITS.positions
    assert 2 * part_bytes(BITS[kind], 64) == unit_type(kind, 2, 64).itemsize


@pytest.mark.parametrize("kind", get_args(KVCacheType))
@pytest.mark.parametrize("history", [None, 40])
def test_rows_survive_what_happens_to_a_cache(kind: KVCacheType, history: int | None) -> None:
    """Growth, slides, committed branches and copies, with two KV heads, compared with a plain list."""
    rng = np.random.default_rng(0)
    heads, head_dim, most = 2, 32, 48

    def made() -> KVCache:
        return KVCache({0: unit_type(kind, heads, head_dim)}, most, history, VIEWS, UNITS)

    cache, twin = made(), np.zeros((2, heads, 0, head_dim), np.float32)
    size = part_bytes(BITS[kind], head_dim)
    for _ in range(60):
        rows, length = int(rng.integers(1, most + 1)), twin.shape[2]
        new = rng.standard_normal((2, heads, rows, head_dim)).astype(np.float32)
        cache.reserve(length, rows)
        for part, write, buffer in zip(new.copy(), (to_key, to_value), cache.parts(0), strict=True):
            for head in range(heads):
                for row in range(rows):
                    at = buffer.ctypes.data + head * size
                    write(
                        BITS[kind], part[head, row].ctypes.data, at, length - cache.base + row, heads * size, head_dim
                    )
        path = np.flatnonzero(rng.random(rows) < 0.6)
        cache.gather(length, path.tolist())
        twin = np.concatenate([twin, new[:, :, path]], axis=2)
        if rng.random() < 0.2:
            other = made()
            other.adopt(cache.held(twin.shape[2]))
            cache = other
        for head in range(heads):
            both = np.stack([part[:, head : head + 1] for part in cache.parts(0)])
            found = numbers_of(both, twin.shape[2] - cache.base)
            first = 0 if history is None else max(0, found.shape[1] - history)
            assert np.abs(found[:, first:] - twin[:, head, cache.base + first :]).max(initial=0) < 0.02
    assert twin.shape[2] > 800
    assert (cache.base > 0) == (history is not None)
