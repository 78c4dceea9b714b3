"""The protocol of checkpoints, and checkpoint directories: one safetensors file, or the shards that an index lists."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Generic, Self

import numpy as np
import numpy.typing as npt

from ondevice.arrays import Float32Array
from ondevice.bundle_format.weight_format import WeightFormat
from ondevice.errors import CheckpointError
from ondevice_export.checkpoint.json_fields import read_json
from ondevice_export.checkpoint.quantized.methods import QuantizedEntry, join_quantized
from ondevice_export.checkpoint.safetensors_file import SafetensorsFile, Stored, TensorEntry, to_float32
from ondevice_export.checkpoint.stacks import File, Number, Place, RowRange, Stack, Taken, stack_experts, whole
from ondevice_export.checkpoint.transposed import TransposedEntry
from ondevice_export.quantize import BLOCK

_Entry = TensorEntry | QuantizedEntry | TransposedEntry
"""How a tensor lies in safetensors files."""

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")


class Checkpoint(ABC):
    """A model on disk: its configuration, and its tensors by the hub's names, read whole or by rows as float32.

    Attributes:
        config: the configuration, in the hub's spelling.
        origin: what error messages call the configuration.
    """

    config: Mapping[str, Any]
    origin: str

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @abstractmethod
    def close(self) -> None: ...

    @property
    @abstractmethod
    def names(self) -> list[str]: ...

    def __contains__(self, name: str) -> bool:
        return name in self.names

    @abstractmethod
    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor; CheckpointError if there is none with this name."""

    @abstractmethod
    def dtype(self, name: str) -> str:
        """The tensor's dtype in safetensors' spelling, such as `BF16`; of GGUF's own types their name."""

    @abstractmethod
    def raw_rows(self, name: str, start: int, stop: int) -> npt.NDArray[np.uint8]:
        """Rows `start` to `stop` of a matrix without conversion: uint8[stop - start, bytes per row]."""

    @abstractmethod
    def read(self, name: str) -> Float32Array:
        """A whole tensor as float32."""

    @abstractmethod
    def rows(self, name: str, start: int, stop: int) -> Float32Array:
        """Rows `start` to `stop` as float32; a tensor of several matrices counts as one matrix, stacked by rows."""

    @abstractmethod
    def picked_rows(self, name: str, indices: npt.NDArray[np.int64]) -> Float32Array:
        """The rows `indices` of a matrix, in that order, as float32."""

    @abstractmethod
    def integers(self, name: str) -> npt.NDArray[np.int64]:
        """A whole integer tensor (I64 or I32 in the file) as int64."""

    @abstractmethod
    def kept_format(self, name: str) -> WeightFormat | None:
        """The format in which a bundle stores a matrix as it is; None if there is none."""

    @abstractmethod
    def kept_blocks(
        self, name: str, start: int, stop: int
    ) -> tuple[npt.NDArray[np.uint8], Float32Array, Float32Array | None]:
        """Rows `start` to `stop` of a matrix in its `kept_format`: codes uint8[rows, width], one per byte; scales and
        minimums [rows, width / 32], the latter None in a symmetric format.
        """

    def check(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Check that the tensors named in `shapes` exist and have those shapes, which follow from the configuration.

        Raises:
            CheckpointError: a tensor is missing or has another shape.
        """
        for name, expected in shapes.items():
            if (found := self.shape(name)) != expected:
                raise CheckpointError(f"{name} has shape {list(found)}, {self.origin} asks for {list(expected)}")


class FilesCheckpoint(Checkpoint, Generic[File, Place]):
    """A checkpoint whose tensors lie in files of one format.

    A subclass fills `_files` and `_tensors`, by transformers 5's names, when it is made.
    """

    def __init__(self, location: Path) -> None:
        """
        Args:
            location: what error messages name where a tensor is missing.
        """
        self._location = location
        self._files: list[File] = []
        self._tensors: dict[str, Stack[File, Place]] = {}

    def close(self) -> None:
        for file in self._files:
            file.close()

    @property
    def names(self) -> list[str]:
        return list(self._tensors)

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def shape(self, name: str) -> tuple[int, ...]:
        return self._find(name).shape

    def read(self, name: str) -> Float32Array:
        stack = self._find(name)
        found = self.rows(name, 0, sum(part.count for part in stack.parts)).reshape(stack.shape)
        return np.concatenate([each.of(found) for each in stack.numbers]) if stack.numbers else found

    def turn(self, name: str) -> None:
        """Read a tensor of experts, stored as [experts, width, rows] unless it is quantised, as [experts, rows, width].

        GGUF files have none that is stored so.
        """

    def split(self, prefix: str, rows_of: Mapping[str, tuple[str, Sequence[Taken]]]) -> None:
        """Replace tensors by those that are rows of them: for each of these the tensor that has it, and the rows.

        All names are without the prefix. One tensor can have all rows of another in another order, also under its name;
        only so are tensors of experts [experts, rows, width] taken, as if they were one matrix, those of
        convolutions [channels, 1, width], which become one, and vectors, whose numbers count as rows.

        Raises:
            CheckpointError: a tensor is missing, has another number of rows than are taken from it, or is there beside
                one that is made of its rows.
        """
        counts: Counter[str] = Counter()
        for name, (joined, ranges) in rows_of.items():
            if prefix + name in self and name != joined:
                raise CheckpointError(f"{self._location} holds {prefix}{name} beside {joined}, which has the same rows")
            counts[joined] += sum(len(each.rows) for each in ranges)
        for joined, count in counts.items():
            found = self.shape(prefix + joined)
            reordered = len(found) in (1, 3) and [taken for taken, _ in rows_of.values()].count(joined) == 1
            if not (reordered or len(found) == 2) or math.prod(found[:-1] or found) != count:
                raise CheckpointError(f"{prefix}{joined} has shape {list(found)}, {self.origin} asks for {count} rows")
        made = {name: self._find(prefix + joined).rows(ranges) for name, (joined, ranges) in rows_of.items()}
        for joined in counts:
            del self._tensors[prefix + joined]
        self._tensors.update({prefix + name: stack for name, stack in made.items()})

    def halve(self, joined: str, first: str, second: str) -> None:
        """Replace a matrix [rows, 2 * width] by two, of its first and of its last columns.

        Raises:
            CheckpointError: it is no such matrix.
        """
        shape = self.shape(joined)
        if len(shape) != 2 or shape[1] % 2:
            raise CheckpointError(f"{joined} has shape {list(shape)}, which has no two halves")
        self._tensors[first], self._tensors[second] = self._tensors.pop(joined).halves()

    def _find(self, name: str) -> Stack[File, Place]:
        try:
            return self._tensors[name]
        except KeyError:
            raise CheckpointError(f"{self._location}: tensor {name} is missing") from None

    def _factors(self, name: str, start: int, stop: int) -> Float32Array:
        """The factor of each row from `start` to `stop`, float32[rows, 1]."""
        parts = list(self._find(name).between(start, stop))
        factors = np.array([part.factor for part in parts], np.float32)
        return np.repeat(factors, [part.count for part in parts])[:, None]


class SafetensorsCheckpoint(FilesCheckpoint[SafetensorsFile, _Entry]):
    """A directory with `config.json` and safetensors files."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.directory = directory
        self.origin = str(directory / "config.json")
        self.config = read_json(directory / "config.json")
        try:
            found: dict[str, Stored] = {}
            for path in _shards(directory):
                file = SafetensorsFile(path)
                self._files.append(file)
                for name, entry in file.entries.items():
                    if name in found:
                        raise CheckpointError(f"{path} holds {name} a second time")
                    found[name] = (file, entry)
            entries: Mapping[str, tuple[SafetensorsFile, _Entry]] = join_quantized(found, self.config, str(directory))
            self._tensors = stack_experts(entries, str(directory))
        except BaseException:
            self.close()
            raise

    def turn(self, name: str) -> None:
        part = self._find(name).parts[0]
        if isinstance(part.place, TensorEntry) and len(part.place.shape) == 3:
            self._tensors[name] = whole(part.file, TransposedEntry(part.place))

    def dtype(self, name: str) -> str:
        return self._whole(name)[1].dtype

    def kept_format(self, name: str) -> WeightFormat | None:
        if name not in self:  # a matrix that was trained quantised, whose tensors have other names
            return None
        stack = self._find(name)
        forms = {part.place.form if isinstance(part.place, QuantizedEntry) else None for part in stack.parts}
        form = forms.pop()
        return None if forms or form is None or (stack.columns and stack.shape[-1] % BLOCK) else form

    def kept_blocks(
        self, name: str, start: int, stop: int
    ) -> tuple[npt.NDArray[np.uint8], Float32Array, Float32Array | None]:
        stack, factors = self._find(name), self._factors(name, start, stop)
        codes, scales, minimums = zip(*(self._blocks(part) for part in stack.between(start, stop)), strict=True)
        affine = None if minimums[0] is None else stack.cut(joined(list(minimums)) * factors, BLOCK)
        return stack.cut(joined(list(codes))), stack.cut(joined(list(scales)) * factors, BLOCK), affine

    def raw_rows(self, name: str, start: int, stop: int) -> npt.NDArray[np.uint8]:
        file, entry = self._whole(name)
        stride = entry.nbytes // entry.shape[0]
        data = file.read(entry, start * stride, (stop - start) * stride)
        return np.frombuffer(data, np.uint8).reshape(stop - start, stride)

    def rows(self, name: str, start: int, stop: int) -> Float32Array:
        stack = self._find(name)
        return stack.cut(joined([self._rows(part) for part in stack.between(start, stop)]))

    def picked_rows(self, name: str, indices: npt.NDArray[np.int64]) -> Float32Array:
        file, entry = self._whole(name)
        stride = entry.nbytes // entry.shape[0]
        data = bytearray().join(file.read(entry, int(index) * stride, stride) for index in indices)
        return to_float32(data, entry.dtype, f"{file.path}: {name}").reshape(len(indices), *entry.shape[1:])

    def integers(self, name: str) -> npt.NDArray[np.int64]:
        file, entry = self._whole(name)
        types = {"I64": np.int64, "I32": np.int32}
        if entry.dtype not in types:
            raise CheckpointError(f"{file.path}: {name} is {entry.dtype}, expected I64 or I32")
        return (
            np.frombuffer(file.read(entry, 0, entry.nbytes), types[entry.dtype]).astype(np.int64).reshape(entry.shape)
        )

    def _whole(self, name: str) -> tuple[SafetensorsFile, TensorEntry]:
        """The file and the entry of a tensor that is stored as it is, not as rows of others.

        Raises:
            CheckpointError: it is missing, or made of rows of others, as in no checkpoint that was trained quantised.
        """
        parts = self._find(name).parts
        if len(parts) != 1 or not isinstance(place := parts[0].place, TensorEntry):
            raise CheckpointError(f"{self._location}: {name} lies in several pieces, which is not supported here")
        return parts[0].file, place

    @staticmethod
    def _rows(part: RowRange[SafetensorsFile, _Entry]) -> Float32Array:
        file, entry = part.file, part.place
        if not isinstance(entry, TensorEntry):
            return part.scaled(entry.numbers(file, part.start, part.stop, part.step))
        stride = entry.nbytes // entry.rows
        data = file.read(entry, part.start * stride, (part.stop - part.start) * stride)
        rows = to_float32(data, entry.dtype, f"{file.path}: {entry.name}").reshape(part.stop - part.start, -1)
        return part.scaled(rows[:: part.step])

    @staticmethod
    def _blocks(
        part: RowRange[SafetensorsFile, _Entry],
    ) -> tuple[npt.NDArray[np.uint8], Float32Array, Float32Array | None]:
        assert isinstance(part.place, QuantizedEntry)
        return part.place.blocks(part.file, part.start, part.stop, part.step)


def joined(rows: list[npt.NDArray[Number]]) -> npt.NDArray[Number]:
    """Rows of several parts as one matrix, without a copy if there is one part."""
    return rows[0] if len(rows) == 1 else np.concatenate(rows)


def _shards(directory: Path) -> list[Path]:
    index = directory / _INDEX
    if (directory / _SINGLE).is_file():
        return [directory / _SINGLE]
    if index.is_file():
        return _indexed(directory, index)
    files = sorted(directory.glob("*.safetensors"))
    if len(files) == 1:
        return files
    if files:
        raise CheckpointError(f"{directory} has {len(files)} safetensors files and no {_INDEX}: download it again")
    for pattern in _PICKLES:
        if any(directory.glob(pattern)):
            raise CheckpointError(
                f"{directory} holds pickled weights ({pattern}), which can run code when opened: "
                "convert them to safetensors first"
            )
    raise CheckpointError(f"{directory} holds no *.safetensors file: it is not a checkpoint, or an incomplete one")


def _indexed(directory: Path, index: Path) -> list[Path]:
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise CheckpointError(f"{index} has no weight_map")
    paths = []
    for name in sorted(set(weight_map.values())):
        # A shard is in the index's directory: any other path could read files that the user never named.
        if Path(name).name != name or not name.endswith(".safetensors"):
            raise CheckpointError(f"{index} names {name!r:.99}, which is not a safetensors file of this directory")
        paths.append(directory / name)
    return paths
