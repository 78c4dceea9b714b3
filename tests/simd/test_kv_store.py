"""The cache's bookkeeping."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ondevice.engines.protocol import KVCacheType
from ondevice.engines.simd.kv_store import SLACK, KVStore, row_type

TYPES = {0: np.dtype((np.float32, (1, 2)))}
"""Rows in which a position's own number fits."""


def append(cache: KVStore, length: int, rows: int) -> int:
    """Write each position's own number, as a forward would."""
    cache.reserve(length, rows)
    for part in cache.parts(0):
        first = length - cache.base
        part[first : first + rows] = np.arange(length, length + rows)[:, None, None]
    return length + rows


@pytest.mark.parametrize(("kind", "size"), [("fp16", 2 * 2 * 64), ("int8", 2 * (64 + 4))])
def test_a_row_holds_every_head(kind: KVCacheType, size: int) -> None:
    row = row_type(kind, 2, 64)
    assert row.itemsize == size
    cache = KVStore({3: row}, 4)
    rng = np.random.default_rng(0)
    keys, _ = cache.parts(3)
    keys.view(np.uint8)[:5] = rng.integers(0, 100, keys.view(np.uint8)[:5].shape)
    first = keys[[0, 4]].copy()
    cache.reserve(5, 20)  # it moves
    cache.gather(0, [0, 4])
    assert cache.parts(3)[0].shape[0] > len(keys)
    assert cache.parts(3)[0][:2].tobytes() == first.tobytes()


@pytest.mark.parametrize("history", [None, 40])
def test_rows_stay_where_they_are_looked_for(history: int | None) -> None:
    cache = KVStore(TYPES, 16, history)
    rng = np.random.default_rng(0)
    length = 0
    while length < 1500:
        length = append(cache, length, int(rng.integers(1, 17)))
        first = 0 if history is None else max(0, length - history)
        for part in cache.parts(0):
            kept = part[first - cache.base : length - cache.base, 0, 0]
            np.testing.assert_array_equal(kept.astype(int), np.arange(first, length))
    assert history is None or cache.capacity < 400


def test_a_path_is_moved_together() -> None:
    cache = KVStore(TYPES, 16)
    append(cache, 0, 10)
    cache.gather(4, [0, 2, 5])
    np.testing.assert_array_equal(cache.parts(0)[0][4:7, 0, 0], [4, 6, 9])


def test_how_far_back() -> None:
    cache = KVStore(TYPES, 16, history=40)
    length = 0
    for _ in range(100):
        length = append(cache, length, 16)
    assert cache.can_rewind(length)
    assert cache.can_rewind(cache.base + 40)
    assert not cache.can_rewind(cache.base + 39)
    assert length - cache.base <= 40 + SLACK + 32
    cache.clear()
    assert cache.can_rewind(0)


def test_an_interrupt_while_rows_move_leaves_nothing_to_rewind_to(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = KVStore({0: TYPES[0], 1: TYPES[0]}, 16, history=40)
    length = 0
    while length + 16 <= cache.capacity:
        length = append(cache, length, 16)
    buffers = cache._buffers

    class Interrupted(dict[int, np.ndarray]):
        def values(self) -> Any:
            yield buffers[0]
            raise KeyboardInterrupt

    monkeypatch.setattr(cache, "_buffers", Interrupted())
    with pytest.raises(KeyboardInterrupt):
        cache.reserve(length, 16)
    assert not cache.can_rewind(length)
    assert not cache.can_rewind(1)
