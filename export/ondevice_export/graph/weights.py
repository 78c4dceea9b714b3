"""The weights of one graph: tensors of a checkpoint, stored on first use, and `Module`, which adds nodes with them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from ondevice.bundle_format.audio import AudioEntry
from ondevice.bundle_format.decoder import Decoder
from ondevice.bundle_format.tensor_table import EMBEDDING, HEAD, Format, Tensor
from ondevice.bundle_format.vision import VisionEntry
from ondevice.bundle_format.weight_format import BFLOAT16, FLOAT32, WeightFormat
from ondevice.errors import CheckpointError
from ondevice_export.calibration.rounding import Factors
from ondevice_export.calibration.source import FactorSource
from ondevice_export.checkpoint.named_tensors import NamedTensors
from ondevice_export.checkpoint.quantized.gemma_modules import QuantizedModules
from ondevice_export.data_file import DataFile
from ondevice_export.export_options import Formats
from ondevice_export.graph.graph_builder import GraphBuilder
from ondevice_export.graph.matrix import linear
from ondevice_export.matrices import (
    LateFactors,
    MatrixWriter,
    RowReader,
    StoredMatrix,
    is_on_grid,
)

_PLAIN: dict[str, Format] = {"float32": "float32", "int64": "int64"}
_LOOKED_AT = 64
"""Rows of a matrix that tell whether it was trained for a grid."""


class Weights:
    """Stores tensors of a checkpoint in the data file of a graph.

    Attributes:
        checkpoint: the source of the tensors.
        formats: weight formats of the graph.
        tensors: the graph's tensor table: every stored tensor by its name without the checkpoint's prefix.
    """

    def __init__(
        self,
        source: NamedTensors,
        file: DataFile,
        writer: MatrixWriter,
        *,
        formats: Formats,
        modules: QuantizedModules | None = None,
        calibration: FactorSource | None = None,
    ) -> None:
        """
        Args:
            source: the source of the tensors, with their names in it.
            file: the data file that the tensors are written to.
            writer: quantises and writes matrices.
            formats: weight formats; ignored for a checkpoint that was trained quantised.
            modules: the quantised modules of such a checkpoint, else None.
            calibration: the moments of the matrices' inputs; None rounds without.
        """
        self.checkpoint = source.checkpoint
        self.formats = formats
        self.tensors: dict[str, Tensor] = {}
        self._modules = modules
        self._calibration = calibration
        self._file = file
        self._writer = writer
        self._source = source
        self._columns: dict[str, npt.NDArray[np.float32]] = {}
        """Matrices by their names in the checkpoint -> factors of their columns: see `rescale`."""

    def full_name(self, name: str) -> str:
        """The name of a tensor in the checkpoint."""
        return self._source.names.of(name)

    def read(self, name: str) -> npt.NDArray[np.float32]:
        """Read a small tensor as float32."""
        return self._source.read(name)

    def token_ids(self, name: str, count: int, vocab_size: int) -> npt.NDArray[np.int64]:
        """Read the ids of `count` tokens; CheckpointError unless all differ and are below `vocab_size`."""
        ids = self.checkpoint.integers(name)
        found = np.unique(ids)
        if ids.shape != (count,) or len(found) != count or found[0] < 0 or found[-1] >= vocab_size:
            raise CheckpointError(f"{name} does not name {count} of {vocab_size} tokens once each")
        return ids

    def rescale(self, norm: npt.NDArray[np.float32], readers: Sequence[str]) -> npt.NDArray[np.float32]:
        """Multiply the columns of matrices, and divide the weights of the norm before them, by `FactorSource.rescale`.

        Matrices that were trained for the grid of their format would leave it, and those that are stored as they are
        have no columns to multiply: with one of them, nothing is changed.

        Args:
            norm: the norm's weights.
            readers: all matrices that multiply its output, and possibly some that the checkpoint does not have. They
                are multiplied when they are stored.

        Returns:
            The norm's new weights.
        """
        if self._calibration is None:
            return norm
        names = [name for name in map(self.full_name, readers) if name in self.checkpoint]
        if not names or self._calibration.is_written(names[0]):
            return norm
        formats = {name: self.formats.of(self.checkpoint, name, self.formats.layers) for name in names}
        rounded = {name: form for name, form in formats.items() if form.bits == 4}
        if any(self.formats.kept(self.checkpoint, name) for name in names):
            return norm
        if not rounded or any(self._is_trained_for(form, name) for name, form in rounded.items()):
            return norm
        factors = self._calibration.rescale(names, self._complete)
        if factors is None or factors.shape != norm.shape:
            return norm  # an importance matrix of another model is an error when a matrix is rounded
        self._columns.update(dict.fromkeys(names, factors))
        return norm / factors

    def array(
        self, builder: GraphBuilder, name: str, values: npt.NDArray[Any], shape: tuple[int, ...] | None = None
    ) -> ir.Value:
        """Store a small float32 or int64 array; `shape` is its shape in the graph if that differs from the array's.

        Raises:
            CheckpointError: a number is NaN or infinite.
        """
        if not np.isfinite(values).all():
            raise CheckpointError(f"{self.full_name(name)} holds NaN or infinite numbers")
        region = self._file.reserve(values.nbytes)
        if not self._is_written(name):
            self._file.write(region, 0, values)
        self._list(name, Tensor(values.shape, _PLAIN[values.dtype.name], region.offset, region.nbytes))
        return builder.external(name, region, ir.DataType.from_numpy(values.dtype), shape or values.shape)

    def matrix(
        self, name: str, form: WeightFormat, *, half_scales: bool = False, rows: RowReader | None = None
    ) -> StoredMatrix:
        """Store a matrix, or several as one, stacked by rows; `rows` reads them if they are stored in another order.

        A matrix of a checkpoint that was trained quantised keeps its codes, and `form` is ignored.
        """
        source = self.full_name(name)
        if self._modules is None:
            *leading, width = shape = self.checkpoint.shape(source)
            reader = rows or partial(self._rows, source)
            size = math.prod(leading), width
            kept = self.formats.kept(self.checkpoint, source) if rows is None else None
            if kept is None:
                stored = self._quantised(name, source, size, self.formats.chosen.get(source, form), reader, half_scales)
            elif self._is_written(source):
                stored = self._writer.keep(self._file, source, size, kept, half_scales=half_scales)
            else:
                blocks = partial(self.checkpoint.kept_blocks, source)
                stored = self._writer.add_blocks(self._file, source, size, kept, blocks, half_scales=half_scales)
        else:
            shape = self._modules.shape(source)
            stored = self._as_trained(source, shape, self._modules)
        self._list(name, stored.tensor(shape))
        return stored

    def transposed(self, name: str, rows: RowReader | None) -> StoredMatrix:
        """Store a matrix as `MatrixWriter.add_transposed` does; `rows` as for `matrix`."""
        source = self.full_name(name)
        count, width = self.checkpoint.shape(source)
        reader = rows or partial(self.checkpoint.rows, source)
        stored = self._writer.add_transposed(self._file, source, (count, width), reader)
        self._list(name, stored.tensor((count, width)))
        return stored

    def _quantised(  # noqa: PLR0917
        self, name: str, source: str, size: tuple[int, int], form: WeightFormat, rows: RowReader, half_scales: bool
    ) -> StoredMatrix:
        """Store a matrix that is quantised here, by the moments of its inputs if they are known.

        A matrix that an export that was ended has written is kept, of any format: its columns may be rescaled.
        """
        factors: Factors | LateFactors | None = None
        if self._is_written(source):
            return self._writer.keep(self._file, source, size, form, half_scales=half_scales)
        if self._calibration is not None and form.bits == 4:
            found = partial(self._calibration.factors, source, self._complete)
            factors = found if name in {EMBEDDING, HEAD} else found()
        return self._writer.add(self._file, source, size, form, rows, half_scales=half_scales, factors=factors)

    def _is_trained_for(self, form: WeightFormat, name: str) -> bool:
        """Whether the first rows of a matrix of the checkpoint lie on the grid of a format."""
        return is_on_grid(self.checkpoint.rows(name, 0, min(_LOOKED_AT, self.checkpoint.shape(name)[0])), form)

    def _rows(self, name: str, start: int, stop: int) -> npt.NDArray[np.float32]:
        """Rows of a matrix of the checkpoint, rescaled."""
        rows, factors = self.checkpoint.rows(name, start, stop), self._columns.get(name)
        return rows if factors is None else rows * factors

    def _complete(self) -> None:
        """Wait until all matrices that were added are on the disk."""
        self._writer.finish()
        self._file.sync()

    def _is_written(self, name: str) -> bool:
        """Whether an export that was ended has written a tensor."""
        return self._calibration is not None and self._calibration.is_written(name)

    def _as_trained(self, name: str, shape: tuple[int, int], modules: QuantizedModules) -> StoredMatrix:
        """Store a matrix with the checkpoint's own codes, or its own numbers if it is not quantised."""
        module = modules.module(name)
        if module is not None:
            codes = partial(self.checkpoint.raw_rows, module.codes)
            return self._writer.copy(self._file, name, shape, module, codes)
        if modules.plain_format(name) == BFLOAT16:
            return self._writer.copy_plain(self._file, name, shape, partial(self.checkpoint.raw_rows, name))
        stored = self._writer.add(self._file, name, shape, FLOAT32, partial(self.checkpoint.rows, name))
        return dataclasses.replace(stored, as_trained=True)

    def _list(self, name: str, tensor: Tensor) -> None:
        if name in self.tensors:
            raise ValueError(f"{name} was stored before")
        self.tensors[name] = tensor


