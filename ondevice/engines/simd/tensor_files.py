"""Maps the data files of a bundle into memory and gives access to their tensors as arrays.

The pack is made from these arrays, and single rows of embedding tables are read from them in every forward. Start with
`TensorFiles`; `Tensors` has the tensors of one graph.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import mmap
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ondevice.arrays import Float32Array
from ondevice.bundle import Bundle
from ondevice.bundle_format.tensor_table import Tensor
from ondevice.bundle_format.weight_format import IN_GROUPS, WeightFormat
from ondevice.errors import BundleCorruptError, BundleError, UnsupportedBundleError
from ondevice.progress import Advance


class UnsupportedGraphError(UnsupportedBundleError):
    """The simd engine has no kernel for the format or size of some weights. `auto` then runs the bundle with `ort`."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"the simd engine cannot run this bundle ({reason}): use --engine ort")
        self.reason = reason


@dataclass(frozen=True, eq=False)
class Matrix:
    """A matrix [rows, width] that is multiplied with activations, or a table whose rows are read individually."""

    codes: NDArray[np.uint8]
    """uint8[rows, bytes of `width` weights]; codes packed with the lowest bits first, or the bytes of plain numbers."""
    scales: NDArray[Any]
    """float32[rows, scales of `width` weights]; scales of a table may be float16."""
    format: WeightFormat
    input_step: float = 0.0
    """Static scale s of the matrix's input x, which becomes clamp(round(x / s), -128, 127) * s; 0 if it has none."""
    output_step: float = 0.0
    """Static scale of the matrix's output, in the same form."""
    minimums: NDArray[Any] | None = None
    """The minimums of an affine format, of the dtype and shape of the scales; None in other formats."""

    @property
    def rows(self) -> int:
        return int(self.codes.shape[0])

    @property
    def width(self) -> int:
        return int(self.codes.shape[1]) * 8 // self.format.bits

    def picked(self, rows: NDArray[np.int64]) -> Matrix:
        """A matrix of some rows, in this order; a copy."""
        minimums = None if self.minimums is None else self.minimums[rows]
        return dataclasses.replace(self, codes=self.codes[rows], scales=self.scales[rows], minimums=minimums)

    def joins(self, other: Matrix) -> bool:
        """Whether two matrices that read the same input can be packed as one matrix with the rows of both."""
        mine, theirs = (self.width, self.format, self.input_step), (other.width, other.format, other.input_step)
        return mine == theirs


class TensorFiles:
    """The data files of a bundle, each mapped once."""

    def __init__(self, bundle: Bundle) -> None:
        """Check all tensor tables, then map the data files.

        Raises:
            BundleCorruptError: a table does not match the configuration or the files, or a file cannot be mapped.
            BundleError: this user may not read a file.
        """
        bundle.manifest.check_tensors()
        self._bundle = bundle
        self._tables = bundle.manifest.tensors
        self._mapped: dict[str, mmap.mmap] = {}
        for name in sorted({table.file for table in self._tables.values()}):
            path = bundle.path / name
            try:
                with path.open("rb") as file:
                    self._mapped[name] = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            except PermissionError as error:
                raise BundleError(f"{path} may not be read by this user ({error.strerror})") from error
            except (OSError, ValueError) as error:  # ValueError: the file was emptied after its size was checked
                raise BundleCorruptError(f"{path} cannot be mapped ({error}): export the bundle again") from error
            if len(self._mapped[name]) != bundle.manifest.files[name].size:  # changed after its size was checked
                raise BundleCorruptError(f"{path} was cut short or grew while it was opened: export the bundle again")

    def tensors(self, graph: str, *, plain: bool = False) -> Tensors:
        """The tensors of a graph, by its file name; `plain` if bfloat16 and float32 matrices are accepted too."""
        table = self._tables[graph]
        return Tensors(table.tensors, np.frombuffer(self._mapped[table.file], np.uint8), plain=plain)

    @property
    def size(self) -> int:
        """Total size of all data files in bytes."""
        return sum(self._bundle.manifest.files[name].size for name in self._mapped)

    def content(self) -> str:
        """An identifier of a pack's input: sha256 of the tensor tables, and those of the data files in the manifest."""
        tables = json.dumps({graph: dataclasses.asdict(table) for graph, table in self._tables.items()}, sort_keys=True)
        hashes = [self._bundle.manifest.files[name].sha256 for name in self._mapped]
        return " ".join([hashlib.sha256(tables.encode()).hexdigest(), *hashes])

    def verify(self, advance: Advance) -> None:
        """Compare the sha256 of all data files with the manifest's, on which the name of a pack depends.

        Args:
            advance: called with the number of bytes of every piece that was read.

        Raises:
            BundleCorruptError: the hashes differ.
        """
        for name in self._mapped:
            self._bundle.verify(name, advance)

    def truncated(self) -> str | None:
        """Name of a data file that became shorter after it was mapped; None if there is none.

        Reading a page that such a file lost would end the process (SIGBUS).
        """
        return next((name for name, mapping in self._mapped.items() if mapping.size() < len(mapping)), None)

    def release(self) -> None:
        """Remove all pages of the data files from the process; they stay in the system's page cache.

        Reading a row of a table maps 64 KiB around it: a prompt of 2,000 tokens would keep 350 MB of E2B's tables
        resident.
        """
        if hasattr(mmap.mmap, "madvise"):
            for mapping in self._mapped.values():
                mapping.madvise(mmap.MADV_DONTNEED)


