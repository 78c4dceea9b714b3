"""Runs a bundle's vision tower on ONNX Runtime."""

from __future__ import annotations

from typing import Any

import numpy as np

from ondevice.arrays import Float32Array
from ondevice.bundle import Bundle
from ondevice.bundle_format import graph_io
from ondevice.bundle_format.vision import VisionEntry
from ondevice.engines.graph_check import vision_interface
from ondevice.errors import BundleCorruptError, MissingDependencyError, reason
from ondevice.media.encoded import Cancelled
from ondevice.media.images import Pixels


class VisionTower:
    """The tower of a bundle, for one thread at a time. Its graph is opened when the first picture is encoded."""

    def __init__(self, bundle: Bundle, vision: VisionEntry, threads: int) -> None:
        """
        Args:
            bundle: the bundle.
            vision: the tower's configuration.
            threads: threads to compute with.
        """
        self._bundle, self._vision, self._threads = bundle, vision, threads
        self._graph: Any = None

    def encode(self, pixels: Pixels, cancelled: Cancelled = lambda: False) -> Float32Array | None:
        """The soft tokens of a picture, float32[tokens, H]; None after a cancellation.

        Raises:
            BundleCorruptError: the graph is not what the exporter writes, or cannot be run.
            MissingDependencyError: onnxruntime is not installed.
        """
        try:
            from ondevice.engines.ort import run_graph
        except ModuleNotFoundError as error:
            if error.name != "onnxruntime":
                raise
            raise MissingDependencyError("onnxruntime", what="a picture in a prompt") from error
        if self._graph is None:
            self._graph = self._open()
        patches, column, row = pixels.patches()
        feeds = {graph_io.PATCHES: patches, graph_io.COLUMN: column, graph_io.ROW: row}
        try:
            rows = run_graph(self._graph, graph_io.SOFT_ROWS, feeds, cancelled)
        except Exception as error:  # onnxruntime's own errors share no base class
            raise BundleCorruptError(
                f"onnxruntime cannot run this bundle's {self._vision.graph} ({reason(error)}): export the bundle again"
            ) from error
        if rows is None:
            return None
        if len(rows) != pixels.tokens:
            raise BundleCorruptError(
                f"{self._vision.graph} gives {len(rows)} rows for {pixels.tokens}: export it again"
            )
        return np.ascontiguousarray(rows, np.float32)

    def _open(self) -> Any:
        from ondevice.engines.ort import open_graph

        expected = vision_interface(self._vision, self._bundle.manifest.target)
        self._bundle.manifest.check_tensors()
        return open_graph(self._bundle, self._vision.graph, expected, self._threads)
