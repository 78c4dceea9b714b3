"""KV rows of all layers of one attention kind, written in place and seen through views that never copy."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

ALIGN = 256
"""Views of a sliding cache start at a multiple of this. ONNX Runtime's GEMM sums keys in blocks of 128 or 256: shifted
by anything else, a row would be rounded otherwise when it is verified than when it is decoded alone."""

STEP = 64
"""Views grow in steps of this many rows, so that a graph is bound anew once in 64 tokens and softmax lanes line up."""

SHORTEST = 128
"""Under 128 keys the same GEMM picks another block size, and other roundings (measured at head size 512)."""

SLACK = 256
"""Rows kept beyond the window: how far a rewind may go without a new prefill."""


class KVCache:
    """Keys and values of the layers of one kind.

    A full cache keeps every position and grows by doubling. A sliding cache keeps the last `history` positions and
    some slack in one linear buffer, and moves them to its front when it reaches the end: one copy of the window in
    `SLACK + max_rows` tokens, where a ring buffer would need two views per layer.

    Buffers are float32[2, capacity, width] (keys, values) for every layer; row r holds position `base + r`.
    """

    def __init__(self, widths: dict[int, int], max_rows: int, history: int | None = None) -> None:
        """
        Args:
            widths: layer index -> floats in a row (kv_heads * head_dim).
            max_rows: most rows that one forward appends.
            history: positions before the newest that must stay visible; None keeps all.
        """
        self.base = 0
        self._history = history
        self._widths = widths
        capacity = SHORTEST + 2 * max_rows
        if history is not None:
            capacity = _up(history + SLACK + max_rows, ALIGN) + 2 * ALIGN
        self._buffers = {layer: np.zeros((2, capacity, width), np.float32) for layer, width in widths.items()}
        self._capacity = capacity

    @property
    def layers(self) -> list[int]:
        return list(self._widths)

    def reserve(self, length: int, rows: int) -> tuple[int, int]:
        """Make room for `rows` rows after `length` committed ones; return the positions (start, stop) of the view.

        The view holds all that a row at position `length` or later may see, the new rows, and padding.
        """
        start = self._first(length)
        stop = start + max(SHORTEST, _up(length + rows - start, STEP))
        if stop - self.base > self._capacity:
            if self._history is None:
                self._grow(stop)
            else:
                self._slide(length)
        return start, stop

    def view(self, layer: int, start: int, stop: int) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Keys and values float32[stop - start, width] of these positions; writing to them writes to the cache."""
        keys, values = self._buffers[layer][:, start - self.base : stop - self.base]
        return keys, values

    def gather(self, length: int, path: Sequence[int]) -> None:
        """Move the pending rows `path` (ascending) to follow `length` without gaps."""
        first = length - self.base
        source = first + np.asarray(path, np.intp)
        for buffer in self._buffers.values():
            buffer[:, first : first + len(path)] = buffer[:, source]

    def can_rewind(self, length: int) -> bool:
        return self._first(length) >= self.base

    def clear(self) -> None:
        self.base = 0

    def _first(self, length: int) -> int:
        """The position at which the view for a row at `length` starts."""
        if self._history is None:
            return 0
        return max(0, length - self._history) // ALIGN * ALIGN

    def _grow(self, stop: int) -> None:
        capacity, grown = max(2 * self._capacity, stop), {}
        for layer, old in self._buffers.items():
            grown[layer] = np.zeros((2, capacity, self._widths[layer]), np.float32)
            grown[layer][:, : old.shape[1]] = old
        self._buffers, self._capacity = grown, capacity  # all at once, or nothing after an interrupt

    def _slide(self, length: int) -> None:
        base = self._first(max(0, length - SLACK))
        kept = slice(base - self.base, length - self.base)
        self.base = length  # so that an interrupt leaves nothing to rewind to
        for buffer in self._buffers.values():
            buffer[:, : length - base] = buffer[:, kept]
        self.base = base


def _up(value: int, step: int) -> int:
    return -(-value // step) * step
