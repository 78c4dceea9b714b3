"""Weights that AutoGPTQ, GPTQModel or AutoAWQ has packed: integers of 4 or 8 bits, of a matrix stored by columns.

A checkpoint with the `quant_method` gptq or awq has several tensors for a matrix `X.weight` [rows, width]:

    X.qweight  the codes. gptq: int32[width * bits / 32, rows], each of neighbouring weights of a row, the lowest bits
               first. awq: int32[width, rows / 8], each of eight neighbouring rows, from the lowest bits on those with
               the numbers 0, 2, 4, 6, 1, 3, 5 and 7
    X.scales   [groups, rows], each for width / groups weights of a row
    X.qzeros   int32[groups, rows * bits / 32], the code of 0 of each group, packed along the rows: with gptq in order,
               with awq as its codes. The `checkpoint_format` gptq has each less by one, gptq_v2 as it is
    X.g_idx    int32[width], the group of each column. Where the columns were quantised in the order of their
               activations (`desc_act`), a group's columns are not neighbours

A weight is scale * (code - zero). Sources: `WQLinear_GEMM` of AutoAWQ 0.2.9, `QuantLinear` of AutoGPTQ 0.7.1, and
`convert_gptq_v1_to_v2_format_module` of GPTQModel 7.7: a 1 is added to a whole word of zeros, with its carries.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from ondevice.arrays import Float32Array
from ondevice.errors import CheckpointError
from ondevice_export.checkpoint.json_fields import JsonFields
from ondevice_export.checkpoint.quantized.grouped import SUPPORTED_BITS, WORD, GroupedEntry, GroupedRows, unpack
from ondevice_export.checkpoint.safetensors_file import SafetensorsFile, Stored, TensorEntry, to_float32

GPTQ, AWQ = "gptq", "awq"
"""`quant_method` of such checkpoints."""
_FORMATS = {GPTQ: ("gptq", "gptq_v2"), AWQ: ("gemm",)}
"""The supported formats of each, the default first."""
_FORMAT_FIELDS = ("checkpoint_format", "version", "format")
"""The fields that name it, by the program that wrote the checkpoint and its version."""
_CODES, _SCALES, _ZEROS, _GROUPS = ".qweight", ".scales", ".qzeros", ".g_idx"
_AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)
"""The place in a word, from the lowest bits on, that AWQ gives to each of eight rows."""


@dataclass(frozen=True)
class ColumnsEntry(GroupedEntry):
    """A matrix that lies in files by columns.

    Attributes:
        name: its name.
        bits: bits of a code.
        codes: its codes; the file that goes with the entry has them.
        scales, zeros: the others of its tensors, with their files.
        column_groups: int64[width], the group of each column where these are not neighbours, else None.
        places: the place in a word of zeros of each of the rows that share it; of a word of codes too, if
            `rows_in_words`.
        rows_in_words: whether a word has the codes of neighbouring rows, not of neighbouring weights of a row.
        added: added to a word of zeros.
    """

    name: str
    bits: int
    codes: TensorEntry
    scales: Stored
    zeros: Stored
    column_groups: NDArray[np.int64] | None
    places: tuple[int, ...]
    rows_in_words: bool
    added: int

    @property
    def shape(self) -> tuple[int, ...]:
        return self.scales[1].shape[1], self.codes.shape[0] * (1 if self.rows_in_words else WORD // self.bits)

    @property
    def groups(self) -> int | None:
        return self.scales[1].shape[0] if self.column_groups is None else None

    @cached_property
    def symmetric(self) -> bool:  # by the zeros: `sym` is left out by some programs
        return bool((self._zero_words(0, self.zeros[1].shape[1]) == _repeated(self.middle, self.bits)).all())

    def read(self, file: SafetensorsFile, start: int, stop: int, step: int) -> GroupedRows:
        rows = np.arange(start, stop, step)
        scales = to_float32(_columns(self.scales, start, stop), self.scales[1].dtype, self.scales[1].name)
        first, last = self._words(start, stop)
        zeros = self._of_rows(self._zero_words(first, last), rows, first)
        return GroupedRows(
            self._read_codes(file, rows, start, stop),
            scales.reshape(-1, stop - start).T[::step],
            zeros.astype(np.float32),
        )

    def numbers(self, file: SafetensorsFile, start: int, stop: int, step: int) -> Float32Array:
        if self.column_groups is None:
            return super().numbers(file, start, stop, step)
        codes, scales, zeros = self.read(file, start, stop, step)
        with np.errstate(over="ignore"):  # infinite weights are refused where they are stored
            weights: Float32Array = (codes - zeros[:, self.column_groups]) * scales[:, self.column_groups]
        return weights

    def _read_codes(self, file: SafetensorsFile, rows: NDArray[np.int64], start: int, stop: int) -> NDArray[np.uint8]:
        if self.rows_in_words:
            first, last = self._words(start, stop)
            words = np.frombuffer(_columns((file, self.codes), first, last), np.uint32)
            return self._of_rows(words.reshape(-1, last - first), rows, first).astype(np.uint8)
        words = np.frombuffer(_columns((file, self.codes), start, stop), np.uint32)
        by_row = np.ascontiguousarray(words.reshape(-1, stop - start).T[rows - start])
        return unpack(by_row.view(np.uint8), self.bits)

    def _words(self, start: int, stop: int) -> tuple[int, int]:
        """The first word that has codes of the rows from `start` to `stop`, and the one after the last."""
        each = WORD // self.bits
        return start // each, -(-stop // each)

    def _of_rows(self, words: NDArray[np.uint32], rows: NDArray[np.int64], first: int) -> NDArray[np.uint32]:
        """The codes of some rows, uint32[rows, n], of words uint32[n, words] that have several rows each.

        first : the number of the first word
        """
        each = WORD // self.bits
        shifts = self.bits * np.array(self.places, np.uint32)[rows % each]
        return np.ascontiguousarray((words[:, rows // each - first] >> shifts & np.uint32((1 << self.bits) - 1)).T)

    def _zero_words(self, first: int, last: int) -> NDArray[np.uint32]:
        words = np.frombuffer(_columns(self.zeros, first, last), np.uint32).reshape(-1, last - first)
        return words + np.uint32(self.added)


def join_gptq(
    tensors: Mapping[str, Stored], fields: JsonFields, origin: str
) -> dict[str, tuple[SafetensorsFile, TensorEntry | ColumnsEntry]]:
    """The tensors of a gptq checkpoint's files by name, with one in place of those of each matrix.

    Args:
        tensors: the tensors of the files.
        fields: the checkpoint's `quantization_config`.
        origin: what error messages call the checkpoint.

    Raises:
        CheckpointError: the format is not supported, or a tensor is missing or does not fit the others.
    """
    less_one = _format(fields, GPTQ) == "gptq"
    found: dict[str, tuple[SafetensorsFile, TensorEntry | ColumnsEntry]] = dict(tensors)
    for base, (codes, scales, zeros) in _parts(tensors, origin).items():
        rows = scales[1].shape[1]
        bits = WORD * zeros[1].shape[1] // rows
        if bits not in SUPPORTED_BITS:
            raise CheckpointError(f"{origin}: weights of {bits} bits, as of {base}, are not supported, only of 4 and 8")
        width = codes[1].shape[0] * WORD // bits
        groups = _column_groups(tensors.get(base + _GROUPS), scales[1].shape[0], width, f"{origin}: {base + _GROUPS}")
        added = _repeated(1, bits) if less_one else 0
        places = tuple(range(WORD // bits))
        entry = ColumnsEntry(f"{base}.weight", bits, codes[1], scales, zeros, groups, places, False, added)
        if codes[1].shape[1] != rows or zeros[1].shape[1] * WORD != rows * bits:
            raise _misfit(origin, base)
        _replace(found, base, (codes[0], entry))
    return found


def join_awq(
    tensors: Mapping[str, Stored], fields: JsonFields, origin: str
) -> dict[str, tuple[SafetensorsFile, TensorEntry | ColumnsEntry]]:
    """The same of an awq checkpoint, whose codes have 4 bits; see `join_gptq`."""
    _format(fields, AWQ)
    found: dict[str, tuple[SafetensorsFile, TensorEntry | ColumnsEntry]] = dict(tensors)
    for base, (codes, scales, zeros) in _parts(tensors, origin).items():
        if codes[1].shape[1] * 8 != scales[1].shape[1] or zeros[1].shape[1] != codes[1].shape[1]:
            raise _misfit(origin, base)
        groups = _column_groups(None, scales[1].shape[0], codes[1].shape[0], f"{origin}: {base + _SCALES}")
        entry = ColumnsEntry(f"{base}.weight", 4, codes[1], scales, zeros, groups, _AWQ_PLACES, True, 0)
        _replace(found, base, (codes[0], entry))
    return found


def _format(fields: JsonFields, method: str) -> str:
    """The format of a checkpoint.

    Raises:
        CheckpointError: it is not supported.
    """
    named = next((fields.data[name] for name in _FORMAT_FIELDS if fields.data.get(name) is not None), None)
    form = _FORMATS[method][0] if named is None else named.lower() if isinstance(named, str) else named
    if form not in _FORMATS[method]:
        raise CheckpointError(
            f"{fields.origin}: the format {form!r:.99} of {method} is not supported, only "
            f"{' and '.join(_FORMATS[method])}: export the original checkpoint"
        )
    return str(form)


def _parts(tensors: Mapping[str, Stored], origin: str) -> dict[str, tuple[Stored, Stored, Stored]]:
    """Codes, scales and zeros of each matrix, which are integers and scales of one number of groups, by its name.

    Raises:
        CheckpointError: one of them is missing, or is not such a tensor.
    """
    found = {}
    for base in [name.removesuffix(_CODES) for name in tensors if name.endswith(_CODES)]:
        missing = [base + part for part in (_SCALES, _ZEROS) if base + part not in tensors]
        if missing:
            raise CheckpointError(f"{origin} holds {base + _CODES} without {missing[0]}")
        if f"{base}.weight" in tensors:
            raise CheckpointError(f"{origin} holds {base}.weight beside {base + _CODES}")
        codes, scales, zeros = (tensors[base + part] for part in (_CODES, _SCALES, _ZEROS))
        entries = [each[1] for each in (codes, scales, zeros)]
        if any(len(entry.shape) != 2 or 0 in entry.shape for entry in entries):
            raise _misfit(origin, base)
        if {codes[1].dtype, zeros[1].dtype} != {"I32"} or zeros[1].shape[0] != scales[1].shape[0]:
            raise _misfit(origin, base)
        found[base] = codes, scales, zeros
    return found


def _column_groups(stored: Stored | None, groups: int, width: int, origin: str) -> NDArray[np.int64] | None:
    """The group of each column, int64[width]; None if each group has as many neighbouring columns.

    Args:
        stored: the tensor that says it, if there is one.
        groups: number of groups.
        width: number of columns.
        origin: what error messages call the tensor.

    Raises:
        CheckpointError: it is not one group for each column.
    """
    neighbours = np.arange(width) * groups // width
    if stored is None:
        if width % groups:
            raise CheckpointError(f"{origin} has {groups} groups of {width} columns")
        return None
    file, entry = stored
    if entry.dtype != "I32" or entry.shape != (width,):
        raise CheckpointError(f"{origin} is {entry.dtype} {list(entry.shape)!s:.99}, expected I32 [{width}]")
    found = np.frombuffer(file.read(entry, 0, entry.nbytes), np.int32).astype(np.int64)
    if found.min() < 0 or found.max() >= groups:
        raise CheckpointError(f"{origin} names a group that is not there")
    return None if width % groups == 0 and np.array_equal(found, neighbours) else found


def _columns(stored: Stored, first: int, last: int) -> bytearray:
    """The columns from `first` to `last` of a matrix, row by row; only they are read."""
    file, entry = stored
    count, columns = entry.shape
    size = entry.nbytes // (count * columns)
    if last - first == columns:
        return file.read(entry, 0, entry.nbytes)
    places = range(first * size, entry.nbytes, columns * size)
    return bytearray().join(file.read(entry, place, (last - first) * size) for place in places)


def _repeated(code: int, bits: int) -> int:
    """The word all of whose codes are `code`."""
    return sum(code << place for place in range(0, WORD, bits))


def _replace(
    found: dict[str, tuple[SafetensorsFile, TensorEntry | ColumnsEntry]],
    base: str,
    entry: tuple[SafetensorsFile, ColumnsEntry],
) -> None:
    for part in (_CODES, _SCALES, _ZEROS, _GROUPS):
        found.pop(base + part, None)
    found[f"{base}.weight"] = entry


def _misfit(origin: str, base: str) -> CheckpointError:
    return CheckpointError(f"{origin}: the shapes or types of the codes, scales and zeros of {base}.weight do not fit")
