"""Quantises the matrices of a checkpoint into a data file in chunks of rows.

No matrix is whole in memory, but for those of towers that are stored transposed, which have some millions of weights.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Any, Self, cast

import numpy as np
import numpy.typing as npt

from ondevice.arrays import Float32Array
from ondevice.bundle_format.tensor_table import Format, Scales, Tensor
from ondevice.bundle_format.weight_format import BFLOAT16, BY_ROW, WeightFormat
from ondevice.errors import CheckpointError
from ondevice.progress import Advance
from ondevice_export.calibration.rounding import Factors, Grid, round_rows
from ondevice_export.checkpoint.quantized.gemma_modules import QuantizedModule
from ondevice_export.data_file import DataFile, Region
from ondevice_export.quantize import BLOCK, Quantized, dequantize, quantize

RowReader = Callable[[int, int], Float32Array]
RawReader = Callable[[int, int], npt.NDArray[np.uint8]]
LateFactors = Callable[[], Factors | None]
BlockReader = Callable[[int, int], tuple[npt.NDArray[np.uint8], npt.NDArray[Any], npt.NDArray[Any] | None]]

_CHUNK = 1 << 19
"""Weights per chunk: 2 MiB as float32, which fit in a core's cache."""
_MAX_WORKERS = 8
_ON_GRID = 1e-5
"""Squared error of bfloat16 relative to the weights', at most 4e-6; that of rounding to 4 bits is 6e-3."""
MAX_ACTIVATION, MAX_TRANSPOSED = 90, 91
"""Largest magnitudes of codes, of activations and of a matrix that is stored transposed and multiplies them.

On x86-64 CPUs without dot-product instructions, ONNX Runtime's product of unsigned with signed bytes adds two products
in 16 bits, where 2 * (2 * 90) * 91 still fits. Other pairs, such as 127 and 64, lose more.
"""
_FORMATS: dict[int, Format] = {2: "int2", 4: "int4", 8: "int8", 16: "bfloat16", 32: "float32"}
"""Bits -> name of a format without a table."""


@dataclass(frozen=True)
class StoredMatrix:
    """A matrix [rows, width] in a data file: plain numbers, codes in blocks of 32, or a checkpoint's own codes."""

    name: str
    rows: int
    width: int
    format: WeightFormat
    data: Region
    scales: Region | None = None
    half_scales: bool = False
    """Whether scales and minimums are stored as fp16 instead of float32; their values are exact in both."""
    input_step: float = 0.0
    """Static scale of a linear layer's input activations; 0 if there is none."""
    output_step: float = 0.0
    """Static scale of a linear layer's output activations; 0 if there is none."""
    as_trained: bool = False
    """Whether the data is copied from a checkpoint that was trained quantised."""
    minimums: Region | None = None
    """In an affine format."""

    def tensor(self, shape: tuple[int, ...]) -> Tensor:
        """The matrix's entry in the tensor table; `shape` has three dimensions if the tensor holds several matrices."""
        scales, minimums = (
            None if each is None else Scales("float16" if self.half_scales else "float32", each.offset, each.nbytes)
            for each in (self.scales, self.minimums)
        )
        form = self.format
        name: Format = cast("Format", form.name) if form.table else _FORMATS[form.bits]
        return Tensor(
            shape, name, self.data.offset, self.data.nbytes, form.group, scales,
            self.input_step, self.output_step, minimums,
        )  # fmt: skip

    def part(self, number: int, parts: int) -> StoredMatrix:
        """Matrix `number` of `parts` matrices of equal size that were stored as one, stacked by rows."""
        scales, minimums = (None if each is None else each.part(number, parts) for each in (self.scales, self.minimums))
        return StoredMatrix(
            f"{self.name}.{number}", self.rows // parts, self.width, self.format, self.data.part(number, parts), scales,
            self.half_scales, minimums=minimums,
        )  # fmt: skip


