"""The files of a bundle that its packed weights come from."""

from __future__ import annotations

import mmap

import numpy as np

from ondevice.bundle import Bundle
from ondevice.engines.simd.graph.onnx_file import Bytes, Graph, read_graph
from ondevice.errors import BundleCorruptError
from ondevice.progress import Advance


class Sources:
    """Graphs and the data files beside them, each mapped once."""

    def __init__(self, bundle: Bundle) -> None:
        self._bundle = bundle
        self._mapped: dict[str, mmap.mmap] = {}
        self._read: set[str] = set()

    def graph(self, name: str) -> Graph:
        self._read.add(name)
        return read_graph(self._bundle.graph(name), self._data)

    @property
    def size(self) -> int:
        """Bytes of all that was read."""
        return sum(self._bundle.manifest.files[name].size for name in self._names())

    def content(self) -> str:
        """What identifies all that was read: the hashes that the manifest lists."""
        return " ".join(self._bundle.manifest.files[name].sha256 for name in self._names())

    def verify(self, advance: Advance) -> None:
        """Compare what was read with those hashes, so that no bundle leaves a pack under another's name.

        Raises:
            BundleCorruptError: they differ.
        """
        for name in self._names():
            self._bundle.verify(name, advance)

    def release(self) -> None:
        """Let go of what was read of the data files; it stays in the system's cache and is mapped again where needed.

        A row of a table maps 64 KiB around it: 2,000 tokens of a prompt would hold 350 MB of E2B's tables.
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
