"""The external data file of a bundle: regions are reserved first and filled in any order."""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import numpy.typing as npt

TABLE_ALIGNMENT = 4096
"""A page: a runtime that maps a table wants its rows to begin on one."""
ALIGNMENT = 64
"""A cache line, and the widest vector."""


@dataclass(frozen=True)
class Region:
    """Bytes of a data file."""

    location: str
    offset: int
    nbytes: int

    def part(self, number: int, parts: int) -> Region:
        """One of as many equal parts."""
        size = self.nbytes // parts
        return Region(self.location, self.offset + number * size, size)


class DataFile:
    """A new file `NAME.onnx.data`; `write` may be called from several threads."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = path.open("xb", buffering=0)
        self._lock = threading.Lock()
        self._end = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self._file.truncate(self._end)
            os.fsync(self._file.fileno())
        self._file.close()

    def reserve(self, nbytes: int) -> Region:
        """Room for one tensor, on a page of its own where it is large."""
        alignment = TABLE_ALIGNMENT if nbytes >= 256 * TABLE_ALIGNMENT else ALIGNMENT
        offset = -(-self._end // alignment) * alignment
        self._end = offset + nbytes
        return Region(self.path.name, offset, nbytes)

    def write(self, region: Region, start: int, array: npt.NDArray[Any]) -> None:
        """Fill a region from its byte `start`."""
        data = np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
        with self._lock:  # a lock and a seek, because Windows has no pwrite
            self._file.seek(region.offset + start)
            while data:
                data = data[self._file.write(data) :]
