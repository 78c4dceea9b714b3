"""The working memory of attention."""

from __future__ import annotations

import numpy as np

from ondevice.engines.simd.kernels.attention import PADDING, PAIRS


class AttentionScratch:
    """Memory for all threads of an engine, whose forwards and draft steps come one after another.

    Attributes:
        address, stride: see `kernels.attention.Scratch`.
    """

    def __init__(self, head_dim: int, threads: int) -> None:
        """
        Args:
            head_dim: the widest head's.
            threads: that attend at the same time.
        """
        self.address = self.stride = 0
        self._head_dim = head_dim
        self._threads = threads
        self._keys = 0

    def reserve(self, keys: int) -> None:
        """Make room for attention over so many positions."""
        if keys > self._keys:
            stride = 4 * (self._head_dim + keys + PADDING)
            memory = np.zeros(self._threads * PAIRS * stride, np.uint8)
            self._memory, self.address, self.stride = memory, int(memory.ctypes.data), stride
            self._keys = keys  # last, for an interrupt may have come before
