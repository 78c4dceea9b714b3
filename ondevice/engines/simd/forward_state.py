"""The part of a plan that changes from forward to forward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ondevice.contract import AttentionKind
from ondevice.engines.protocol import ROOT, TokenTree
from ondevice.engines.simd.graph.model import DecoderLayer
from ondevice.engines.simd.kernels import slots
from ondevice.engines.simd.kernels.attention import LINES, PADDING
from ondevice.engines.simd.plan.builder import KIND_NUMBERS
from ondevice.engines.simd.unsupported import UnsupportedGraphError

Frequencies = dict[AttentionKind, NDArray[np.float32]]


def frequencies(layers: Sequence[DecoderLayer]) -> Frequencies:
    """The rotary frequencies of each kind of attention."""
    found: Frequencies = {}
    for layer in layers:
        kind, own = layer.attention.kind, layer.attention.frequencies
        if not np.array_equal(found.setdefault(kind, own), own):
            raise UnsupportedGraphError(f"its {kind} layers turn at different frequencies")
    return found


class ForwardState:
    """The int64 slots that kernels read, and the arrays that they point to."""

    def __init__(self, caches: int, bits: int, turns: Frequencies, head_dim: int, threads: int) -> None:
        """
        Args:
            caches: pairs of slots for keys and values.
            bits: of a number in them.
            turns: rotary frequencies.
            head_dim: the widest head's.
            threads: that attend at the same time.
        """
        self.slots = np.zeros(slots.CACHES + 2 * caches, np.int64)
        self.slots[slots.CACHE_BITS] = bits
        self._turns = turns
        self._head_dim = head_dim
        self._threads = threads
        self._held: dict[int, NDArray[Any]] = {}

    def point(self, slot: int, array: NDArray[Any]) -> None:
        """Put the address of an array into a slot."""
        assert array.flags.c_contiguous
        address = array.ctypes.data  # an interrupt may come here, but not between the next two
        self._held[slot] = array
        self.slots[slot] = address

    def put(self, slot: int, values: NDArray[Any]) -> None:
        """Copy numbers to where a slot points: asking numpy for an address takes longer than copying a few."""
        room = self._held.get(slot)
        if room is None or room.size < values.size:
            room = np.empty(values.size, values.dtype)
            self.point(slot, room)
        room[: values.size] = values.reshape(-1)

    def set_cache(self, index: int, parts: tuple[NDArray[Any], NDArray[Any]]) -> None:
        for offset, part in enumerate(parts):
            self.point(slots.CACHES + 2 * index + offset, part)

    def set_tree(self, tree: TokenTree, length: int) -> None:
        """Tokens, the committed length, and which row lies at which depth on the way to each."""
        self.slots[slots.ALL] = len(tree.tokens)
        self.slots[slots.LENGTH] = length
        self.put(slots.TOKENS, tree.tokens.astype(np.int64, copy=False))
        self.slots[slots.PATHS] = 0
        if not tree.is_chain:
            paths = _paths(tree)
            self.point(slots.PATHS, paths)
            self.slots[slots.PATH_WIDTH] = paths.shape[1]

    def set_kind(
        self, kind: AttentionKind, positions: NDArray[np.int64], first: NDArray[np.int64], stop: NDArray[np.int64],
        base: int,
    ) -> None:  # fmt: skip
        """What rows see of one kind of cache, and how they are turned.

        Args:
            kind: full or sliding.
            positions: int64[T]
            first, stop: int64[T], the cache positions from first to stop - 1.
            base: position of the cache's first row.
        """
        slot = slots.KINDS + slots.KIND_SLOTS * KIND_NUMBERS[kind]
        self.put(slot + slots.FIRST, first)
        self.put(slot + slots.STOP, stop)
        self.slots[slot + slots.BASE] = base
        if kind in self._turns:
            # the angle is a float32 product, as in the model's own code; its cosine is then exact to float32
            angles = (positions.astype(np.float32)[:, None] * self._turns[kind]).astype(np.float64)
            self.put(slot + slots.COSINES, np.cos(angles).astype(np.float32))
            self.put(slot + slots.SINES, np.sin(angles).astype(np.float32))

    def reserve_lines(self, keys: int) -> None:
        """Working memory for attention over so many keys."""
        stride = 4 * (self._head_dim + keys + PADDING)
        if stride > self.slots[slots.LINE_STRIDE]:
            self.point(slots.LINE_MEMORY, np.zeros(self._threads * LINES * stride, np.uint8))
            self.slots[slots.LINE_STRIDE] = stride


def _paths(tree: TokenTree) -> NDArray[np.int64]:
    """int64[T, depths]: the row at each depth on the way to a row, itself included."""
    depths = tree.depths()
    paths = np.zeros((len(depths), int(depths.max()) + 1), np.int64)
    for row, parent in enumerate(tree.parents):
        if parent != ROOT:
            paths[row] = paths[parent]
        paths[row, depths[row]] = row
    return paths
