"""Quantises the matrices of a checkpoint into a data file, in chunks of rows: no matrix is ever whole in memory."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Self

import numpy as np
import numpy.typing as npt

from ondevice.errors import CheckpointError
from ondevice.progress import Advance
from ondevice.weight_format import BFLOAT16, WeightFormat
from ondevice_export.data_file import DataFile, Region
from ondevice_export.quantize import BLOCK, quantize
from ondevice_export.quantized_modules import QuantizedModule

FloatArray = npt.NDArray[np.float32]
RowReader = Callable[[int, int], FloatArray]
RawReader = Callable[[int, int], npt.NDArray[np.uint8]]

_CHUNK = 1 << 19
"""Weights per chunk: 2 MB as float32, which stay in a core's cache."""
_MAX_WORKERS = 8


@dataclass(frozen=True)
class StoredMatrix:
    """A matrix [rows, width] in a data file: plain numbers, codes in blocks of 32, or those of a checkpoint."""

    name: str
    rows: int
    width: int
    format: WeightFormat
    data: Region
    scales: Region | None = None
    half_scales: bool = False
    """Scales are stored as fp16, else as float32. Their values are the same."""
    input_step: float = 0.0
    """The static scale of a linear layer's input; 0 for none."""
    output_step: float = 0.0
    """The same of its output."""
    as_trained: bool = False
    """As it is in a checkpoint that was trained quantised."""

    def part(self, number: int, parts: int) -> StoredMatrix:
        """One of several matrices of equal size that were stored as one, one below the other."""
        scales = None if self.scales is None else self.scales.part(number, parts)
        return StoredMatrix(
            f"{self.name}.{number}", self.rows // parts, self.width, self.format, self.data.part(number, parts), scales,
            self.half_scales,
        )  # fmt: skip


class MatrixWriter:
    """Writes matrices with a few threads; all are complete when its `with` block ends."""

    def __init__(self, advance: Advance) -> None:
        self._advance = advance
        self._pool = ThreadPoolExecutor(min(os.cpu_count() or 1, _MAX_WORKERS))
        self._pending: set[Future[int]] = set()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                self._drain(0)
        finally:
            self._pool.shutdown(wait=True, cancel_futures=True)

    def add(
        self,
        file: DataFile,
        name: str,
        shape: tuple[int, int],
        form: WeightFormat,
        rows: RowReader,
        *,
        half_scales: bool = False,
    ) -> StoredMatrix:
        """Begin to write a matrix [rows, width]; `rows(start, stop)` reads it as float32.

        Args:
            file: where to.
            name: its tensor, for messages and for the graph.
            shape: rows and width.
            form: INT4, INT8 or FLOAT32.
            rows: called from several threads.
            half_scales: store the scales as fp16.

        Raises:
            CheckpointError: the width is no multiple of the block, or a weight is not finite.
        """
        stored = _reserve(file, name, shape, form, half_scales)
        self._submit(stored, partial(_write_rows, file, stored, rows))
        return stored

    def copy(
        self, file: DataFile, name: str, shape: tuple[int, int], module: QuantizedModule, rows: RawReader
    ) -> StoredMatrix:
        """Begin to copy the codes of a checkpoint's module [rows, width]; `rows(start, stop)` reads them as bytes."""
        count, width = shape
        scales = file.reserve(module.scales.nbytes)
        file.write(scales, 0, module.scales)
        data = file.reserve(module.format.bytes(count * width))
        steps = module.input_step, module.output_step
        stored = StoredMatrix(name, count, width, module.format, data, scales, False, *steps, as_trained=True)
        flip = np.uint8(128 if module.signed else 0)
        self._submit(stored, lambda start, stop: _copy_rows(file, stored, lambda: rows(start, stop) ^ flip, start))
        return stored

    def copy_plain(self, file: DataFile, name: str, shape: tuple[int, int], rows: RawReader) -> StoredMatrix:
        """The same of bfloat16 numbers."""
        count, width = shape
        data = file.reserve(BFLOAT16.bytes(count * width))
        stored = StoredMatrix(name, count, width, BFLOAT16, data, as_trained=True)
        self._submit(stored, lambda start, stop: _copy_rows(file, stored, lambda: rows(start, stop), start))
        return stored

    def _submit(self, stored: StoredMatrix, write: Callable[[int, int], int]) -> None:
        """Have the rows of a matrix written in chunks."""
        step = max(1, _CHUNK // stored.width)
        for start in range(0, stored.rows, step):
            self._pending.add(self._pool.submit(write, start, min(stored.rows, start + step)))
            self._drain(2 * _MAX_WORKERS)

    def _drain(self, limit: int) -> None:
        """Wait until at most `limit` chunks are under way, and pass on what went wrong in the others."""
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
        raise CheckpointError(f"{name} has rows of {width} weights, quantisation needs a multiple of {BLOCK}")
    data = file.reserve(form.bytes(rows * width))
    scales = file.reserve(rows * (width // BLOCK) * (2 if half_scales else 4))
    return StoredMatrix(name, rows, width, form, data, scales, half_scales)


def _write_rows(file: DataFile, stored: StoredMatrix, rows: RowReader, start: int, stop: int) -> int:
    """Write one chunk; returns how many weights it had."""
    weights = rows(start, stop)
    if stored.scales is None:
        if not np.isfinite(weights).all():
            raise CheckpointError(f"{stored.name} holds NaN or infinite weights")
        file.write(stored.data, start * stored.width * 4, weights)
        return weights.size
    packed, scales, finite = quantize(weights, stored.format)
    if not finite:
        raise CheckpointError(f"{stored.name} holds NaN or infinite weights")
    file.write(stored.data, stored.format.bytes(start * stored.width), packed)
    kept = scales.astype(np.float16) if stored.half_scales else scales
    file.write(stored.scales, start * (stored.width // BLOCK) * kept.itemsize, kept)
    return weights.size


def _copy_rows(file: DataFile, stored: StoredMatrix, read: Callable[[], npt.NDArray[np.uint8]], start: int) -> int:
    """Write one chunk of codes, or of bfloat16; returns how many weights it had."""
    rows = read()
    if stored.scales is None and (rows.view(np.uint16) & 0x7F80 == 0x7F80).any():
        raise CheckpointError(f"{stored.name} holds NaN or infinite weights")
    file.write(stored.data, stored.format.bytes(start * stored.width), rows)
    return len(rows) * stored.width
