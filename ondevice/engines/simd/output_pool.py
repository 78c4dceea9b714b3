"""Where a forward writes its outputs: buffers that are used again when nobody reads them any more."""

from __future__ import annotations

import weakref

import numpy as np

from ondevice.engines.protocol import Floats


class Lease:
    """Held by all sessions of a forward, for as long as they may read its outputs."""


class OutputBuffer:
    """Logits float32[rows, width of logits] and hidden states float32[rows, H], with their addresses."""

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
        """A lease; the buffer is free again when the last session has dropped it."""
        lease = Lease()
        self._lease = weakref.ref(lease)
        return lease

    def part(self, first: int, count: int) -> tuple[Floats, Floats]:
        """The outputs of some rows."""
        return self._logits[first : first + count], self._hidden[first : first + count]


class OutputPool:
    """As many buffers as were ever leased at the same time: a sequence that runs alone has one for ever.

    New memory would cost page faults every time: 8 rows of 262,144 logits are 8 MiB.
    """

    def __init__(self, logits_width: int, hidden_width: int) -> None:
        self._widths = logits_width, hidden_width
        self._buffers: list[OutputBuffer] = []

    def lease(self, rows: int) -> tuple[OutputBuffer, Lease]:
        """A buffer that nobody else has a lease of, with room for so many rows."""
        buffer = self._free(rows)
        return buffer, buffer.lease()

    def _free(self, rows: int) -> OutputBuffer:
        """The smallest that is large enough, else a new one in place of the largest."""
        free = sorted((buffer for buffer in self._buffers if buffer.is_free), key=lambda buffer: buffer.rows)
        for buffer in free:
            if buffer.rows >= rows:
                return buffer
        if free:
            self._buffers.remove(free[-1])
        self._buffers.append(OutputBuffer(rows, *self._widths))
        return self._buffers[-1]
