"""Codes of a sequence's keys, by which lookup attention finds those that matter.

All of it follows from the keys: codebooks from those of the first positions, codes from codebooks. So nothing of it is
kept in files, and where a sequence was rewound, codes are made again from what the cache holds then.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from ondevice.engines.kv_cache import KVCache
from ondevice.engines.simd.cache_rows import read_keys
from ondevice.engines.simd.kernels.integer_tile import UNIT
from ondevice.engines.simd.kernels.key_codes import CENTROIDS, SPAN, encode, learn
from ondevice.engines.simd.lookup_settings import LookupSettings

STEPS = 8
"""Of k-means: twice as many leave the distances 1 % smaller."""

PIECE = 1024
"""Keys that are turned to floats together."""


class KeyIndex:
    """
    Attributes:
        coded: positions that have codes.
        version: another one whenever arrays are others.
        most_rows: that a forward may append: what it looks up was committed, and has codes, before it.
    """

    def __init__(self, settings: LookupSettings, sizes: Mapping[int, tuple[int, int]]) -> None:
        """
        Args:
            settings: of the engine.
            sizes: layer -> KV heads and numbers of a head.
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
        """Codes uint8[spans, kv_heads, SPAN, codes / 2] and codebooks; None before those are learnt."""
        if layer not in self._codebooks:
            return None
        return self._codes[layer], self._codebooks[layer]

    def follow(self, cache: KVCache, length: int) -> None:
        """Code what is committed, unit by unit, as soon as there is enough to learn from.

        Called before every forward: so a length that is less than what has codes tells of a rewind.
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
        """Hold what another index says of its first `length` positions, the same now."""
        if length < self._settings.learn:
            return
        self._codebooks = other._codebooks
        self._codes = {layer: codes.copy() for layer, codes in other._codes.items()}
        self.coded = min(other.coded, length // UNIT * UNIT)
        self.version += 1

    def _forget(self, length: int) -> None:
        """Positions from `length` on will hold other keys."""
        self.coded = length // UNIT * UNIT
        if length < self._settings.learn:
            self._codebooks, self._codes, self.coded = {}, {}, 0
            self.version += 1

    def _learnt(self, cache: KVCache, layer: int) -> NDArray[np.float32]:
        """float32[kv_heads, codes, width + 1, 16]: see `kernels.key_codes`."""
        heads, size = self._sizes[layer]
        width = self._settings.width
        codebooks = np.zeros((heads, size // width, width + 1, CENTROIDS), np.float32)
        keys = read_keys(cache.parts(layer)[0], 0, self._settings.learn)
        for head in range(heads):
            learn(np.ascontiguousarray(keys[:, head]), codebooks[head], STEPS)
        return codebooks

    def _reserve(self, stop: int, capacity: int) -> None:
        """Make room for codes of `stop` positions, and of all that the cache has room for."""
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
