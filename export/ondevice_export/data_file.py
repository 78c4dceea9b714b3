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

from ondevice.bundle_format.tensor_table import ALIGNMENT

TABLE_ALIGNMENT = 4096
"""Alignment in bytes of large regions: one memory page, for runtimes that map a table into memory."""


@dataclass(frozen=True)
class Region:
    """A byte range of a data file."""

    location: str
    offset: int
    nbytes: int

    def part(self, number: int, parts: int) -> Region:
        """Part `number` of the region cut into `parts` equal parts."""
        size = self.nbytes // parts
        return Region(self.location, self.offset + number * size, size)


class DataFile:
    """A file `NAME.onnx.data` with a graph's weights; `write` may be called from several threads."""

    def __init__(self, path: Path, *, goes_on: bool = False) -> None:
        """
        Args:
            path: of a new file.
            goes_on: the file exists, and what is not written again is kept.
        """
        self.path = path
        self._file = path.open("r+b" if goes_on else "xb", buffering=0)
        self._lock = threading.Lock()
        self._end = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self._file.truncate(self._end)
            self.sync()
        self._file.close()

    def sync(self) -> None:
        """Wait until the disk has what was written."""
        os.fsync(self._file.fileno())

    def reserve(self, nbytes: int) -> Region:
        """Reserve `nbytes` for one tensor, aligned to a page if the tensor takes 1 MiB or more."""
        alignment = TABLE_ALIGNMENT if nbytes >= 256 * TABLE_ALIGNMENT else ALIGNMENT
        offset = -(-self._end // alignment) * alignment
        self._end = offset + nbytes
        return Region(self.path.name, offset, nbytes)

    def write(self, region: Region, start: int, array: npt.NDArray[Any]) -> None:
        """Write an array's bytes into a region, from the region's byte `start` on."""
        data = np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
        with self._lock:  # locked seek and write, because Windows has no pwrite
            self._file.seek(region.offset + start)
            while data:
                data = data[self._file.write(data) :]
