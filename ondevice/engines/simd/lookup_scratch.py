"""The working memory of lookups."""

from __future__ import annotations

from ondevice.engines.simd.buffers import Buffers
from ondevice.engines.simd.kernels.looking_up import SHARED_UNITS, shares_bytes, workspace_at


class LookupScratch:
    """Memory for all threads of an engine, whose forwards and draft steps come one after another.

    Attributes:
        work, work_bytes: every thread's tables and sums, see `kernels.looking_up.workspace_at`.
        shares, shares_bytes: what codes say of keys, see `kernels.looking_up.shares_bytes`.
    """

    def __init__(self, heads: int, codes: int, threads: int) -> None:
        """
        Args:
            heads: query heads that share a KV head, at most.
            codes: of a key, at most.
            threads: that look up at the same time.
        """
        self._buffers = Buffers()
        self.work_bytes = int(workspace_at.py_func(0, heads, codes).end)
        self.work = self._buffers.bytes(threads * self.work_bytes)
        self.shares = self.shares_bytes = 0
        self._heads, self._areas = heads, SHARED_UNITS * threads
        self._keys = 0

    def reserve(self, keys: int) -> None:
        """Make room for sequences of so many positions."""
        if keys > self._keys:
            size, buffers = shares_bytes(self._heads, keys), Buffers()
            self.shares, self.shares_bytes, self._held = buffers.bytes(self._areas * size), size, buffers
            self._keys = keys  # last, for an interrupt may have come before
