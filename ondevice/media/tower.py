"""Runs a bundle's towers on ONNX Runtime."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ondevice.arrays import Float32Array
from ondevice.bundle import Bundle
from ondevice.bundle_format import graph_io
from ondevice.bundle_format.interfaces import Interface
from ondevice.errors import BundleCorruptError, MissingDependencyError
from ondevice.media.encoded import Cancelled


class MediaPiece(Protocol):
    """The unit that a tower encodes at once: a picture, or at most 30 seconds of a sound."""

    @property
    def tokens(self) -> int:
        """The number of soft tokens."""
        ...

    @property
    def nbytes(self) -> int:
        """Bytes in memory."""
        ...

    def digest(self) -> bytes:
        """Identifies the soft tokens."""
        ...

    def feeds(self) -> Mapping[str, NDArray[Any]]:
        """The inputs of the tower's graph; see `graph_io`."""
        ...


class Tower:
    """A tower of a bundle, for one thread at a time. Its graph is opened when something is first encoded."""

    def __init__(self, bundle: Bundle, graph: str, interface: Interface, threads: int) -> None:
        """
        Args:
            bundle: the bundle.
            graph: file name of the tower's graph.
            interface: the inputs and outputs that it must have.
            threads: threads to compute with.
        """
        self._bundle, self._name, self._interface, self._threads = bundle, graph, interface, threads
        self._graph: Any = None

    def encode(self, piece: MediaPiece, cancelled: Cancelled = lambda: False) -> Float32Array | None:
        """The soft tokens, float32[tokens, H]; None after a cancellation.

        Raises:
            BundleCorruptError: the graph is not what the exporter writes, or cannot be run.
            MemoryError: there is not enough memory.
            MissingDependencyError: onnxruntime is not installed.
        """
        try:
            from ondevice.engines.ort import meaning, run_graph
        except ModuleNotFoundError as error:
            if error.name != "onnxruntime":
                raise
            raise MissingDependencyError("onnxruntime", what="a picture or sound in a prompt") from error
        if self._graph is None:
            self._graph = self._open()
        try:
            rows = run_graph(self._graph, graph_io.SOFT_ROWS, dict(piece.feeds()), cancelled)
        except Exception as error:
            raise meaning(error, f"run this bundle's {self._name}") from error
        if rows is None:
            return None
        if len(rows) != piece.tokens:
            raise BundleCorruptError(f"{self._name} gives {len(rows)} rows for {piece.tokens}: export it again")
        return np.ascontiguousarray(rows, np.float32)

    def _open(self) -> Any:
        from ondevice.engines.ort import open_graph

        self._bundle.manifest.check_tensors()
        return open_graph(self._bundle, self._name, self._interface, self._threads)
