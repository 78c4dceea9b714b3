"""The cache's bookkeeping."""

from __future__ import annotations

import numpy as np
import pytest

from ondevice.engines.simd.kv_store import SLACK, HalfCache


def append(cache: HalfCache, length: int, rows: int) -> int:
    """Write each position's own number, as a forward would."""
    cache.reserve(length, rows)
    for part in cache.parts(0):
        first = length - cache.base
        part[first : first + rows] = np.arange(length, length + rows)[:, None]
    return length + rows


@pytest.mark.parametrize("history", [None, 40])
def test_rows_stay_where_they_are_looked_for(history: int | None) -> None:
    cache = HalfCache({0: 2}, 16, history)
    rng = np.random.default_rng(0)
    length = 0
    while length < 1500:
        length = append(cache, length, int(rng.integers(1, 17)))
        first = 0 if history is None else max(0, length - history)
        for part in cache.parts(0):
            kept = part[first - cache.base : length - cache.base, 0]
            np.testing.assert_array_equal(kept.astype(int), np.arange(first, length))
    assert history is None or cache.capacity < 400


def test_a_path_is_moved_together() -> None:
    cache = HalfCache({0: 2}, 16)
    append(cache, 0, 10)
    cache.gather(4, [0, 2, 5])
    np.testing.assert_array_equal(cache.parts(0)[0][4:7, 0], [4, 6, 9])


def test_how_far_back() -> None:
    cache = HalfCache({0: 2}, 16, history=40)
    length = 0
    for _ in range(100):
        length = append(cache, length, 16)
    assert cache.can_rewind(length)
    assert cache.can_rewind(cache.base + 40)
    assert not cache.can_rewind(cache.base + 39)
    assert length - cache.base <= 40 + SLACK + 32
    cache.clear()
    assert cache.can_rewind(0)
