"""One GGUF file: its metadata and tensor entries are checked in full, its tensors are read in pieces.

Own code instead of the `gguf` package (0.19.0): that maps the file, so that its pages count as resident memory, makes
several arrays for every token of a vocabulary, and trusts what it reads, so that a damaged header ends in a traceback.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, versions 2 and 3, little-endian.
"""

from __future__ import annotations

import math
import struct
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ondevice.errors import CheckpointError, reason
from ondevice_export.checkpoint.json_fields import check_regular
from ondevice_export.gguf.blocks import TensorType, find_type

_MAX_METADATA = 1 << 28
"""Upper limit of metadata and tensor entries in bytes. A vocabulary of 262,144 tokens with its merges has 16 MB."""
_MAX_ITEMS = 1 << 22
"""Upper limit of the items of all lists together; Gemma 4's vocabulary and merges have 1.3 million."""
_MAX_ENTRIES = 1 << 16
"""Upper limit of metadata fields, and of tensors."""

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""Types of metadata, as characters of `struct` and numpy."""
_STRING, _ARRAY = 8, 9

Value = bool | int | float | str | list[str] | NDArray[Any]
"""A metadata field: a scalar, a string, a list of strings, or an array of numbers."""


@dataclass(frozen=True)
class GgufTensor:
    """A tensor of the file; `shape` has the rows' width last, in reverse of the file's order."""

    name: str
    kind: TensorType
    shape: tuple[int, ...]
    offset: int
    """First byte of the tensor, counted from the start of the file."""

    @property
    def rows(self) -> int:
        """Number of rows, of all matrices together."""
        return math.prod(self.shape[:-1])

    @property
    def stride(self) -> int:
        """Bytes of a row."""
        return self.shape[-1] // self.kind.weights * self.kind.bytes

    @property
    def nbytes(self) -> int:
        return self.rows * self.stride


class GgufFile:
    """An open GGUF file.

    Attributes:
        metadata: all fields by name.
        entries: all tensors by name.
    """

    def __init__(self, path: Path) -> None:
        """
        Raises:
            CheckpointError: the file cannot be opened, is not a GGUF file, damaged, or has tensors that are not read.
        """
        self.path = path
        self._lock = threading.Lock()
        try:
            check_regular(path)
            self._file = path.open("rb")
            self._size = path.stat().st_size
        except (OSError, ValueError) as error:  # ValueError: a name with a NUL, or one that is not valid Unicode
            raise CheckpointError(f"{path} cannot be opened: {reason(error)}") from error
        try:
            self._left = min(self._size, _MAX_METADATA)
            self._items = 0
            self.metadata, self.entries = self._read_header()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        self._file.close()

    def read_rows(self, entry: GgufTensor, start: int, stop: int) -> NDArray[np.uint8]:
        """The bytes of rows `start` to `stop`, uint8[stop - start, bytes of a row]; thread-safe."""
        size = (stop - start) * entry.stride
        try:
            with self._lock:
                self._file.seek(entry.offset + start * entry.stride)
                data = self._file.read(size)
        except OSError as error:  # as of a disk that was removed
            raise CheckpointError(f"{self.path} cannot be read: {reason(error)}") from error
        if len(data) < size:
            raise CheckpointError(f"{self.path} is truncated in {entry.name}: download it again")
        return np.frombuffer(data, np.uint8).reshape(stop - start, entry.stride)

    def _read_header(self) -> tuple[dict[str, Value], dict[str, GgufTensor]]:
        if self._take(4) != b"GGUF":
            raise CheckpointError(f"{self.path} is not a GGUF file, or is damaged: download it again")
        version = self._number("I")
        if version not in (2, 3):
            big = version & 0xFFFF == 0
            said = "is big-endian" if big else f"has version {version} of the format"
            raise CheckpointError(f"{self.path} {said}, which is not read: only versions 2 and 3, little-endian")
        tensors, fields = self._count("tensors"), self._count("metadata fields")
        metadata: dict[str, Value] = {}
        for _ in range(fields):
            name = self._string("the name of a metadata field")
            if name in metadata:
                raise CheckpointError(f"{self.path} has the metadata field {name!r:.99} twice")
            metadata[name] = self._value(name)
        alignment = metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or not 0 < alignment <= 1 << 20 or alignment & (alignment - 1):
            raise CheckpointError(f"{self.path}: general.alignment is {alignment!r:.99}, expected a power of two")
        described = [self._description() for _ in range(tensors)]
        start = -(-self._file.tell() // alignment) * alignment
        return metadata, self._placed(described, start, alignment)

    def _placed(
        self, described: list[tuple[str, TensorType, tuple[int, ...], int]], start: int, alignment: int
    ) -> dict[str, GgufTensor]:
        """The entries by name, after a check that they lie inside the file and do not overlap."""
        entries: dict[str, GgufTensor] = {}
        for name, kind, shape, offset in described:
            if name in entries:
                raise CheckpointError(f"{self.path} has the tensor {name!r:.99} twice")
            if offset % alignment:
                raise CheckpointError(f"{self.path}: {name} lies at {offset}, no multiple of {alignment}")
            entries[name] = GgufTensor(name, kind, shape, start + offset)
        end = start
        for entry in sorted(entries.values(), key=lambda each: each.offset):
            if entry.offset < end:
                raise CheckpointError(f"{self.path}: {entry.name} overlaps another tensor")
            end = entry.offset + entry.nbytes
            if end > self._size:
                raise CheckpointError(
                    f"{self.path} is truncated: {entry.name} ends at byte {end} of {self._size}: download it again"
                )
        return entries

    def _description(self) -> tuple[str, TensorType, tuple[int, ...], int]:
        """Name, type, shape and offset of the next tensor."""
        name = self._string("the name of a tensor")
        if not name or not name.isprintable() or len(name) > 255:
            raise CheckpointError(f"{self.path} has a tensor named {name!r:.99}: it is damaged")
        dimensions = self._number("I")
        if not 1 <= dimensions <= 4:
            raise CheckpointError(f"{self.path}: {name} has {dimensions} dimensions")
        shape = tuple(int(self._number("Q")) for _ in range(dimensions))[::-1]
        kind = find_type(self._number("I"), f"{self.path}: {name}")
        if min(shape) < 1 or max(shape) > self._size or shape[-1] % kind.weights:
            raise CheckpointError(f"{self.path}: {name} is {kind.name} with the shape {list(shape)!s:.99}")
        return name, kind, shape, int(self._number("Q"))

    def _value(self, name: str) -> Value:
        kind = self._number("I")
        if kind == _STRING:
            return self._string(name)
        if kind in _SCALARS:
            value: bool | int | float = self._number(_SCALARS[kind])
            return value
        if kind != _ARRAY:
            raise CheckpointError(f"{self.path}: the metadata field {name!r:.99} has the unknown type {kind}")
        kind, count = self._number("I"), self._number("Q")
        self._items += count
        if self._items > _MAX_ITEMS:
            raise CheckpointError(f"{self.path}: the metadata field {name!r:.99} claims {count} items: it is damaged")
        if kind == _STRING:
            return [self._string(name) for _ in range(count)]
        if kind not in _SCALARS:
            raise CheckpointError(f"{self.path}: the metadata field {name!r:.99} is a list of type {kind}")
        dtype = np.dtype(_SCALARS[kind])
        return np.frombuffer(self._take(count * dtype.itemsize), dtype)

    def _count(self, name: str) -> int:
        count = int(self._number("Q"))
        if count > _MAX_ENTRIES:
            raise CheckpointError(f"{self.path} claims {count} {name}: it is damaged, download it again")
        return count

    def _string(self, name: str) -> str:
        data = self._take(self._number("Q"))
        try:
            return data.decode()
        except UnicodeDecodeError as error:
            raise CheckpointError(f"{self.path}: {name!r:.99} is no UTF-8 text ({reason(error)})") from error

    def _number(self, code: str) -> Any:
        size = struct.calcsize("<" + code)
        return struct.unpack("<" + code, self._take(size))[0]

    def _take(self, size: int) -> bytes:
        """The next bytes of the header."""
        if size > self._left:
            over = "claims too much metadata" if self._left < self._size - self._file.tell() else "is truncated"
            raise CheckpointError(f"{self.path} {over}: it is damaged, download it again")
        self._left -= size
        data = self._file.read(size)
        if len(data) < size:
            raise CheckpointError(f"{self.path} ends at byte {self._file.tell()}: download it again")
        return data
