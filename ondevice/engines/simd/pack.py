"""Weights as the kernels want them: written once per bundle into the cache directory, mapped afterwards.

One layout serves every instruction set. MatMulNBits' own, read in place, would need no copy: transposing sixteen rows
in registers took 36 more instructions per 512 weights than the 24 of a single row's product, and float32 scales are
a tenth more bytes.
"""

from __future__ import annotations

import hashlib
import itertools
import logging
import os
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ondevice.engines.simd.kernels.layout import pack_tile4, pack_tile8
from ondevice.engines.simd.kernels.tile import BLOCK, TILE
from ondevice.engines.simd.model import Matrix

VERSION = 1
"""Of the layout: raised whenever the same bundle would be packed otherwise."""

SMALL = 1 << 26
"""Bytes that are packed anew at every start, in a tenth of a second, rather than kept on disk."""

_log = logging.getLogger("ondevice")

_ALIGN = 4096
_MAGIC = b"ondevice pack\n"


@dataclass(frozen=True)
class Packed:
    """A packed matrix: bytes `weights` and fp16 `scales` of a pack, from these offsets on."""

    bits: int
    tiles: int
    blocks: int
    weights: int
    scales: int

    @property
    def end(self) -> int:
        return self.scales + self.tiles * self.blocks * TILE * 2


@dataclass(frozen=True)
class _Tile:
    """Sixteen rows of a matrix and where they go."""

    matrix: Matrix
    first: int


class PackLayout:
    """Which matrices go where. Matrices are added first; then the pack is made or found, and addresses are known."""

    def __init__(self) -> None:
        self._end = _ALIGN
        self._entries: list[tuple[Packed, list[_Tile]]] = []

    @property
    def size(self) -> int:
        return self._end

    def add(self, *matrices: Matrix) -> Packed:
        """Matrices that share an input, their rows one after another."""
        return self._add([_Tile(matrix, first) for matrix in matrices for first in range(0, matrix.rows, TILE)])

    def add_gated(self, gate: Matrix, up: Matrix) -> Packed:
        """32 rows of gate, 32 of up, and so on: what `kernels.project.gated` reads."""
        tiles = [
            _Tile(matrix, first + half)
            for first in range(0, gate.rows, BLOCK)
            for matrix in (gate, up)
            for half in (0, TILE)
        ]
        return self._add(tiles)

    def write(self, out: NDArray[np.uint8], threads: int) -> None:
        """Fill a pack, uint8[size]."""
        out[: len(_MAGIC)] = np.frombuffer(_MAGIC, np.uint8)
        out[64:96] = np.frombuffer(self.digest(), np.uint8)
        with ThreadPoolExecutor(threads) as pool:
            for packed, tiles in self._entries:
                share = max(1, -(-len(tiles) // (4 * threads)))
                starts = range(0, len(tiles), share)
                jobs = [pool.submit(_write_tiles, out, packed, start, tiles[start : start + share]) for start in starts]
                for job in jobs:
                    job.result()

    def fits(self, pack: NDArray[np.uint8]) -> bool:
        """Is this a pack of this layout?"""
        return len(pack) == self._end and bytes(pack[: len(_MAGIC)]) == _MAGIC and bytes(pack[64:96]) == self.digest()

    def digest(self) -> bytes:
        described = [VERSION, *(packed for packed, _ in self._entries)]
        return hashlib.sha256(repr(described).encode()).digest()

    def _add(self, tiles: list[_Tile]) -> Packed:
        first = tiles[0].matrix
        bits, blocks = first.bits, first.width // BLOCK
        assert all((tile.matrix.bits, tile.matrix.width) == (bits, first.width) for tile in tiles)
        scales = self._end + len(tiles) * blocks * BLOCK * TILE * bits // 8
        packed = Packed(bits, len(tiles), blocks, self._end, scales)
        self._entries.append((packed, tiles))
        self._end = -(-packed.end // _ALIGN) * _ALIGN
        return packed


def _write_tiles(out: NDArray[np.uint8], packed: Packed, start: int, tiles: Sequence[_Tile]) -> None:
    size = packed.blocks * BLOCK * TILE * packed.bits // 8
    pack = pack_tile4 if packed.bits == 4 else pack_tile8
    for index, tile in zip(itertools.count(start), tiles):
        at = packed.weights + index * size
        pack(tile.matrix.codes, tile.first, out[at : at + size].reshape(packed.blocks, packed.bits, 64))
        rows = tile.matrix.scales[tile.first : tile.first + TILE]
        scales = np.zeros((packed.blocks, TILE), np.float16)
        with np.errstate(over="ignore"):
            scales[:, : len(rows)] = rows.T
        at = packed.scales + index * scales.nbytes
        out[at : at + scales.nbytes] = scales.view(np.uint8).reshape(-1)


def cache_directory() -> Path:
    """`$ONDEVICE_CACHE`, else where the platform keeps what can be made again."""
    chosen = os.environ.get("ONDEVICE_CACHE")
    if chosen:
        return Path(chosen).expanduser()
    if os.name == "nt":
        return Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData/Local") / "ondevice" / "cache"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ondevice"


def open_pack(layout: PackLayout, content: str, verify: Any, threads: int) -> NDArray[np.uint8]:
    """The pack of a bundle: from the cache directory, or made now and left there.

    Args:
        layout: all matrices.
        content: a hash of the bundle's graphs and weights.
        verify: called before weights are packed; raises where the bundle is not what `content` says.
        threads: to pack with.
    """
    if layout.size <= SMALL:
        return _in_memory(layout, threads)
    path = cache_directory() / f"{hashlib.sha256(content.encode() + layout.digest()).hexdigest()[:40]}.pack"
    found = _mapped(path, layout)
    if found is not None:
        return found
    _log.warning("packing %.1f GB of weights for the simd engine, only this once: into %s", layout.size / 1e9, path)
    verify()
    try:
        _write_file(path, layout, threads)
    except OSError:
        return _in_memory(layout, threads)  # a full or read-only disk: the engine works all the same
    found = _mapped(path, layout)
    return _in_memory(layout, threads) if found is None else found


def _in_memory(layout: PackLayout, threads: int) -> NDArray[np.uint8]:
    room = np.zeros(layout.size + _ALIGN, np.uint8)
    pack = room[-room.ctypes.data % _ALIGN :][: layout.size]
    layout.write(pack, threads)
    return pack


def _mapped(path: Path, layout: PackLayout) -> NDArray[np.uint8] | None:
    try:
        pack = np.memmap(path, np.uint8, "r")
    except (OSError, ValueError):
        return None
    return pack if layout.fits(pack) else None


def _write_file(path: Path, layout: PackLayout, threads: int) -> None:
    """Write under another name and rename: two processes at once each leave a whole pack."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=path.stem, suffix=".part", dir=path.parent)
    try:
        os.truncate(handle, layout.size)
        os.posix_fallocate(handle, 0, layout.size) if hasattr(os, "posix_fallocate") else None
        os.close(handle)
        pack = np.memmap(name, np.uint8, "r+")
        layout.write(pack, threads)
        pack.flush()
        del pack
        Path(name).replace(path)
    except BaseException:
        with suppress(OSError):
            Path(name).unlink()
        raise