class Tensors:
    """The tensors of one graph by name, as views of a mapped file. Their offsets and shapes were checked before."""

    def __init__(self, table: Mapping[str, Tensor], data: NDArray[np.uint8], *, plain: bool) -> None:
        self._table, self._data, self._plain = table, data, plain

    def floats(self, name: str) -> Float32Array:
        """A small float32 tensor.

        Raises:
            BundleCorruptError: it holds a NaN or an infinity, one of which would make all logits NaN.
        """
        tensor = self._table[name]
        return self._finite(name, self._view(tensor.offset, tensor.bytes, np.float32).reshape(tensor.shape))

    def integers(self, name: str, below: int) -> NDArray[np.int64]:
        """An int64 vector. It is a copy: kernels use its numbers as indices, and the mapped file may change.

        Raises:
            BundleCorruptError: it holds a number outside 0..below - 1.
        """
        tensor = self._table[name]
        found: NDArray[np.int64] = self._view(tensor.offset, tensor.bytes, np.int64).copy()
        if found.min() < 0 or found.max() >= below:
            raise BundleCorruptError(f"tensor {name} holds numbers outside 0..{below - 1}: export the bundle again")
        return found

    def matrix(self, name: str, *, any_rows: bool = False) -> Matrix:
        """A matrix that is multiplied with activations; `any_rows` if their number need not be a multiple of 32.

        Raises:
            UnsupportedGraphError: there is no kernel for the format or size.
            BundleCorruptError: a scale is NaN or infinite.
        """
        tensor = self._table[name]
        form, (rows, width) = self._accepted(name, tensor), tensor.shape
        if form.group and form not in IN_GROUPS:
            raise UnsupportedGraphError(f"{name} is a matrix with blocks of {form.group}")
        if width % 32 or (rows % 32 and not any_rows):
            raise UnsupportedGraphError(f"{name} has {rows} x {width} weights, no multiples of 32")
        scales, minimums = self._scales(name, tensor)
        return Matrix(self._codes(tensor), scales, form, tensor.input_step, tensor.output_step, minimums)

    def matrices(self, name: str) -> tuple[Matrix, ...]:
        """The matrices of a layer's experts, from one tensor [experts, rows, width].

        Raises:
            UnsupportedGraphError: there is no kernel for the format or size.
        """
        tensor = self._table[name]
        form, (count, rows, width) = tensor.weight_format, tensor.shape
        if form not in IN_GROUPS or width % 32:
            raise UnsupportedGraphError(f"{name} has experts of {rows} x {width} {tensor.format} weights")
        codes = self._codes(tensor).reshape(count, rows, -1)
        scales, minimums = (
            None if each is None else each.reshape(count, rows, -1) for each in self._scales(name, tensor)
        )
        assert scales is not None
        return tuple(
            Matrix(codes[number], scales[number], form, minimums=None if minimums is None else minimums[number])
            for number in range(count)
        )

    def table(self, name: str, group: int = 1) -> Matrix:
        """A table each of whose entries is `group` neighbouring rows of a tensor; raises as `matrix` does."""
        tensor = self._table[name]
        form, (rows, width) = self._accepted(name, tensor), tensor.shape
        if width % 32 or (group > 1 and not form.group):
            raise UnsupportedGraphError(f"{name} has rows of {width} {tensor.format} weights in blocks of {form.group}")
        entries = rows // group
        shape = entries, group * form.scales(width)
        scales, minimums = self._scales(name, tensor)
        minimums = None if minimums is None else minimums.reshape(shape)
        return Matrix(self._codes(tensor).reshape(entries, -1), scales.reshape(shape), form, minimums=minimums)

    def _accepted(self, name: str, tensor: Tensor) -> WeightFormat:
        if not (tensor.weight_format.quantised or self._plain):
            raise UnsupportedGraphError(f"the weights of {name} are not quantised")
        return tensor.weight_format

    def _codes(self, tensor: Tensor) -> NDArray[np.uint8]:
        rows = tensor.scale_shape[0]
        return self._view(tensor.offset, tensor.bytes, np.uint8).reshape(rows, -1)

    def _scales(self, name: str, tensor: Tensor) -> tuple[NDArray[Any], NDArray[Any] | None]:
        """The scales, float32 or float16 [rows, scales per row], and the minimums if there are any; scales are
        zeros[rows, 0] for plain numbers.

        Those of groups of 32 are not checked for NaN and infinities, because there are many.
        """
        shape = tensor.scale_shape
        if tensor.scales is None:
            return np.zeros(shape, np.float32), None
        scales, minimums = (
            None if each is None else self._view(each.offset, each.bytes, np.dtype(each.dtype)).reshape(shape)
            for each in (tensor.scales, tensor.minimums)
        )
        assert scales is not None
        return scales if tensor.weight_format in IN_GROUPS else self._finite(name, scales), minimums

    def _view(self, offset: int, size: int, dtype: type[np.generic] | np.dtype[Any]) -> NDArray[Any]:
        return self._data[offset : offset + size].view(dtype)

    @staticmethod
    def _finite(name: str, values: NDArray[Any]) -> NDArray[Any]:
        if not np.isfinite(values).all():
            raise BundleCorruptError(f"tensor {name} holds numbers that are not finite: export the bundle again")
        return values
