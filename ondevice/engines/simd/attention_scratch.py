"""The working memory of attention."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ondevice.engines.simd.kernels.attention import PART, SPLIT_ROWS
from ondevice.engines.simd.kernels.attention_rows import scratch_at, state_bytes

LINE = 64


class AttentionScratch:
    """Memory for all threads of an engine, whose forwards and draft steps come one after another.

    Attributes:
        address, stride: of the threads' own: see `kernels.attention_rows.scratch_at`.
        counters: address of zeros, see `slots.COUNTERS`.
        partials, most_parts: of what threads share, see `slots.PARTIALS`.
    """

    def __init__(self, head_dim: int, query_heads: int, threads: int) -> None:
        """
        Args:
            head_dim: the widest head's.
            query_heads: of the layer that has most.
            threads: that attend at the same time.
        """
        size = scratch_at.py_func(0, head_dim).end
        self.stride = -(-size // LINE) * LINE
        self._own = np.zeros(threads * self.stride + LINE, np.uint8)
        self.address = _aligned(self._own)
        self._counters = np.zeros(SPLIT_ROWS * query_heads, np.int64)
        self.counters = int(self._counters.ctypes.data)
        self.partials = self.most_parts = 0
        self._pair_bytes = query_heads * state_bytes.py_func(head_dim)
        self._rows = 0

    def reserve(self, rows: int, keys: int) -> None:
        """Make room for what threads share of so many rows, which see up to so many positions."""
        parts = keys // PART + 2
        if rows > SPLIT_ROWS or (rows <= self._rows and parts <= self.most_parts):
            return
        rows, parts = max(rows, self._rows), max(parts, self.most_parts)
        memory = np.zeros(rows * parts * self._pair_bytes + LINE, np.uint8)
        self._shared, self.partials = memory, _aligned(memory)
        self._rows, self.most_parts = rows, parts  # last, for an interrupt may have come before


def _aligned(memory: NDArray[np.uint8]) -> int:
    """The first address in it that is a multiple of LINE."""
    address = int(memory.ctypes.data)
    return address + -address % LINE
