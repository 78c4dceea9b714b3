"""What kernels know of a sequence: its rows in a forward, and where its caches lie."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ondevice.contract import AttentionKind
from ondevice.engines.kv_cache import KVCache
from ondevice.engines.protocol import ROOT, TokenTree
from ondevice.engines.simd.kernels import slots
from ondevice.engines.simd.key_index import KeyIndex
from ondevice.engines.simd.plan.layer import KIND_NUMBERS


class SequenceRecord:
    """The int64 record of a sequence, and the arrays that it points to: see `kernels.slots`.

    Attributes:
        address: of the record.
        most_keys: positions that its longest cache can hold.
    """

    def __init__(self, places: Mapping[int, int]) -> None:
        """
        Args:
            places: layer -> the place of its cache among the record's pairs of keys and values.
        """
        self.most_keys = 0
        self._slots = np.zeros(slots.CACHES + 4 * len(places), np.int64)
        self.address = int(self._slots.ctypes.data)
        self._places = places
        self._held: dict[int, NDArray[Any]] = {}
        self._capacities: dict[AttentionKind, int] = {}
        self._version = 0

    def set_rows(self, tree: TokenTree, length: int) -> None:
        """The rows of a forward that follow `length` committed ones."""
        self._slots[slots.LENGTH] = length
        self._slots[slots.PATHS] = 0
        if not tree.is_chain:
            paths = paths_of(tree)
            self._point(slots.PATHS, paths)
            self._slots[slots.PATH_WIDTH] = paths.shape[1]

    @property
    def length(self) -> int:
        """Committed tokens."""
        return int(self._slots[slots.LENGTH])

    def set_place(self, row_set: int, first: int, count: int) -> None:
        """Where those rows lie in a row set."""
        self._slots[slots.FIRST_ROW + row_set] = first
        self._slots[slots.ROW_COUNT + row_set] = count

    def follow(self, caches: Mapping[AttentionKind, KVCache]) -> None:
        """Point at where the caches are now."""
        for kind, cache in caches.items():
            self._slots[slots.BASE + KIND_NUMBERS[kind]] = cache.base
            if self._capacities.get(kind) != cache.capacity:
                for layer in cache.layers:
                    for offset, part in enumerate(cache.parts(layer)):
                        self._point(slots.CACHES + 2 * self._places[layer] + offset, part)
                self.most_keys = max(self.most_keys, cache.capacity)
                self._capacities[kind] = cache.capacity  # last, for an interrupt may have come before

    def follow_index(self, index: KeyIndex) -> None:
        """Point at where the codes of keys are now; at nothing where there are none."""
        if self._version == index.version:
            return
        for layer, place in self._places.items():
            parts = index.parts(layer)
            for offset in range(2):
                slot = slots.CACHES + 2 * (len(self._places) + place) + offset
                if parts is None:
                    self._slots[slot] = 0
                else:
                    self._point(slot, parts[offset])
        self._version = index.version

    def _point(self, slot: int, array: NDArray[Any]) -> None:
        assert array.flags.c_contiguous
        address = array.ctypes.data  # an interrupt may come here, but not between the next two
        self._held[slot] = array
        self._slots[slot] = address


def paths_of(tree: TokenTree) -> NDArray[np.int64]:
    """int64[T, depths]: the row at each depth on the way to a row, itself included."""
    depths = tree.depths()
    paths = np.zeros((len(depths), int(depths.max()) + 1), np.int64)
    for row, parent in enumerate(tree.parents):
        if parent != ROOT:
            paths[row] = paths[parent]
        paths[row, depths[row]] = row
    return paths
