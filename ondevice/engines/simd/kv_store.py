"""Keys and values in the order of positions: what `kernels.attention` reads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ondevice.engines.protocol import KVCacheType

BITS: dict[KVCacheType, int] = {"fp16": 16, "int8": 8}
"""Of a number."""

SLACK = 256
"""Rows kept beyond a window: how far a rewind may go without a new prefill."""


def row_type(kind: KVCacheType, kv_heads: int, head_dim: int) -> np.dtype[Any]:
    """A row of keys or of values.

    int8 has one scale per KV head. Keys and values are normed, so that blocks of 32 with scales of their own err only
    1.2 times less; a scale of a whole head stays out of the sums over its numbers, which cost what those of fp16 do.
    """
    if kind == "fp16":
        return np.dtype((np.float16, (kv_heads, head_dim)))
    return np.dtype(([("codes", np.int8, head_dim), ("scale", np.float32)], (kv_heads,)))


class KVStore:
    """The caches of the layers of one attention kind.

    A full cache keeps every position and grows by doubling. A sliding one keeps the last `history` positions and some
    slack, and moves them to its front when it reaches the end. Row r holds position `base + r`.
    """

    def __init__(self, types: Mapping[int, np.dtype[Any]], max_rows: int, history: int | None = None) -> None:
        """
        Args:
            types: layer index -> its `row_type`.
            max_rows: most rows that one forward appends.
            history: positions before the newest that must stay; None keeps all.
        """
        self.base = 0
        self._history = history
        self.capacity = 2 * max_rows if history is None else history + SLACK + 2 * max_rows
        self._types = types
        self._buffers = {layer: np.zeros((2, self.capacity), row) for layer, row in types.items()}

    @property
    def layers(self) -> list[int]:
        return list(self._buffers)

    def reserve(self, length: int, rows: int) -> None:
        """Make room for `rows` rows after `length` committed ones. With another `capacity`, the parts are others."""
        if length + rows - self.base <= self.capacity:
            return
        if self._history is None:
            self._grow(length + rows)
        else:
            self._slide(length)

    def parts(self, layer: int) -> tuple[NDArray[Any], NDArray[Any]]:
        """Keys and values of a layer, [capacity] rows each."""
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
        capacity, grown = max(2 * self.capacity, stop), {}
        for layer, old in self._buffers.items():
            grown[layer] = np.zeros((2, capacity), self._types[layer])
            grown[layer][:, : old.shape[1]] = old
        self._buffers, self.capacity = grown, capacity  # all at once, or nothing after an interrupt

    def _slide(self, length: int) -> None:
        assert self._history is not None
        base = max(self.base, length - self._history - SLACK)
        kept = slice(base - self.base, length - self.base)
        self.base = length  # so that an interrupt leaves nothing to rewind to
        for buffer in self._buffers.values():
            buffer[:, : length - base] = buffer[:, kept].copy()
        self.base = base
