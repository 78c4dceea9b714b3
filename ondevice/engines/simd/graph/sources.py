"""The graphs of a bundle and the data files beside them, mapped: where packed weights and tables come from."""

from __future__ import annotations

import mmap

import numpy as np

from ondevice.bundle import Bundle
from ondevice.engines.onnx.file import Bytes, Graph, read_graph
from ondevice.errors import BundleCorruptError
from ondevice.progress import Advance


class Sources:
    """Reads a bundle's graphs; every data file that they name is mapped once."""

    def __init__(self, bundle: Bundle) -> None:
        self._bundle = bundle
        self._mapped: dict[str, mmap.mmap] = {}
        self._read: set[str] = set()

    def graph(self, name: str) -> Graph:
        self._read.add(name)
        return read_graph(self._bundle.graph(name), self._data)

    @property
    def size(self) -> int:
        """Bytes of all graphs and data files that were read."""
        return sum(self._bundle.manifest.files[name].size for name in self._names())

    def content(self) -> str:
        """The sha256 of all files that were read, as the manifest lists them: the name of their content."""
        return " ".join(self._bundle.manifest.files[name].sha256 for name in self._names())

    def verify(self, advance: Advance) -> None:
        """Compare the files with those hashes: a pack's name is made of them.

        Raises:
            BundleCorruptError: they differ.
        """
        for name in self._names():
            self._bundle.verify(name, advance)

    def truncated(self) -> str | None:
        """A mapped data file that has become shorter since: to read what it lost would end the process (SIGBUS)."""
        return next((name for name, mapping in self._mapped.items() if mapping.size() < len(mapping)), None)

    def release(self) -> None:
        """Unmap the pages of the data files that were touched; they stay in the system's cache.

        A row of a table maps 64 KiB around it: 2,000 tokens of a prompt would keep 350 MB of E2B's tables resident.
        """
        if hasattr(mmap.mmap, "madvise"):
            for mapping in self._mapped.values():
                mapping.madvise(mmap.MADV_DONTNEED)

    def _names(self) -> list[str]:
        return sorted(self._read | set(self._mapped))

    def _data(self, name: str) -> Bytes:
        if name not in self._mapped:
            path = self._bundle.file(name)
            if path is None:
                raise BundleCorruptError(f"a graph reads {name!r}, which the bundle does not list: export it again")
            try:
                with path.open("rb") as file:
                    self._mapped[name] = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            except (OSError, ValueError) as error:  # ValueError: it is empty, since its size was checked
                raise BundleCorruptError(f"{path} cannot be mapped ({error}): export the bundle again") from error
        return np.frombuffer(self._mapped[name], np.uint8)
