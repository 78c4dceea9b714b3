"""The weights of one graph: checkpoint tensors by name, stored on first use."""

from __future__ import annotations

import dataclasses
import math
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from ondevice.weight_format import BFLOAT16, FLOAT32, WeightFormat
from ondevice_export.checkpoint import Checkpoint
from ondevice_export.data_file import DataFile
from ondevice_export.export_options import Formats
from ondevice_export.graph.graph_builder import GraphBuilder
from ondevice_export.graph.matrix import linear
from ondevice_export.matrices import MatrixWriter, RowReader, StoredMatrix
from ondevice_export.quantized_modules import QuantizedModules
from ondevice_export.tensor_names import HEAD


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
        modules: QuantizedModules | None = None,
        prefix: str = "",
    ) -> None:
        self.formats = formats
        self._modules = modules
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
            modules=self._modules,
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
        """Store a matrix, or several one below the other; `rows` reads them where they come in another order.

        In a checkpoint that was trained quantised a matrix stays as it is, whatever the format.
        """
        return self._stored(self._prefix + name, form, half_scales, rows)

    def head(self) -> StoredMatrix:
        """Store a head that is not the token embedding."""
        return self._stored(HEAD, self.formats.head, False, None)

    def _stored(self, name: str, form: WeightFormat, half_scales: bool, rows: RowReader | None) -> StoredMatrix:
        if self._modules is not None:
            return self._as_trained(name, self._modules)
        *leading, width = self._checkpoint.shape(name)
        count = math.prod(leading)
        reader = rows or partial(self._checkpoint.rows, name)
        return self._writer.add(self._file, name, (count, width), form, reader, half_scales=half_scales)

    def _as_trained(self, name: str, modules: QuantizedModules) -> StoredMatrix:
        """A matrix whose codes, or numbers, are those of the checkpoint."""
        shape, module = modules.shape(name), modules.module(name)
        if module is not None:
            codes = partial(self._checkpoint.raw_rows, module.codes)
            return self._writer.copy(self._file, name, shape, module, codes)
        if modules.plain_format(name) == BFLOAT16:
            return self._writer.copy_plain(self._file, name, shape, partial(self._checkpoint.raw_rows, name))
        stored = self._writer.add(self._file, name, shape, FLOAT32, partial(self._checkpoint.rows, name))
        return dataclasses.replace(stored, as_trained=True)
