"""Inputs and outputs of an ONNX Runtime graph in memory that numpy owns."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from ondevice.errors import BundleCorruptError, reason

PARTS: tuple[Any, ...] = ("key", "value")
"""Of a layer's cache, in the order in which `KVCache` has them."""


class Binding:
    """One sequence's inputs and outputs of a graph. What has not moved is not bound again.

    Each session has bindings of its own, so that sessions that take turns do not bind anew at every turn.
    """

    def __init__(self, graph: ort.InferenceSession) -> None:
        self._binding = graph.io_binding()
        self._graph = graph
        self._held: dict[str, NDArray[Any]] = {}

    def array(self, name: str, value: NDArray[Any]) -> None:
        """Give an input that changes every time. The binding has its own copy, so that only a new shape binds anew."""
        held = self._held.get(name)
        if held is not None and held.shape == value.shape:
            held[...] = value
        else:
            self._bind(self._binding.bind_input, name, np.array(value, order="C"))

    def view(self, name: str, value: NDArray[np.float32]) -> None:
        """Bind an input to rows of a cache, float32[S, width], as [1, S, width]."""
        if not self._same(name, value):
            self._bind(self._binding.bind_input, name, value[None])

    def in_place(self, past: str, present: str, value: NDArray[np.float32]) -> None:
        """Bind an input and an output to the same rows: TensorScatter then writes the new ones and copies nothing."""
        if not self._same(past, value):
            self._bind(self._binding.bind_input, past, value[None])
            self._bind(self._binding.bind_output, present, value[None])

    def output(self, name: str, value: NDArray[Any]) -> None:
        if not self._same(name, value):
            self._bind(self._binding.bind_output, name, value)

    def run(self) -> None:
        """Raises BundleCorruptError where the graph cannot be run, whatever its shapes promised."""
        try:
            self._graph.run_with_iobinding(self._binding)
        except Exception as error:  # onnxruntime's own errors share no base class
            raise BundleCorruptError(
                f"onnxruntime cannot run this bundle's graphs ({reason(error)}): export the bundle again"
            ) from error

    def _same(self, name: str, value: NDArray[Any]) -> bool:
        held = self._held.get(name)
        return held is not None and held.ctypes.data == value.ctypes.data and held.size == value.size

    def _bind(self, bind: Any, name: str, value: NDArray[Any]) -> None:
        bind(name, "cpu", 0, value.dtype.type, value.shape, value.ctypes.data)
        self._held[name] = value  # the binding holds an address only
