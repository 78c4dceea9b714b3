"""The linear layers of towers, whose inputs and outputs are limited to ranges, and the projection of their rows."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from ondevice.bundle_format.weight_format import FLOAT32
from ondevice.errors import CheckpointError
from ondevice_export.graph.graph_builder import GraphBuilder
from ondevice_export.graph.matrix import linear, linear_of_codes, row_codes
from ondevice_export.graph.weights import Module, Weights


def projected(module: Module, rows: ir.Value, name: str, width: int) -> ir.Value:
    """`projection(norm(rows))`, the norm without a weight: [S, width] -> [S, H] (Gemma4MultimodalEmbedder)."""
    unit = module.builder.constant(np.ones(width, np.float32))
    return linear(module.builder, module.rms_norm(rows, unit), module.weights.matrix(name, FLOAT32))


class ClippedLinears:
    """Adds the linear layers of a tower to its graph (Gemma4ClippableLinear).

    Layers that read the same rows share the clipping and the quantising of these, as far as their ranges agree.
    """

    def __init__(self, builder: GraphBuilder, weights: Weights) -> None:
        self._builder, self._weights = builder, weights
        self._clipped: dict[tuple[ir.Value, float, float], ir.Value] = {}
        self._quantised: dict[ir.Value, tuple[ir.Value, ir.Value]] = {}

    def add(self, module: Module, x: ir.Value, name: str, *, order: npt.NDArray[np.int64] | None = None) -> ir.Value:
        """`clip(clip(x) @ weight.T)` with the ranges of the checkpoint, in the format of the layers.

        Args:
            module: the module that the layer belongs to.
            x: [N, width].
            name: the layer's name in the module.
            order: the order in which the weight's rows are stored, and so the outputs; None for that of the checkpoint.
        """
        x = self._product(module, self._clip(module, x, f"{name}.input"), f"{name}.linear.weight", order)
        return self._clip(module, x, f"{name}.output")

    def _product(self, module: Module, x: ir.Value, name: str, order: npt.NDArray[np.int64] | None) -> ir.Value:
        rows = None
        if order is not None:
            source, checkpoint = module.full_name(name), self._weights.checkpoint
            rows = lambda start, stop: checkpoint.picked_rows(source, order[start:stop])  # noqa: E731
        name = module.prefix + name
        if not self._weights.formats.layers.quantised:
            return linear(self._builder, x, self._weights.matrix(name, FLOAT32, rows=rows))
        if x not in self._quantised:
            self._quantised[x] = row_codes(self._builder, x)
        return linear_of_codes(self._builder, *self._quantised[x], self._weights.transposed(name, rows))

    def _clip(self, module: Module, x: ir.Value, name: str) -> ir.Value:
        """`x` within the range of this name; unchanged where the checkpoint has none."""
        ends = (f"{name}_min", f"{name}_max")
        if module.full_name(ends[0]) not in self._weights.checkpoint:
            return x
        least, most = (float(module.read(end)) for end in ends)
        if not least <= most:
            raise CheckpointError(f"{module.full_name(name)} has the range {least} to {most}")
        limits = [None if math.isinf(end) else self._builder.scalar(end) for end in (least, most)]
        if limits == [None, None]:
            return x
        if (x, least, most) not in self._clipped:
            self._clipped[x, least, most] = self._builder.op("Clip", x, *limits)
        return self._clipped[x, least, most]
