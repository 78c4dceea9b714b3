"""Memory with stable addresses: for plans, for a forward's outputs, and for the working memory of attention.

Kernels take addresses, so memory must not move and must live as long as an address is in use. `Buffers` allocates what
plans point to. `OutputPool` reuses output buffers that no session needs any more. `AttentionScratch` and
`LookupScratch` grow with the number of rows and positions.
"""

from __future__ import annotations

import weakref
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ondevice.arrays import Float32Array
from ondevice.engines.simd.kernels.contract.attention_memory import (
    PART,
    SHARED_UNITS,
    SPLIT_ROWS,
    scratch_at,
    shares_bytes,
    state_bytes,
    workspace_at,
)
from ondevice.engines.simd.kernels.contract.entries import LINE


class Buffers:
    """Allocates zeroed memory aligned to cache lines, which lives as long as this object."""

    def __init__(self) -> None:
        self._held: list[NDArray[Any]] = []

    def bytes(self, size: int) -> int:
        """The address of `size` zeroed bytes."""
        room = np.zeros(size + LINE, np.uint8)
        start = -int(room.ctypes.data) % LINE
        self._held.append(room[start : start + size])
        return int(room.ctypes.data) + start

    def floats(self, count: int) -> int:
        """The address of `count` float32, zeros."""
        return self.bytes(4 * count)

    def rows(self, count: int, width: int, dtype: type[np.generic] = np.float32) -> tuple[NDArray[Any], int]:
        """An array [count, width] of zeros, and its address: for memory that Python reads or writes too."""
        address = self.bytes(count * width * np.dtype(dtype).itemsize)
        return self._held[-1].view(dtype).reshape(count, width), address

    def constant(self, values: NDArray[Any]) -> int:
        """The address of a copy of an array."""
        address = self.bytes(values.nbytes)
        self._held[-1].view(values.dtype)[:] = values.reshape(-1)
        return address

    def hold(self, values: NDArray[Any]) -> int:
        """The address of a contiguous array itself, which is kept alive.

        Raises:
            ValueError: the array is not contiguous.
        """
        if not values.flags.c_contiguous:
            raise ValueError("a kernel can read contiguous arrays only")
        self._held.append(values)
        return int(values.ctypes.data)


def float_bits(value: float) -> int:
    """The bits of a float32 as an integer, the form in which plans hold it."""
    return int(np.float32(value).view(np.int32))


class Lease:
    """A token that all sessions of a forward hold while its outputs are valid. An output buffer is reused once no
    session holds its lease any more, which a weak reference tells.
    """


class OutputBuffer:
    """The outputs of a forward: logits float32[rows, logits_width] and hidden states float32[rows, hidden_width].

    Attributes:
        rows: number of rows that there is room for.
        addresses: of the logits and of the hidden states.
    """

    def __init__(self, rows: int, logits_width: int, hidden_width: int) -> None:
        self.rows = rows
        self._logits = np.zeros((rows, logits_width), np.float32)
        self._hidden = np.zeros((rows, hidden_width), np.float32)
        self.addresses = int(self._logits.ctypes.data), int(self._hidden.ctypes.data)
        self._lease: weakref.ref[Lease] | None = None

    @property
    def is_free(self) -> bool:
        return self._lease is None or self._lease() is None

    def lease(self) -> Lease:
        """Lease the buffer; it is free again when the last session has dropped the lease."""
        lease = Lease()
        self._lease = weakref.ref(lease)
        return lease

    def part(self, first: int, count: int) -> tuple[Float32Array, Float32Array]:
        """Logits and hidden states of `count` rows from `first` on, as views."""
        return self._logits[first : first + count], self._hidden[first : first + count]


class OutputPool:
    """Output buffers, as many as were ever leased at the same time: a sequence that runs alone always gets the same.

    New memory for every forward would cost page faults: 8 rows of 262,144 logits are 8 MiB.
    """

    def __init__(self, logits_width: int, hidden_width: int) -> None:
        self._widths = logits_width, hidden_width
        self._buffers: list[OutputBuffer] = []

    def lease(self, rows: int) -> tuple[OutputBuffer, Lease]:
        """The smallest free buffer with room for so many rows, else a new one in place of the largest free one, and a
        new lease of it.
        """
        free = sorted((buffer for buffer in self._buffers if buffer.is_free), key=lambda buffer: buffer.rows)
        buffer = next((buffer for buffer in free if buffer.rows >= rows), None)
        if buffer is None:
            if free:
                self._buffers.remove(free[-1])
            buffer = OutputBuffer(rows, *self._widths)
            self._buffers.append(buffer)
        return buffer, buffer.lease()


class AttentionScratch:
    """The working memory of attention, for all threads of an engine. Its forwards and draft steps use it in turn.

    Attributes:
        address, stride: see `contract.slots.SCRATCH`.
        partials, most_parts, counters: see `contract.slots.PARTIALS`.
    """

    def __init__(self, head_dim: int, query_heads: int, threads: int, lookup: LookupScratch | None = None) -> None:
        """
        Args:
            head_dim: numbers of the widest head.
            query_heads: most query heads of a layer.
            threads: number of threads that attend at the same time.
            lookup: working memory of lookup attention; None if all attention is exact.
        """
        self.lookup = lookup
        self._own, self._shared = Buffers(), Buffers()
        self.stride = -(-scratch_at(0, head_dim).end // LINE) * LINE
        self.address = self._own.bytes(threads * self.stride)
        self._counters = np.zeros(SPLIT_ROWS * query_heads, np.int64)
        self.counters = self._own.hold(self._counters)
        self.partials = self.most_parts = 0
        self._row_bytes = query_heads * state_bytes(head_dim)
        self._rows = 0

    def reserve(self, rows: int, keys: int) -> None:
        """Make room for the shared states of so many rows, which see up to `keys` positions."""
        parts = keys // PART + 2
        if rows > SPLIT_ROWS or (rows <= self._rows and parts <= self.most_parts):
            return
        rows, parts = max(rows, self._rows), max(parts, self.most_parts)
        shared = Buffers()
        self.partials, self._shared = shared.bytes(rows * parts * self._row_bytes), shared
        self._rows, self.most_parts = rows, parts  # last: after an interrupt above, room is made again


class LookupScratch:
    """The working memory of lookup attention, for all threads of an engine. Its forwards and draft steps use it in
    turn.

    Attributes:
        work, work_bytes: see `slots.LOOKUP_SCRATCH`.
        shares, shares_bytes: see `slots.SHARES`.
    """

    def __init__(self, heads: int, codes: int, threads: int) -> None:
        """
        Args:
            heads: most query heads that share a KV head.
            codes: most codes of a key.
            threads: number of threads that look up at the same time.
        """
        self._buffers = Buffers()
        self.work_bytes = int(workspace_at(0, heads, codes).end)
        self.work = self._buffers.bytes(threads * self.work_bytes)
        self.shares = self.shares_bytes = 0
        self._heads, self._areas = heads, SHARED_UNITS * threads
        self._keys = 0

    def reserve(self, keys: int) -> None:
        """Make room for sequences of so many positions."""
        if keys > self._keys:
            size, buffers = shares_bytes(self._heads, keys), Buffers()
            self.shares, self.shares_bytes, self._shared = buffers.bytes(self._areas * size), size, buffers
            self._keys = keys  # last: after an interrupt above, room is made again