class MatrixWriter:
    """Writes matrices in several threads; all are complete when its `with` block ends."""

    def __init__(self, advance: Advance) -> None:
        self._advance = advance
        self._pool = ThreadPoolExecutor(min(os.cpu_count() or 1, _MAX_WORKERS))
        self._pending: set[Future[int]] = set()
        self._late: list[Callable[[], None]] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                self.finish()
                for write in self._late:
                    write()
                self.finish()
        finally:
            self._pool.shutdown(wait=True, cancel_futures=True)

    def finish(self) -> None:
        """Wait until all matrices that were added are complete; raises what `add` does of them."""
        self._drain(0)

    def add(
        self,
        file: DataFile,
        name: str,
        shape: tuple[int, int],
        form: WeightFormat,
        rows: RowReader,
        *,
        half_scales: bool = False,
        factors: Factors | LateFactors | None = None,
    ) -> StoredMatrix:
        """Start to quantise and write a matrix in the background.

        Args:
            file: the data file to write to.
            name: the tensor's name, for messages and for the graph.
            shape: rows and width.
            form: one of ROUNDED, or FLOAT32.
            rows: `rows(start, stop)` returns these rows as float32; called from several threads.
            half_scales: store the scales as fp16 instead of float32.
            factors: round by the moments of the matrix's inputs (`rounding.feedback`); None rounds each weight alone. A
                function is called for them when all other matrices are complete, and the matrix is written then.

        Raises:
            CheckpointError: the width is not a multiple of 32, or a weight is NaN or infinite (possibly one of a matrix
                that was added earlier).
        """
        stored = _reserve(file, name, shape, form, half_scales)
        if callable(factors):
            self._late.append(lambda: self._round(file, stored, rows, factors()))
        else:
            self._round(file, stored, rows, factors)
        return stored

    def keep(
        self, file: DataFile, name: str, shape: tuple[int, int], form: WeightFormat, *, half_scales: bool = False
    ) -> StoredMatrix:
        """Keep a matrix that is in the data file already, where `add` would write it. Arguments are those of `add`."""
        stored = _reserve(file, name, shape, form, half_scales)
        self._advance(stored.rows * stored.width)
        return stored

    def add_blocks(
        self,
        file: DataFile,
        name: str,
        shape: tuple[int, int],
        form: WeightFormat,
        blocks: BlockReader,
        *,
        half_scales: bool,
    ) -> StoredMatrix:
        """Start to write a matrix that is quantised already, unchanged.

        Args:
            file, name, shape, half_scales: as for `add`.
            form: one of IN_GROUPS.
            blocks: `blocks(start, stop)` returns the codes of these rows, uint8[rows, width] with a code per byte,
                counted from 0 (see `WeightFormat.zero`), their scales [rows, width / 32] and, in an affine format,
                minimums, else None, both of a float type. Values that are not exact in fp16 are rounded to it. Called
                from several threads.

        Raises:
            CheckpointError: the width is not a multiple of 32, or a scale or minimum is NaN, infinite or beyond fp16.
        """
        stored = _reserve(file, name, shape, form, half_scales)
        self._submit(stored, partial(_write_read_blocks, file, stored, blocks))
        return stored

    def add_transposed(self, file: DataFile, name: str, shape: tuple[int, int], rows: RowReader) -> StoredMatrix:
        """Start to quantise a matrix to int8[width, rows] with one scale per row, for MatMulIntegerToFloat.

        Args:
            file, name, shape, rows: as for `add`. The matrix is read as a whole.

        Raises:
            CheckpointError: as `add`.
        """
        count, width = shape
        data, scales = file.reserve(count * width), file.reserve(4 * count)
        stored = StoredMatrix(name, count, width, BY_ROW[8], data, scales)
        self._pending.add(self._pool.submit(_write_transposed, file, stored, rows))
        self._drain(2 * _MAX_WORKERS)
        return stored

    def copy(
        self, file: DataFile, name: str, shape: tuple[int, int], module: QuantizedModule, rows: RawReader
    ) -> StoredMatrix:
        """Start to copy a quantised module's codes [rows, width]; `rows(start, stop)` returns these rows' bytes."""
        count, width = shape
        scales = file.reserve(module.scales.nbytes)
        file.write(scales, 0, module.scales)
        data = file.reserve(module.format.bytes(count * width))
        steps = module.input_step, module.output_step
        stored = StoredMatrix(name, count, width, module.format, data, scales, False, *steps, as_trained=True)
        flip = np.uint8(128 if module.signed else 0)
        self._submit(stored, lambda start, stop: _copy_rows(file, stored, rows(start, stop) ^ flip, start))
        return stored

    def copy_plain(self, file: DataFile, name: str, shape: tuple[int, int], rows: RawReader) -> StoredMatrix:
        """Start to copy a matrix [rows, width] of bfloat16 numbers; `rows(start, stop)` returns these rows' bytes."""
        count, width = shape
        data = file.reserve(BFLOAT16.bytes(count * width))
        stored = StoredMatrix(name, count, width, BFLOAT16, data, as_trained=True)
        self._submit(stored, lambda start, stop: _copy_rows(file, stored, rows(start, stop), start))
        return stored

    def _round(self, file: DataFile, stored: StoredMatrix, rows: RowReader, factors: Factors | None) -> None:
        """Submit a matrix that is not quantised yet."""
        if factors is not None and (inputs := sum(len(factor.upper) for factor in factors)) != stored.width:
            raise CheckpointError(f"{stored.name} has {stored.width} inputs, its importance matrix {inputs}")
        self._submit(stored, partial(_write_rows, file, stored, rows, factors))

    def _submit(self, stored: StoredMatrix, write: Callable[[int, int], int]) -> None:
        """Submit a matrix's rows to the threads, in chunks."""
        step = max(1, _CHUNK // stored.width)
        for start in range(0, stored.rows, step):
            self._pending.add(self._pool.submit(write, start, min(stored.rows, start + step)))
            self._drain(2 * _MAX_WORKERS)

    def _drain(self, limit: int) -> None:
        """Wait until at most `limit` chunks are unfinished; raise the errors of finished ones."""
        while len(self._pending) > limit:
            done, _ = wait(self._pending, return_when=FIRST_EXCEPTION if limit == 0 else "FIRST_COMPLETED")
            self._pending -= done
            for future in done:
                self._advance(future.result())


def _reserve(file: DataFile, name: str, shape: tuple[int, int], form: WeightFormat, half_scales: bool) -> StoredMatrix:
    rows, width = shape
    if not form.quantised:
        return StoredMatrix(name, rows, width, form, file.reserve(form.bytes(rows * width)))
    if width % BLOCK:
        raise CheckpointError(
            f"{name} has rows of {width} weights, quantisation needs a multiple of {BLOCK}: add --quantize none"
        )
    data = file.reserve(form.bytes(rows * width))
    scales, minimums = (
        file.reserve(rows * (width // BLOCK) * (2 if half_scales else 4)) if needed else None
        for needed in (True, form.affine)
    )
    return StoredMatrix(name, rows, width, form, data, scales, half_scales, minimums=minimums)


def _write_rows(  # noqa: PLR0917
    file: DataFile, stored: StoredMatrix, rows: RowReader, factors: Factors | None, start: int, stop: int
) -> int:
    """Quantise and write one chunk of rows; returns its number of weights."""
    weights = rows(start, stop)
    if stored.scales is None:
        if not np.isfinite(weights).all():
            raise CheckpointError(f"{stored.name} holds NaN or infinite weights")
        file.write(stored.data, start * stored.width * 4, weights)
        return weights.size
    quantized = quantize(weights, stored.format)
    if not quantized.finite:
        raise CheckpointError(f"{stored.name} holds NaN or infinite weights")
    if factors is not None and not _is_exact(weights, quantized, stored.format):
        codes, scales, minimums = round_rows(weights, Grid.of(stored.format), factors)
        quantized = Quantized(_packed(codes, stored.format), scales, minimums, finite=True)
    _write_quantized(file, stored, quantized, start)
    return weights.size


def is_on_grid(weights: Float32Array, form: WeightFormat) -> bool:
    """Whether a format can hold rows of weights but for the last bits of bfloat16, as after training for its grid."""
    return _is_exact(weights, quantize(weights, form), form)


def _is_exact(weights: Float32Array, quantized: Quantized, form: WeightFormat) -> bool:
    """Whether rounding weight by weight changes nothing but the last bits of bfloat16."""
    error = float(np.square(weights - dequantize(quantized, form)).sum())
    return error <= _ON_GRID * float(np.square(weights).sum())


def _packed(codes: npt.NDArray[np.uint8], form: WeightFormat) -> npt.NDArray[np.uint8]:
    """Codes uint8[rows, width], one per byte, packed into bytes with the lowest bits first."""
    return codes[:, ::2] | np.left_shift(codes[:, 1::2], np.uint8(4)) if form.bits == 4 else codes


def _write_read_blocks(file: DataFile, stored: StoredMatrix, blocks: BlockReader, start: int, stop: int) -> int:
    """Write one chunk of rows that are quantised already; returns its number of weights."""
    codes, scales, minimums = blocks(start, stop)
    packed = _packed(codes, stored.format)
    rounded = _to_fp16(scales), None if minimums is None else _to_fp16(minimums)
    finite = all(np.isfinite(each).all() for each in rounded if each is not None)
    if not finite:
        raise CheckpointError(f"{stored.name} has scales or minimums that are NaN, infinite or beyond fp16")
    _write_quantized(file, stored, Quantized(packed, *rounded, finite), start)
    return (stop - start) * stored.width


def _to_fp16(values: npt.NDArray[Any]) -> Float32Array:
    """Values rounded to fp16, as float32; infinite beyond its range."""
    with np.errstate(over="ignore"):
        return values.astype(np.float16).astype(np.float32)


def _write_quantized(file: DataFile, stored: StoredMatrix, quantized: Quantized, start: int) -> None:
    """Write the codes, scales and minimums of the rows from `start` on."""
    file.write(stored.data, stored.format.bytes(start * stored.width), quantized.packed)
    for region, values in ((stored.scales, quantized.scales), (stored.minimums, quantized.minimums)):
        if region is not None:
            assert values is not None, f"{stored.name} has no minimums"
            kept = values.astype(np.float16) if stored.half_scales else values
            file.write(region, start * (stored.width // BLOCK) * kept.itemsize, kept)


def _write_transposed(file: DataFile, stored: StoredMatrix, rows: RowReader) -> int:
    """Quantise a matrix row by row and write it transposed; returns its number of weights."""
    weights = rows(0, stored.rows)
    if not np.isfinite(weights).all():
        raise CheckpointError(f"{stored.name} holds NaN or infinite weights")
    scales = np.abs(weights).max(axis=1) / np.float32(MAX_TRANSPOSED)
    codes = np.rint(weights / np.maximum(scales, np.float32(1e-30))[:, None]).astype(np.int8)
    assert stored.scales is not None
    file.write(stored.data, 0, codes.T)
    file.write(stored.scales, 0, scales)
    return weights.size


def _copy_rows(file: DataFile, stored: StoredMatrix, rows: npt.NDArray[np.uint8], start: int) -> int:
    """Copy one chunk of codes or bfloat16 numbers; returns its number of weights."""
    if stored.scales is None and (rows.view(np.uint16) & 0x7F80 == 0x7F80).any():
        raise CheckpointError(f"{stored.name} holds NaN or infinite weights")
    file.write(stored.data, stored.format.bytes(start * stored.width), rows)
    return len(rows) * stored.width
