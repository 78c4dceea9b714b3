"""One safetensors file: its header is checked in full, its tensors are read in pieces.

The file is read instead of memory-mapped: mapped pages count as resident memory and would break the bound on peak RSS.
"""

from __future__ import annotations

import json
import math
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ondevice.errors import CheckpointError, reason
from ondevice_export.checkpoint.json_fields import check_regular

_ITEM_BYTES = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U64": 8, "U32": 4, "U16": 2,
    "U8": 1, "BOOL": 1, "F8_E4M3": 1, "F8_E5M2": 1,
}  # fmt: skip
_MAX_HEADER = 1 << 24
"""Upper limit of the header in bytes. The format allows 100 MB, which may take gigabytes when parsed; the header of
Gemma 4 31B has 150 kB."""


@dataclass(frozen=True)
class TensorEntry:
    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    """First byte of the tensor, counted from the start of the file."""
    nbytes: int

    @property
    def rows(self) -> int:
        """Number of rows, of all matrices together."""
        return math.prod(self.shape[:-1])


class SafetensorsFile:
    """An open safetensors file and the entries of its tensors."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = threading.Lock()
        try:
            check_regular(path)
            self._file = path.open("rb", buffering=0)
        except (OSError, ValueError) as error:  # ValueError: a name with a NUL, or one that is not valid Unicode
            raise CheckpointError(f"{path} cannot be opened: {reason(error)}") from error
        try:
            self.entries = self._read_header()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        self._file.close()

    def read(self, entry: TensorEntry, start: int, nbytes: int) -> bytearray:
        """Read `nbytes` of a tensor from its byte `start`; thread-safe."""
        return self._read(entry.offset + start, nbytes)

    def _read(self, offset: int, nbytes: int) -> bytearray:
        buffer = bytearray(nbytes)
        view = memoryview(buffer)
        done = 0
        try:
            with self._lock:  # locked seek and read, because Windows has no pread
                self._file.seek(offset)
                while done < nbytes:
                    count = self._file.readinto(view[done:])
                    if not count:
                        raise CheckpointError(f"{self.path} ends at byte {offset + done}: download it again")
                    done += count
        except OSError as error:  # as of a disk that was removed
            raise CheckpointError(f"{self.path} cannot be read: {reason(error)}") from error
        return buffer

    def _read_header(self) -> dict[str, TensorEntry]:
        size = self.path.stat().st_size
        length = int.from_bytes(self._read(0, 8), "little") if size >= 8 else 0
        if not 2 <= length <= min(_MAX_HEADER, size - 8):
            raise CheckpointError(f"{self.path} is not a safetensors file, or is truncated: download it again")
        try:
            header = json.loads(self._read(8, length))
            if not isinstance(header, dict):
                raise ValueError("no object")
        except (ValueError, RecursionError) as error:
            raise CheckpointError(f"{self.path} has a damaged safetensors header ({reason(error)})") from error
        header.pop("__metadata__", None)
        start = 8 + length
        entries = {name: self._entry(name, fields, start, size) for name, fields in header.items()}
        end = start
        for entry in sorted(entries.values(), key=lambda one: (one.offset, one.nbytes)):
            if entry.offset < end:
                raise CheckpointError(f"{self.path}: {entry.name} overlaps another tensor")
            end = entry.offset + entry.nbytes
        return entries

    def _entry(self, name: str, fields: Any, start: int, size: int) -> TensorEntry:
        try:
            dtype, shape = fields["dtype"], tuple(fields["shape"])
            begin, end = fields["data_offsets"]
            numbers = (*shape, begin, end)
            if not all(isinstance(n, int) and not isinstance(n, bool) and n >= 0 for n in numbers):
                raise ValueError("not a size")
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(f"{self.path}: the header entry of {name} is malformed") from error
        if not isinstance(dtype, str) or dtype not in _ITEM_BYTES:
            raise CheckpointError(f"{self.path}: {name} has unknown dtype {dtype!r:.99}")
        nbytes = 0 if 0 in shape else _ITEM_BYTES[dtype]
        for count in shape:
            nbytes *= count
            if nbytes > size:  # the product of a hostile shape may have millions of digits
                break
        if end - begin != nbytes:
            raise CheckpointError(f"{self.path}: {name} is {dtype} {list(shape)!s:.99} but spans {end - begin} bytes")
        if start + end > size:
            raise CheckpointError(f"{self.path} is truncated: {name} ends at byte {start + end} of {size}")
        return TensorEntry(name, dtype, shape, start + begin, nbytes)


Stored = tuple[SafetensorsFile, TensorEntry]
"""A tensor, and the file that has it."""


def to_float32(data: bytearray, dtype: str, origin: str) -> npt.NDArray[np.float32]:
    """Decode the bytes of a BF16, F16 or F32 tensor to a flat float32 array; `origin` names the tensor in errors."""
    if dtype == "BF16":
        return (np.frombuffer(data, np.uint16).astype(np.uint32) << 16).view(np.float32)
    if dtype == "F16":
        return np.frombuffer(data, np.float16).astype(np.float32)
    if dtype == "F32":
        return np.frombuffer(data, np.float32)
    raise CheckpointError(f"{origin} is {dtype}: weights must be BF16, F16 or F32")
