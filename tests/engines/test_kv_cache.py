"""KVCache, in the layouts of both engines, compared with a plain list of rows."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pytest

from ondevice.engines.kv_cache import HUGE_ROWS, MARGIN, SLACK, KVCache, Views, window_rows
from ondevice.engines.protocol import ROOT, TokenTree
from tests.engines.test_cache_memory import anonymous_bytes

WINDOW = 40
MAX_ROWS = 96
TYPES = {0: np.dtype((np.float32, (4,))), 3: np.dtype((np.float32, (2, 3)))}
VIEWS = [Views(), Views(align=256, step=64, least=128)]


def write(cache: KVCache, length: int, values: np.ndarray) -> tuple[int, int]:
    """Append rows in the way an engine does."""
    start, stop = cache.reserve(length, len(values))
    first = length - cache.base
    for layer in cache.layers:
        for sign, part in zip((1, -1), cache.parts(layer), strict=True):
            part[first : first + len(values)] = sign * values.reshape(-1, *[1] * (part.ndim - 1))
    return start, stop


def check(cache: KVCache, first: int, expected: list[float]) -> None:
    """Assert that the cache has the expected rows from position `first` on."""
    for layer in cache.layers:
        for sign, part in zip((1, -1), cache.view(layer, first, len(expected)), strict=True):
            np.testing.assert_array_equal(
                part[:, -1] if part.ndim == 2 else part[:, -1, -1], sign * np.array(expected[first:], np.float32)
            )


@pytest.mark.parametrize("views", VIEWS, ids=["rows", "aligned"])
@pytest.mark.parametrize("history", [None, WINDOW])
def test_rows_survive_growth_slides_rejections_rewinds_and_copies(history: int | None, views: Views) -> None:
    rng = np.random.default_rng(3)
    cache = KVCache(TYPES, MAX_ROWS, history, views)
    twin: list[float] = []
    for _ in range(400):
        rows = int(rng.integers(1, MAX_ROWS + 1))
        values = rng.normal(size=rows).astype(np.float32)
        start, stop = write(cache, len(twin), values)
        assert start % views.align == 0
        assert (stop - start) % views.step == 0
        assert stop - start >= views.least
        assert cache.base <= start
        assert stop <= cache.base + cache.capacity
        path = np.flatnonzero(rng.random(rows) < 0.7)
        cache.gather(len(twin), path.tolist())
        twin += values[path].tolist()
        if rng.random() < 0.2:
            shorter = max(0, len(twin) - int(rng.integers(0, 200)))
            if cache.can_rewind(shorter):
                del twin[shorter:]
        if rng.random() < 0.1:
            other = KVCache(TYPES, MAX_ROWS, history, views)
            other.adopt(cache.held(len(twin)))
            cache = other
        check(cache, 0 if history is None else max(0, len(twin) - history), twin)
    assert len(twin) > 5000
    assert history is None or cache.capacity < 1500


def filled(history: int | None, length: int, views: Views = VIEWS[0]) -> KVCache:
    cache = KVCache(TYPES, MAX_ROWS, history, views)
    for start in range(0, length, MAX_ROWS):
        write(cache, start, np.arange(start, min(start + MAX_ROWS, length), dtype=np.float32))
    return cache


@pytest.mark.parametrize("views", VIEWS, ids=["rows", "aligned"])
def test_a_sliding_cache_says_when_it_forgot(views: Views) -> None:
    cache = filled(WINDOW, 5000, views)
    assert cache.can_rewind(5000 - MARGIN)
    assert not cache.can_rewind(10)
    cache.clear()
    assert cache.can_rewind(0)


def test_how_far_back() -> None:
    cache = filled(WINDOW, 5000)
    assert cache.can_rewind(cache.base + WINDOW)
    assert not cache.can_rewind(cache.base + WINDOW - 1)
    assert 5000 - cache.base <= WINDOW + SLACK + 2 * MAX_ROWS


@pytest.mark.parametrize("views", VIEWS, ids=["rows", "aligned"])
@pytest.mark.parametrize("history", [None, WINDOW])
def test_held_rows_serve_sequences_that_are_somewhat_shorter(history: int | None, views: Views) -> None:
    held = filled(history, 3000, views).held(3000).copy()
    other = filled(history, 500, views)
    for length in (3000, 3000 - MARGIN):
        assert other.can_adopt(held, length)
        other.adopt(held)
        assert other.can_rewind(length)
        check(other, 0 if history is None else length - history, [float(position) for position in range(length)])
    assert not other.can_adopt(held, 3001)
    assert other.can_adopt(held, 100) == (history is None)
    assert (held.nbytes < 2 * 4 * 10 * (WINDOW + MARGIN + 2 * views.align)) == (history is not None)


def test_rows_of_a_file_must_be_those_that_a_sequence_needs() -> None:
    sliding, full = filled(WINDOW, 5000), filled(None, 100)
    assert sliding.blank(5000 - WINDOW, 5000).length == 5000
    for base in (0, 5000 - WINDOW + 1, 5000):
        with pytest.raises(ValueError, match="do not fit"):
            sliding.blank(base, 5000)
    with pytest.raises(ValueError, match="do not fit"):
        full.blank(1, 100)
    in_units = filled(WINDOW, 5000, Views(align=32, step=32))
    first = (5000 - WINDOW) // 32 * 32
    assert in_units.blank(first, 5000).base == first
    with pytest.raises(ValueError, match="do not fit"):  # a unit begins there
        in_units.blank(first - 1, 5000)


def test_a_path_is_moved_together() -> None:
    cache = filled(None, 10)
    cache.gather(4, [0, 2, 5])
    np.testing.assert_array_equal(cache.parts(0)[0][4:7, 0], [4, 6, 9])


@pytest.mark.parametrize("what", ["slide", "adopt"])
def test_an_interrupt_while_rows_move_leaves_nothing_to_rewind_to(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    cache, held = KVCache(TYPES, MAX_ROWS, WINDOW), filled(WINDOW, 2000).held(2000)
    length = 0
    while length + MAX_ROWS <= cache.capacity:
        write(cache, length, np.ones(MAX_ROWS, np.float32))
        length += MAX_ROWS
    buffers = cache._buffers

    class Interrupted(dict[int, np.ndarray]):
        def values(self) -> Any:
            yield buffers[0]
            raise KeyboardInterrupt

        def items(self) -> Any:
            yield 0, buffers[0]
            raise KeyboardInterrupt

    monkeypatch.setattr(cache, "_buffers", Interrupted(buffers))
    with pytest.raises(KeyboardInterrupt):
        cache.reserve(length, MAX_ROWS) if what == "slide" else cache.adopt(held)
    assert not cache.can_rewind(length)
    cache.clear()
    assert cache.can_rewind(0)


def test_the_rows_that_a_convolution_sums_are_a_row_and_its_ancestors() -> None:
    """Rows 2 and 3 are siblings after row 1, and row 4 follows the first of them."""
    tree = TokenTree(np.arange(5), np.array([ROOT, 0, 1, 1, 2]))
    found = window_rows(tree, length=2, start=1, window=4)
    assert found.tolist() == [[1, 0, -1, -1], [2, 1, 0, -1], [3, 2, 1, 0], [4, 2, 1, 0], [5, 3, 2, 1]]


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs RssAnon of /proc/self/status")
def test_the_first_rows_take_memory_for_themselves_alone() -> None:
    """Where the system has huge pages, the first row of each of 32 layers in 64 MB would take all of them."""
    layers = {layer: np.dtype((np.float32, (256,))) for layer in range(32)}
    cache = KVCache(layers, HUGE_ROWS // 2 - 1)
    assert cache.nbytes > 60 << 20
    before = anonymous_bytes()
    write(cache, 0, np.ones(1, np.float32))
    assert anonymous_bytes() - before < 16 << 20
