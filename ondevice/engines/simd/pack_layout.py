"""The layout of a pack: all matrices of a bundle in the form that kernels read, each at an offset.

A pack begins with one page: magic bytes, a digest of the layout, checksums. Then come the matrices, each on a page
boundary: tiles of 16 rows (layout: `kernels.formats`), then their scales. One layout serves every instruction set.

MatMulNBits' own layout could be read in place, without a copy. But to transpose 16 rows in registers takes 36
instructions per 512 weights, on top of the 24 of a single row's product; and its float32 scales are a tenth more bytes.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ondevice.bundle_format.weight_format import WeightFormat
from ondevice.engines.simd.kernels.contract.entries import pack_epilogue, pack_scales, pack_tile
from ondevice.engines.simd.kernels.contract.matrices import BLOCK, EPILOGUE_BYTES, TILE
from ondevice.engines.simd.tensor_files import Matrix
from ondevice.progress import Advance, Progress, silent

VERSION = 3
"""Version of the layout, raised whenever the same bundle would be packed differently."""

PAGE = 4096
"""Alignment in bytes of a pack and of every matrix in it."""

PIECES = 256
"""Most parts into which a pack is divided, each with a checksum."""

MAX_CHECKED = 1 << 32
"""Most bytes that are checked at a start; of a larger pack, parts spread evenly over it. 1.3 GB in the page cache take
60 ms on two cores, which the first forward then saves because the pages are mapped; from a disk they are read
anyway."""

SHARE = 1 << 20
"""Bytes of codes that a thread packs into memory of its own and then writes. The pages of a mapped file cost 2.3 s
of a core per GB when they are first written, writing to the file 0.14 (ext4, in a virtual machine)."""

_MAGIC = b"ondevice pack\n"
_DIGEST, _SUMS = 64, 128
"""Offsets in the first page, after the magic bytes: the layout's digest, and the uint64 checksums of the pieces."""


