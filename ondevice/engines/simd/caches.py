"""The formats of cached keys and values (fp16, int8), and the key index of lookup attention.

A cache holds units of 32 positions, whose layouts are described in `kernels.attention.float_tile` and `integer_tile`.
With lookup attention (`LookupSettings`), a session also keeps 4-bit codes of its keys (`KeyIndex`), by which kernels
find the positions that matter.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ondevice.bundle_format.decoder import Attention, GatedDelta, Mixer, ShortConvolution
from ondevice.engines.kv_cache import KVCache, Units, Views
from ondevice.engines.protocol import LOOKUP_UNIT, AttentionOptions, AttentionType, KVCacheType
from ondevice.engines.simd.kernels.contract.attention_memory import CENTROIDS, SPAN, UNIT
from ondevice.engines.simd.kernels.contract.entries import encode, learn, move_rows
from ondevice.engines.simd.kernels.contract.matrices import TILE

BITS: dict[KVCacheType, int] = {"fp16": 16, "int8": 8}
"""Bits of a cached number."""


class KernelUnits(Units):
    """The units of a cache of either format."""

    positions = UNIT

    def move(self, keys: NDArray[Any], values: NDArray[Any], source: NDArray[np.int64], first: int) -> None:
        if keys.ndim == 2:  # halves of a convolution's rows, one after the other
            for half in (keys, values):
                rows = half.reshape(len(half) * UNIT, -1)
                rows[first : first + len(source)] = rows[source]
            return
        assert keys.flags.c_contiguous
        assert values.flags.c_contiguous
        if min(first, source.min()) < 0 or max(first + len(source), source.max() + 1) > len(keys) * UNIT:
            raise ValueError("the rows are not within the cache")
        kv_heads, size = keys.shape[1:]
        bits, head_dim = (16, size // UNIT) if keys.dtype == np.float16 else (8, size // UNIT - 4)
        places = np.ascontiguousarray(source, np.int64)
        move_rows(bits, keys.ctypes.data, values.ctypes.data, places, first, kv_heads, head_dim)


UNITS = KernelUnits()
VIEWS = Views(align=UNIT, step=UNIT)
"""A cache is read in whole units."""

CONVOLVED_ROWS = 128
"""Most rows of a sequence in one forward of a model with convolutions, whose caches have room for so many. At
Qwen3.5-0.8B's shape they take 127 MB of a sequence, and took 382 MB with room for 512 rows. A forward of 64 rows takes
an eighth of the time of one of 512 (benchmarks/results/forwards.md), so nothing is lost with shorter ones.
"""


def unit_type(kind: KVCacheType, kv_heads: int, head_dim: int) -> np.dtype[Any]:
    """The dtype of a unit of UNIT positions: fp16 numbers, or codes of 8 bits and float32 scales.

    int8 has one scale per position and KV head, which stays out of the sums over the head's numbers. Keys and values
    are normed, so that a scale per block of 32 numbers would make the error only 1.2 times smaller.
    """
    if kind == "fp16":
        return np.dtype((np.float16, (kv_heads, UNIT * head_dim)))
    return np.dtype((np.uint8, (kv_heads, UNIT * (head_dim + 4))))


def cache_unit(kind: KVCacheType, own: Mixer) -> np.dtype[Any]:
    """The dtype of a unit of a layer's keys, and of its values; or of each half of a convolution's rows, float32."""
    if isinstance(own, Attention):
        return unit_type(kind, own.kv_heads, own.head_dim)
    return np.dtype((np.float32, (UNIT * half_width(own),)))


def half_width(own: ShortConvolution | GatedDelta) -> int:
    """Numbers in each half of a row of a convolution's cache. After the channels, those of a gated delta rule have the
    row's b in the first half, and its a in the second: with them states can pass the row once more.
    """
    gates = own.value_heads if isinstance(own, GatedDelta) else 0
    return own.kv_width + -(-gates // TILE) * TILE


def read_keys(keys: NDArray[Any], start: int, stop: int) -> NDArray[np.float32]:
    """Read keys from a cache of either format as float32.

    Args:
        keys: all units of a layer's keys.
        start, stop: rows to read; `start` is a multiple of UNIT.

    Returns:
        float32[stop - start, kv_heads, head_dim]
    """
    units = keys[start // UNIT : -(-stop // UNIT)]
    count, kv_heads, size = units.shape
    if keys.dtype == np.float16:
        lines = units.reshape(count, kv_heads, size // UNIT, UNIT).transpose(0, 3, 1, 2)
        return lines.reshape(count * UNIT, kv_heads, size // UNIT)[: stop - start].astype(np.float32, order="C")
    tiles = units.reshape(count, kv_heads, 2, size // 2)
    dims = size // UNIT - 4
    codes = tiles[..., : -4 * TILE].reshape(count, kv_heads, 2, dims // 4, TILE, 4)
    rows = codes.transpose(0, 2, 4, 1, 3, 5).reshape(count * UNIT, kv_heads, dims).astype(np.float32) - np.float32(128)
    scales = np.ascontiguousarray(tiles[..., -4 * TILE :]).view(np.float32)
    with np.errstate(over="ignore", invalid="ignore"):  # scales from a damaged file; no index follows from a NaN
        rows *= scales.transpose(0, 2, 3, 1).reshape(count * UNIT, kv_heads, 1)
    return rows[: stop - start]


def read_values(values: NDArray[Any], stop: int) -> NDArray[np.float32]:
    """Read values from an fp16 cache as float32.

    Args:
        values: all units of a layer's values.
        stop: rows to read.

    Returns:
        float32[stop, kv_heads, head_dim]
    """
    units = values[: -(-stop // UNIT)]
    count, kv_heads, size = units.shape
    lines = units.reshape(count, kv_heads, -1, UNIT, UNIT).transpose(0, 3, 1, 2, 4)
    return lines.reshape(count * UNIT, kv_heads, size // UNIT)[:stop].astype(np.float32, order="C")


@dataclass(frozen=True)
class LookupSettings:
    """How lookup attention chooses the positions that a row attends to.

    mode, keys, width : `kind`, `keys` and `width` of `AttentionOptions`; `keys` are besides the first and newest ones
    left : share of a row's softmax weight, estimated from the codes, that may be ignored if `keys` is None
    least, most : fewest and most positions if `keys` is None
    window : newest positions that a row always attends to. A forward has at most as many rows of a sequence, so that
        every position that is looked up was committed, and has codes, before the forward
    learn : first positions, whose keys the codebooks are learnt from. A row attends to all positions while it sees no
        more than `learn + window`
    """

    mode: AttentionType = "lookup"
    keys: int | None = None
    width: int = 4
    left: float = 0.02
    least: int = 256
    most: int = 2048
    window: int = 512
    learn: int = 2048

    @classmethod
    def of(cls, options: AttentionOptions, context_length: int) -> LookupSettings:
        """The settings of a model. More keys than the context has choose all of them, without memory for the others."""
        units = -(-context_length // LOOKUP_UNIT)
        keys = None if options.keys is None else min(options.keys, units * LOOKUP_UNIT)
        return cls(options.kind, keys, options.width)

    @property
    def name(self) -> str:
        """A name for the settings that change the target's outputs; "exact" for those that do not."""
        if self.mode == "lookup-drafts":
            return "exact"
        keys = f", {self.keys or 'auto'} keys" if self.mode == "lookup" else ""
        return f"{self.mode}{keys}, width {self.width}"

    @property
    def begin(self) -> int:
        """Positions that a row must see to use lookups. It depends on the position only, never on drafts or chunks."""
        return self.learn + self.window + 1

    @property
    def least_units(self) -> int:
        """Fewest units that a row chooses."""
        return max(1, (self.least if self.keys is None else self.keys) // LOOKUP_UNIT)

    @property
    def most_units(self) -> int:
        """Most units that a row chooses."""
        return max(1, (self.most if self.keys is None else self.keys) // LOOKUP_UNIT)


STEPS = 8
"""Steps of k-means. Twice as many make the distances 1 % smaller."""

PIECE = 1024
"""Keys that are converted to float32 at a time."""


class KeyIndex:
    """4-bit codes of a sequence's keys, and the codebooks behind them, for each layer that looks up.

    Both follow from the keys: the codebooks from those of the first positions, the codes from keys and codebooks. So
    session files do not hold them, and after a rewind codes are made again from the keys that the cache holds then.

    Attributes:
        coded: number of positions that have codes.
        version: increased whenever arrays are replaced.
        most_rows: most rows of the sequence in a forward: see `LookupSettings.window`.
    """

    def __init__(self, settings: LookupSettings, sizes: Mapping[int, tuple[int, int]]) -> None:
        """
        Args:
            settings: the engine's settings.
            sizes: layer -> number of KV heads, and numbers of a head.
        """
        self.coded = self.version = 0
        self.most_rows = settings.window
        self._settings = settings
        self._sizes = sizes
        self._codebooks: dict[int, NDArray[np.float32]] = {}
        self._codes: dict[int, NDArray[np.uint8]] = {}

    @property
    def nbytes(self) -> int:
        codes = sum(array.nbytes for array in self._codes.values())
        return codes + sum(array.nbytes for array in self._codebooks.values())

    def parts(self, layer: int) -> tuple[NDArray[np.uint8], NDArray[np.float32]] | None:
        """A layer's codes uint8[spans, kv_heads, SPAN, codes / 2] and its codebooks float32[kv_heads, codes, width + 1,
        16].

        None before the codebooks are learnt.
        """
        if layer not in self._codebooks:
            return None
        return self._codes[layer], self._codebooks[layer]

    def follow(self, cache: KVCache, length: int) -> None:
        """Make codes for all whole units of committed positions, once there are enough to learn codebooks from.

        It is called before every forward, so a length smaller than `coded` means that the sequence was rewound.
        """
        settings = self._settings
        stop = length // UNIT * UNIT
        if stop < self.coded:
            self._forget(length)
        if length < settings.learn or stop <= self.coded:
            return
        if not self._codebooks:
            self._codebooks = {layer: self._learnt(cache, layer) for layer in self._sizes}
        self._reserve(stop, cache.capacity)
        for layer, codebooks in self._codebooks.items():
            codes = self._codes[layer]
            for start in range(self.coded, stop, PIECE):
                keys = read_keys(cache.parts(layer)[0], start, min(start + PIECE, stop))
                encode(keys, codebooks, start, codes.ctypes.data, codes.strides[0])
        self.coded = stop

    def adopt(self, other: KeyIndex, length: int) -> None:
        """Copy another index's codes of its first `length` positions; the codebooks are shared."""
        if length < self._settings.learn:
            return
        self._codebooks = other._codebooks
        self._codes = {layer: codes.copy() for layer, codes in other._codes.items()}
        self.coded = min(other.coded, length // UNIT * UNIT)
        self.version += 1

    def _forget(self, length: int) -> None:
        """Drop the codes of positions from `length` on, and all if the codebooks were learnt from such positions."""
        self.coded = length // UNIT * UNIT
        if length < self._settings.learn:
            self._codebooks, self._codes, self.coded = {}, {}, 0
            self.version += 1

    def _learnt(self, cache: KVCache, layer: int) -> NDArray[np.float32]:
        """Learn a layer's codebooks, float32[kv_heads, codes, width + 1, 16]: see `kernels.attention.key_codes`."""
        heads, size = self._sizes[layer]
        width = self._settings.width
        codebooks = np.zeros((heads, size // width, width + 1, CENTROIDS), np.float32)
        keys = read_keys(cache.parts(layer)[0], 0, self._settings.learn)
        sums, members = np.zeros((CENTROIDS, width)), np.zeros(CENTROIDS, np.int64)
        for head in range(heads):
            learn(np.ascontiguousarray(keys[:, head]), codebooks[head], STEPS, sums, members)
        return codebooks

    def _reserve(self, stop: int, capacity: int) -> None:
        """Make room for the codes of `stop` positions; if that needs new arrays, of all that the cache has room for."""
        spans = -(-stop // SPAN)
        if self._codes and all(len(codes) >= spans for codes in self._codes.values()):
            return
        spans, grown = -(-max(stop, capacity) // SPAN), {}
        for layer, (heads, size) in self._sizes.items():
            grown[layer] = np.zeros((spans, heads, SPAN, size // self._settings.width // 2), np.uint8)
            if layer in self._codes:
                grown[layer][: len(self._codes[layer])] = self._codes[layer]
        self._codes = grown
        self.version += 1
