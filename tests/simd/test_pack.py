"""Packs in the cache directory: made once, found again, never trusted blindly."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from ondevice.engines.simd import pack
from ondevice.engines.simd.model import Matrix
from ondevice.engines.simd.pack import PackLayout, open_pack
from ondevice.errors import BundleCorruptError


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ONDEVICE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(pack, "SMALL", 0)
    return tmp_path / "cache"


def layout_of(seed: int = 0, rows: int = 64) -> PackLayout:
    rng = np.random.default_rng(seed)
    layout = PackLayout()
    for bits in (4, 8):
        codes = rng.integers(0, 256, (rows, 2, 4 * bits), dtype=np.uint8)
        layout.add(Matrix(codes, rng.standard_normal((rows, 2)).astype(np.float32), bits))
    return layout


def forbidden() -> None:
    raise AssertionError("a pack that exists needs no verified bundle")


def nothing() -> None:
    pass


def test_a_pack_is_written_once_and_mapped_afterwards(cache: Path) -> None:
    made = open_pack(layout_of(), "content", nothing, 2)
    (path,) = cache.iterdir()
    found = open_pack(layout_of(), "content", forbidden, 2)
    np.testing.assert_array_equal(made, found)
    assert isinstance(found, np.memmap)
    assert [path] == list(cache.iterdir())


def test_another_content_or_layout_has_another_pack(cache: Path) -> None:
    open_pack(layout_of(), "content", nothing, 1)
    open_pack(layout_of(1), "other content", nothing, 1)
    open_pack(layout_of(rows=32), "content", nothing, 1)
    assert len(list(cache.iterdir())) == 3


@pytest.mark.parametrize("damage", [b"", b"x" * 100])
def test_a_damaged_pack_is_made_anew(cache: Path, damage: bytes) -> None:
    made = np.array(open_pack(layout_of(), "content", nothing, 1))
    (path,) = cache.iterdir()
    path.write_bytes(damage)
    np.testing.assert_array_equal(open_pack(layout_of(), "content", nothing, 1), made)


def test_a_bundle_that_is_not_what_it_says_leaves_no_pack(cache: Path) -> None:
    def altered() -> None:
        raise BundleCorruptError("altered")

    with pytest.raises(BundleCorruptError):
        open_pack(layout_of(), "content", altered, 1)
    assert not cache.exists()


def test_a_cache_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("", "utf-8")
    monkeypatch.setenv("ONDEVICE_CACHE", str(tmp_path / "file" / "below"))
    layout = layout_of()
    assert layout.fits(open_pack(layout, "content", nothing, 1))


def test_two_processes_at_once(cache: Path) -> None:
    with ThreadPoolExecutor(4) as pool:
        packs = list(pool.map(lambda _: open_pack(layout_of(), "content", nothing, 1), range(8)))
    for each in packs[1:]:
        np.testing.assert_array_equal(each, packs[0])
    assert len(list(cache.iterdir())) == 1