@dataclass(frozen=True)
class Module:
    """Adds a module's nodes to a graph; its weights are named relative to a prefix such as `layers.3.self_attn.`."""

    builder: GraphBuilder
    config: Decoder | VisionEntry | AudioEntry
    weights: Weights
    prefix: str = ""

    def at(self, prefix: str) -> Module:
        """The submodule with this prefix."""
        return dataclasses.replace(self, prefix=self.prefix + prefix)

    def full_name(self, name: str) -> str:
        """The name of one of its tensors in the checkpoint."""
        return self.weights.full_name(self.prefix + name)

    def read(self, name: str) -> npt.NDArray[np.float32]:
        """Read a small tensor of the checkpoint as float32."""
        return self.weights.read(self.prefix + name)

    def vector(self, name: str) -> ir.Value:
        """Store a small tensor as float32 and return its initialiser."""
        return self.array(name, self.read(name))

    def array(self, name: str, values: npt.NDArray[Any], shape: tuple[int, ...] | None = None) -> ir.Value:
        """Store a small array under this name and return its initialiser; see `Weights.array`."""
        return self.weights.array(self.builder, self.prefix + name, values, shape)

    def matrix(self, name: str, *, half_scales: bool = False) -> StoredMatrix:
        """Store a matrix in the format of the layers."""
        return self.weights.matrix(self.prefix + name, self.weights.formats.layers, half_scales=half_scales)

    def linear(self, x: ir.Value, name: str) -> ir.Value:
        """`x @ weight.T`: [T, width] -> [T, rows]."""
        return linear(self.builder, x, self.matrix(f"{name}.weight"))

    def norm(self, x: ir.Value, name: str, readers: Sequence[str] = ()) -> ir.Value:
        """`rms_norm` of `x` with the weight of this name.

        `readers` are the modules that read its output, if nothing else does: they may be rescaled with the norm.
        """
        weight = self.weights.rescale(self.read(f"{name}.weight"), [f"{self.prefix}{each}.weight" for each in readers])
        return self.rms_norm(x, self.array(f"{name}.weight", weight))

    def rms_norm(self, x: ir.Value, weight: ir.Value) -> ir.Value:
        """`x * (mean(x**2) + eps)**-0.5 * weight` over the last axis (Gemma4RMSNorm)."""
        return self.builder.op("RMSNormalization", x, weight, axis=-1, epsilon=self.config.norm_eps)
