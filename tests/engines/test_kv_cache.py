"""KVCache against a plain list of rows."""

from __future__ import annotations

import numpy as np
import pytest

from ondevice.engines.kv_cache import ALIGN, SHORTEST, STEP, KVCache

WINDOW = 40
MAX_ROWS = 96


def written(cache: KVCache, length: int, rows: int, values: np.ndarray) -> tuple[int, int]:
    """Append rows as an engine would: through the view."""
    start, stop = cache.reserve(length, rows)
    keys, vals = cache.view(0, start, stop)
    keys[length - start : length - start + rows] = values[:, None]
    vals[length - start : length - start + rows] = -values[:, None]
    return start, stop


@pytest.mark.parametrize("history", [None, WINDOW])
def test_rows_survive_growth_slides_rejections_and_rewinds(history: int | None) -> None:
    rng = np.random.default_rng(3)
    cache = KVCache({0: 4}, MAX_ROWS, history)
    twin: list[float] = []
    for _ in range(400):
        rows = int(rng.integers(1, MAX_ROWS + 1))
        values = rng.normal(size=rows).astype(np.float32)
        length = len(twin)
        start, stop = written(cache, length, rows, values)
        assert start % ALIGN == 0
        assert (stop - start) % STEP == 0
        assert stop - start >= SHORTEST
        path = np.flatnonzero(rng.random(rows) < 0.7)
        cache.gather(length, path.tolist())
        twin += values[path].tolist()
        if rng.random() < 0.2:
            shorter = max(0, len(twin) - int(rng.integers(0, 200)))
            if cache.can_rewind(shorter):
                del twin[shorter:]
        first = 0 if history is None else max(0, len(twin) - history)
        start, stop = cache.reserve(len(twin), 0)
        keys, vals = cache.view(0, start, stop)
        assert start <= first
        np.testing.assert_array_equal(keys[first - start : len(twin) - start, 0], np.float32(twin[first:]))
        np.testing.assert_array_equal(vals[first - start : len(twin) - start, 3], -np.float32(twin[first:]))
    assert len(twin) > 5000


def test_a_sliding_cache_says_when_it_forgot() -> None:
    cache = KVCache({0: 4}, MAX_ROWS, WINDOW)
    length = 0
    while length < 5000:
        written(cache, length, MAX_ROWS, np.ones(MAX_ROWS, np.float32))
        length += MAX_ROWS
    assert cache.can_rewind(length - 100)
    assert not cache.can_rewind(10)
    assert cache.view(0, *cache.reserve(length, 1))[0].shape[0] < 1000