@dataclass(frozen=True)
class Packed:
    """The place of a matrix in a pack.

    matrix : one of the matrices that it was joined from; all have the same format and input
    tiles : number of tiles of 16 rows
    blocks : number of blocks of 32 columns
    weights : offset of the codes, uint8[tiles, tile_bytes]
    scales : offset of the scales, uint8[tiles, scale_bytes]: fp16[blocks, 16] for weights in groups, or scales and
        minimums fp16[blocks, 2, 16], else the epilogue (`kernels.epilogue_tiles`)
    """

    matrix: Matrix
    tiles: int
    blocks: int
    weights: int
    scales: int

    @property
    def format(self) -> WeightFormat:
        return self.matrix.format

    @property
    def tile_bytes(self) -> int:
        """Bytes of one tile's codes."""
        return self.format.bytes(self.blocks * BLOCK * TILE)

    @property
    def scale_bytes(self) -> int:
        """Bytes of one tile's scales and minimums."""
        return self.blocks * self.block_scale_bytes if self.format.group else EPILOGUE_BYTES

    @property
    def block_scale_bytes(self) -> int:
        """Bytes of the scales and minimums of one block of 16 rows, for weights in groups."""
        return TILE * (4 if self.format.affine else 2)

    @property
    def nbytes(self) -> int:
        """Bytes of all codes and scales."""
        return self.tiles * (self.tile_bytes + self.scale_bytes)

    @property
    def end(self) -> int:
        """Offset of the next matrix."""
        return -(-(self.weights + self.nbytes) // PAGE) * PAGE


class _Tile(NamedTuple):
    """The 16 rows of a matrix from row `first` on."""

    matrix: Matrix
    first: int


class PackLayout:
    """Assigns offsets to matrices. After all are added, the pack is written, or one on disk is compared.

    Attributes:
        places: the place of each matrix that was added alone, or as the first of several that were added as one.
    """

    def __init__(self) -> None:
        self.places: dict[Matrix, Packed] = {}
        self._end = PAGE
        self._entries: list[tuple[Packed, Callable[[int], _Tile]]] = []
        """The matrices, and which tile of them has a number. Tiles are made when asked for: the experts of 26B-A4B have
        a million."""

    @property
    def size(self) -> int:
        return self._end

    def add(self, *matrices: Matrix) -> Packed:
        """Add matrices that multiply the same input, as one matrix with all their rows."""
        return self._add(matrices, [(each, first) for each in matrices for first in range(0, each.rows, TILE)])

    def add_gated(self, gate: Matrix, up: Matrix) -> Packed:
        """Add gate and up as one matrix: 32 rows of each in turn, as `kernels.project.gated` reads them."""
        tiles = [
            (matrix, first + half)
            for first in range(0, gate.rows, BLOCK)
            for matrix in (gate, up)
            for half in (0, TILE)
        ]
        return self._add([gate, up], tiles)

    def add_experts(self, matrices: Sequence[Matrix]) -> Packed:
        """Add matrices of one size, one after the other."""
        return self._add_each(matrices, range(0, matrices[0].rows, TILE))

    def add_gated_experts(self, matrices: Sequence[Matrix]) -> Packed:
        """Add matrices of one size whose first half of rows is a gate and the second half up, each laid out as
        `add_gated` does, one after the other.
        """
        half = matrices[0].rows // 2
        firsts = [part + tile for unit in range(0, half, BLOCK) for part in (unit, half + unit) for tile in (0, TILE)]
        return self._add_each(matrices, firsts)

    def write(self, out: NDArray[np.uint8], threads: int, advance: Advance = lambda count: None) -> None:
        """Write a pack to memory: uint8[size], zeros. Other arguments as in `write_tiles`."""

        def put(offset: int, data: NDArray[np.uint8]) -> None:
            out[offset : offset + len(data)] = data

        self.write_tiles(put, threads, advance)
        out[:PAGE] = self.first_page(out, threads)

    def write_tiles(self, put: Callable[[int, NDArray[np.uint8]], None], threads: int, advance: Advance) -> None:
        """Write all matrices of a pack, in parts of at most `SHARE` bytes where a tile is not larger.

        Args:
            put: writes bytes at an offset of the pack; called by several threads.
            threads: number of threads that pack.
            advance: called with the number of bytes written since the last call, at the end also for all padding.
        """
        jobs: deque[Future[int]] = deque()
        rest = self._end
        with ThreadPoolExecutor(threads) as pool:
            for packed, tile in self._entries:
                share = max(1, min(-(-packed.tiles // (2 * threads)), SHARE // packed.tile_bytes))
                for start in range(0, packed.tiles, share):
                    if len(jobs) == 4 * threads:
                        rest -= (written := jobs.popleft().result())
                        advance(written)
                    tiles = [tile(number) for number in range(start, min(start + share, packed.tiles))]
                    jobs.append(pool.submit(_write_tiles, put, packed, start, tiles))
            for job in jobs:
                rest -= job.result()
                advance(job.result())
        advance(rest)

    def first_page(self, pack: NDArray[np.uint8], threads: int) -> NDArray[np.uint8]:
        """The first page of a pack, uint8[PAGE], by which `fits` and `intact` judge it; the rest is there already."""
        page = np.zeros(PAGE, np.uint8)
        sums = _checksums(pack, threads)
        page[_SUMS : _SUMS + sums.nbytes] = sums.view(np.uint8)
        page[_DIGEST : _DIGEST + 32] = np.frombuffer(self.digest(), np.uint8)
        page[: len(_MAGIC)] = np.frombuffer(_MAGIC, np.uint8)
        return page

    def fits(self, pack: NDArray[np.uint8]) -> bool:
        """Whether a file is a pack of this layout, judged by its size and its first page."""
        if len(pack) != self._end or bytes(pack[: len(_MAGIC)]) != _MAGIC:
            return False
        return bytes(pack[_DIGEST : _DIGEST + 32]) == self.digest()

    def intact(self, pack: NDArray[np.uint8], threads: int, progress: Progress = silent) -> bool:
        """Whether the checksums of a pack that `fits` are right: after a crash, a file may hold zeros, for instance."""
        every = -(-self._end // MAX_CHECKED)
        found = _checksums(pack, threads, every, progress)
        stored = np.asarray(pack[_SUMS : _SUMS + 8 * PIECES]).view(np.uint64)[::every]
        return np.array_equal(found, stored[: len(found)])

    def digest(self) -> bytes:
        """A hash of all formats, sizes and offsets and of the version."""
        described: list[object] = [VERSION]
        for packed, _ in self._entries:
            form = packed.format
            scales = form.group, form.affine
            described.append((form.bits, *scales, packed.tiles, packed.blocks, packed.weights, packed.scales))
        return hashlib.sha256(repr(described).encode()).digest()

    def _add(self, matrices: Sequence[Matrix], tiles: Sequence[tuple[Matrix, int]]) -> Packed:
        return self._place(matrices, len(tiles), lambda number: _Tile(*tiles[number]))

    def _add_each(self, matrices: Sequence[Matrix], firsts: Sequence[int]) -> Packed:
        """Add matrices of one size, one after the other, each with tiles at the same first rows."""
        size = len(firsts)
        return self._place(
            matrices, len(matrices) * size, lambda number: _Tile(matrices[number // size], firsts[number % size])
        )

    def _place(self, matrices: Sequence[Matrix], tiles: int, tile: Callable[[int], _Tile]) -> Packed:
        first = matrices[0]
        blocks = first.width // BLOCK
        assert all(each.joins(first) for each in matrices)
        scales = self._end + first.format.bytes(tiles * blocks * BLOCK * TILE)
        packed = Packed(first, tiles, blocks, self._end, scales)
        self._entries.append((packed, tile))
        self.places[first] = packed
        self._end = packed.end
        return packed


def _checksums(
    pack: NDArray[np.uint8], threads: int, every: int = 1, progress: Progress = silent
) -> NDArray[np.uint64]:
    """For every `every`-th piece of a pack after its first page: the sum of its uint64 numbers.

    numpy adds them as fast as memory is read, on all threads; CRC-32 takes five times as long.
    """
    data = np.asarray(pack)[PAGE:].view(np.uint64)
    size = max(1, -(-len(data) // PIECES))
    with ThreadPoolExecutor(threads) as pool:
        starts = range(0, len(data), size * every)
        sums = []
        for total in pool.map(lambda start: data[start : start + size].sum(), starts):
            sums.append(total)
            progress(8 * min(len(sums) * size, len(data)), 8 * len(starts) * size)
    return np.array(sums, np.uint64)


def _write_tiles(
    put: Callable[[int, NDArray[np.uint8]], None], packed: Packed, start: int, tiles: Sequence[_Tile]
) -> int:
    """Write neighbouring tiles of a packed matrix, the first of which has the number `start`; returns their bytes."""
    size, scale_size = packed.tile_bytes, packed.scale_bytes
    assert start + len(tiles) <= packed.tiles
    codes_out, scales_out = (np.zeros(len(tiles) * each, np.uint8) for each in (size, scale_size))
    form = packed.format
    matrices = {key: _readable(matrix) for key, matrix in {id(tile.matrix): tile.matrix for tile in tiles}.items()}
    row_bytes, scratch = size // TILE, np.empty(TILE, np.float32)
    for index, tile in enumerate(tiles):
        matrix = matrices[id(tile.matrix)]
        rows = min(TILE, matrix.rows - tile.first)
        codes, to = matrix.codes.ctypes.data + tile.first * row_bytes, codes_out.ctypes.data + index * size
        pack_tile(form.bits, codes, rows, packed.blocks, to)
        at = scales_out.ctypes.data + index * scale_size
        if form.group:
            for order, values in enumerate((matrix.scales, matrix.minimums)):
                if values is not None:
                    first = values.ctypes.data + tile.first * values.strides[0]
                    to_block = at + 2 * TILE * order
                    pack_scales(first, rows, packed.blocks, to_block, packed.block_scale_bytes, scratch.ctypes.data)
        else:
            factors = matrix.scales.ctypes.data + tile.first * matrix.scales.strides[0]
            pack_epilogue(factors, float(np.float32(matrix.output_step)), rows, at)
    put(packed.weights + start * size, codes_out)
    put(packed.scales + start * scale_size, scales_out)
    return len(codes_out) + len(scales_out)


def _readable(matrix: Matrix) -> Matrix:
    """A matrix whose arrays kernels can read by address: contiguous and aligned.

    Its scales become the factors of the epilogue if it has one scale per row, or ones if it is not quantised. Codes are
    copied only if their address in the file is not a multiple of 8.
    """
    codes = np.require(matrix.codes, np.uint8, ["C", "A"])
    if codes.ctypes.data % 8:
        codes = np.array(codes)
    scales = np.require(matrix.scales, np.float32, ["C", "A"])
    minimums = None if matrix.minimums is None else np.require(matrix.minimums, np.float32, ["C", "A"])
    if not matrix.format.group:
        with np.errstate(over="ignore"):  # an infinite factor makes the logits NaN, and that is an error
            factor = np.float32(matrix.input_step or 1.0)
            scales = scales * factor if matrix.format.quantised else np.ones((matrix.rows, 1), np.float32)
    return dataclasses.replace(matrix, codes=codes, scales=scales, minimums=minimums)
