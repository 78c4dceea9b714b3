"""Runs a bundle's vision tower on ONNX Runtime."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np

from ondevice.arrays import Float32Array
from ondevice.bundle import Bundle
from ondevice.bundle_format import graph_io
from ondevice.bundle_format.vision import VisionEntry
from ondevice.engines.graph_check import vision_interface
from ondevice.errors import BundleCorruptError, MissingDependencyError, reason
from ondevice.media.images import Pixels


class VisionTower:
    """The tower of a bundle. Its graph is opened when the first picture is encoded. Safe to use from several threads,
    which encode one after another: the tower's own threads use all cores.
    """

    def __init__(self, bundle: Bundle, vision: VisionEntry, threads: int) -> None:
        """
        Args:
            bundle: the bundle.
            vision: the tower's configuration.
            threads: threads to compute with.
        """
        self._bundle, self._vision, self._threads = bundle, vision, threads
        self._lock = threading.Lock()
        self._graph: Any = None

    def encode(self, pixels: Pixels) -> Float32Array:
        """The soft tokens of a picture, float32[tokens, H].

        Raises:
            BundleCorruptError: the graph is not what the exporter writes, or cannot be run.
            MissingDependencyError: onnxruntime is not installed.
        """
        patches, column, row = pixels.patches()
        feeds = {graph_io.PATCHES: patches, graph_io.COLUMN: column, graph_io.ROW: row}
        with self._lock:
            if self._graph is None:
                self._graph = self._open()
            try:
                (rows,) = self._graph.run([graph_io.SOFT_ROWS], feeds)
            except Exception as error:  # onnxruntime's own errors share no base class
                raise BundleCorruptError(
                    f"onnxruntime cannot run this bundle's {self._vision.graph} ({reason(error)}): "
                    "export the bundle again"
                ) from error
        if len(rows) != pixels.tokens:
            raise BundleCorruptError(
                f"{self._vision.graph} gives {len(rows)} rows for {pixels.tokens}: export it again"
            )
        return np.ascontiguousarray(rows, np.float32)

    def _open(self) -> Any:
        try:
            from ondevice.engines.ort import open_graph
        except ModuleNotFoundError as error:
            if error.name != "onnxruntime":
                raise
            raise MissingDependencyError("onnxruntime", what="a picture in a prompt") from error
        expected = vision_interface(self._vision, self._bundle.manifest.target)
        self._bundle.manifest.check_tensors()
        return open_graph(self._bundle, self._vision.graph, expected, self._threads, in_place=True)
