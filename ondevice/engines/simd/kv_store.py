"""Keys and values in fp16, in the order of positions: what `kernels.attention` reads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

SLACK = 256
"""Rows kept beyond a window: how far a rewind may go without a new prefill."""


class HalfCache:
    """The caches of the layers of one attention kind.

    A full cache keeps every position and grows by doubling. A sliding one keeps the last `history` positions and some
    slack, and moves them to its front when it reaches the end. Row r holds position `base + r`.
    """

    def __init__(self, widths: Mapping[int, int], max_rows: int, history: int | None = None) -> None:
        """
        Args:
            widths: layer index -> numbers in a row of keys.
            max_rows: most rows that one forward appends.
            history: positions before the newest that must stay; None keeps all.
        """
        self.base = 0
        self._history = history
        self.capacity = 2 * max_rows if history is None else history + SLACK + 2 * max_rows
        self._buffers = {layer: np.zeros((2, self.capacity, width), np.float16) for layer, width in widths.items()}

    @property
    def layers(self) -> list[int]:
        return list(self._buffers)

    def reserve(self, length: int, rows: int) -> bool:
        """Make room for `rows` rows after `length` committed ones; whether the parts are other arrays now."""
        if length + rows - self.base <= self.capacity:
            return False
        if self._history is None:
            self._grow(length + rows)
            return True
        self._slide(length)
        return False

    def parts(self, layer: int) -> tuple[NDArray[np.float16], NDArray[np.float16]]:
        """Keys and values of a layer, [capacity, width] each."""
        keys, values = self._buffers[layer]
        return keys, values

    def gather(self, length: int, path: Sequence[int]) -> None:
        """Move the pending rows `path` (ascending) to follow `length` without gaps."""
        first = length - self.base
        source = first + np.asarray(path, np.intp)
        for buffer in self._buffers.values():
            buffer[:, first : first + len(path)] = buffer[:, source]

    def can_rewind(self, length: int) -> bool:
        return self._history is None or max(0, length - self._history) >= self.base

    def clear(self) -> None:
        self.base = 0

    def _grow(self, stop: int) -> None:
        self.capacity = max(2 * self.capacity, stop)
        for layer, old in self._buffers.items():
            new = np.zeros((2, self.capacity, old.shape[2]), np.float16)
            new[:, : old.shape[1]] = old
            self._buffers[layer] = new

    def _slide(self, length: int) -> None:
        assert self._history is not None
        base = max(self.base, length - self._history - SLACK)
        kept = slice(base - self.base, length - self.base)
        for buffer in self._buffers.values():
            buffer[:, : length - base] = buffer[:, kept].copy()
        self.base = base
