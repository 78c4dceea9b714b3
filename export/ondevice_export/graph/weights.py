"""The weights of one graph: checkpoint tensors by name, stored on first use."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from ondevice.weight_format import WeightFormat
from ondevice_export.checkpoint import Checkpoint
from ondevice_export.data_file import DataFile
from ondevice_export.export_options import Formats
from ondevice_export.graph.graph_builder import GraphBuilder
from ondevice_export.graph.matrix import linear
from ondevice_export.matrices import MatrixWriter, RowReader, StoredMatrix


class Weights:
    """Stores tensors of a checkpoint in the data file and adds them to a graph as initialisers.

    Attributes:
        formats: of the weights.
    """

    def __init__(
        self,
        builder: GraphBuilder,
        checkpoint: Checkpoint,
        file: DataFile,
        writer: MatrixWriter,
        *,
        formats: Formats,
        prefix: str = "",
    ) -> None:
        self.formats = formats
        self._builder = builder
        self._checkpoint = checkpoint
        self._file = file
        self._writer = writer
        self._prefix = prefix

    def at(self, prefix: str) -> Weights:
        """The same weights seen from below a prefix."""
        return Weights(
            self._builder,
            self._checkpoint,
            self._file,
            self._writer,
            formats=self.formats,
            prefix=self._prefix + prefix,
        )

    def read(self, name: str) -> npt.NDArray[np.float32]:
        """A small tensor."""
        return self._checkpoint.read(self._prefix + name)

    def vector(self, name: str) -> ir.Value:
        """A small tensor, kept as float32."""
        return self.array(name, self.read(name))

    def array(self, name: str, values: npt.NDArray[Any]) -> ir.Value:
        """A small float32 or int64 array; under 1 KB it stays inside the graph."""
        if values.nbytes <= 1024:
            return self._builder.inline(self._prefix + name, values)
        region = self._file.reserve(values.nbytes)
        self._file.write(region, 0, values)
        return self._builder.external(self._prefix + name, region, ir.DataType.from_numpy(values.dtype), values.shape)

    def linear(self, x: ir.Value, name: str) -> ir.Value:
        """Apply a linear layer: [T, width] -> [T, rows]."""
        return linear(self._builder, x, self.matrix(name, self.formats.layers))

    def matrix(
        self, name: str, form: WeightFormat, *, half_scales: bool = False, rows: RowReader | None = None
    ) -> StoredMatrix:
        """Store a matrix, or several one below the other; `rows` reads them where they come in another order."""
        full = self._prefix + name
        *leading, width = self._checkpoint.shape(full)
        count = math.prod(leading)
        reader = rows or partial(self._checkpoint.rows, full)
        return self._writer.add(self._file, full, (count, width), form, reader, half_scales=half_scales)
