"""Tensors that lie in files as rows of others: experts, and matrices that a checkpoint has joined.

Checkpoints of the hub have three matrices for every expert, `experts.N.gate_proj.weight`, `up_proj` and `down_proj`, or
`w1`, `w3` and `w2`; GGUF files have one tensor of each for all experts. transformers 5 multiplies two:
`experts.gate_up_proj` [experts, 2 * inner, H], every expert's gate above its up, and `experts.down_proj` [experts, H,
inner]. So do bundles. Biases of gate and up, [experts, inner] each in GGUF files, become `experts.gate_up_proj_bias`
[experts, 2 * inner]. The gate of a shared expert and the bias of ERNIE's router, [1, n] on the hub, are vectors in GGUF
files and in bundles.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Generic, NamedTuple, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from ondevice.arrays import Float32Array
from ondevice.bundle_format.decoder import MAX_EXPERTS
from ondevice.errors import CheckpointError

_NAMES = {"gate_proj": "gate", "w1": "gate", "up_proj": "up", "w3": "up", "down_proj": "down", "w2": "down"}
_OF_ONE = re.compile(
    rf"(?P<experts>.*\bexperts)\.(?P<number>0|[1-9][0-9]{{0,3}})\.(?P<matrix>{'|'.join(_NAMES)})\.weight"
)
_OF_ALL = re.compile(r"(?P<experts>.*\bexperts)\.(?P<matrix>gate_proj|up_proj)")
_VECTORS = ("shared_expert_gate.weight", "moe_statics.e_score_correction_bias")
"""How the names of vectors end that checkpoints of the hub have as [1, n]."""
_OF_GATE = re.compile(r"(?P<experts>.*\bexperts)\.gate_proj_bias")


class TensorFile(Protocol):
    """An open file of tensors."""

    def close(self) -> None: ...


class TensorPlace(Protocol):
    """A file's description of one of its tensors."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def rows(self) -> int:
        """Number of rows, of all matrices together."""


File = TypeVar("File", bound=TensorFile)
Place = TypeVar("Place", bound=TensorPlace)
Number = TypeVar("Number", bound=np.generic)


class Taken(NamedTuple):
    """Every `step`-th of the rows of a tensor from `start` to `stop`, times a factor; of a vector, of its numbers."""

    start: int
    stop: int
    factor: float = 1.0
    step: int = 1

    def of(self, vector: Float32Array) -> Float32Array:
        """The numbers of a vector."""
        numbers: Float32Array = vector[self.start : self.stop : self.step]
        return numbers * np.float32(self.factor)

    @property
    def rows(self) -> range:
        """The numbers of the rows."""
        return range(self.start, self.stop, self.step)


@dataclass(frozen=True)
class RowRange(Generic[File, Place]):
    """Every `step`-th of the rows of a tensor in a file from `start` to `stop`, times a factor."""

    file: File
    place: Place
    start: int
    stop: int
    factor: float = 1.0
    step: int = 1

    @property
    def count(self) -> int:
        """Number of rows."""
        return len(range(self.start, self.stop, self.step))

    def taken(self, rows: range) -> RowRange[File, Place]:
        """Some of these rows, which are counted from the first of them."""
        first, last = (self.start + self.step * rows[place] for place in (0, -1))
        return replace(self, start=first, stop=last + 1, step=self.step * rows.step)

    def scaled(self, rows: Float32Array) -> Float32Array:
        """The rows as they are in the file, times the factor."""
        return rows if self.factor == 1 else rows * np.float32(self.factor)


@dataclass(frozen=True)
class Stack(Generic[File, Place]):
    """A tensor of a checkpoint: its shape, and the rows of files' tensors that follow each other in it."""

    shape: tuple[int, ...]
    parts: tuple[RowRange[File, Place], ...]
    numbers: tuple[Taken, ...] = ()
    """The numbers of a vector, one row of a file, in another order; empty if they are in that of the file."""
    columns: tuple[int, int] | None = None
    """The first column of the files' rows that the tensor has, and the one after the last; None for all."""

    def between(self, start: int, stop: int, step: int = 1) -> Iterator[RowRange[File, Place]]:
        """The parts that every `step`-th of the rows from `start` to `stop` consists of."""
        for part in self.parts:
            rows = range(start if start >= 0 else start % step, min(stop, part.count), step)
            if rows:
                yield part.taken(rows)
            start, stop = start - part.count, stop - part.count

    def cut(self, rows: NDArray[Number], block: int = 1) -> NDArray[Number]:
        """The tensor's columns of rows as they are in the files, with one number for each block of columns."""
        if self.columns is None:
            return rows
        first, stop = self.columns
        return rows[:, first // block : stop // block]

    def rows(self, taken: Sequence[Taken]) -> Stack[File, Place]:
        """A matrix of some of the rows, also of [rows, 1, width]; of experts or a vector, all in another order."""
        if len(self.shape) == 1:
            return replace(self, numbers=tuple(taken))
        parts = [
            replace(part, factor=part.factor * each.factor)
            for each in taken
            for part in self.between(each.start, each.stop, each.step)
        ]
        experts = len(self.shape) > 2 and self.shape[1] != 1
        shape = self.shape if experts else (sum(len(each.rows) for each in taken), self.shape[-1])
        return Stack(shape, tuple(parts))

    def halves(self) -> tuple[Stack[File, Place], Stack[File, Place]]:
        """The first and the last columns of a matrix [rows, 2 * width], each [rows, width]."""
        (rows, columns), parts = self.shape, self.parts
        width = columns // 2
        first, second = (Stack((rows, width), parts, columns=each) for each in ((0, width), (width, columns)))
        return first, second


def whole(file: File, place: Place) -> Stack[File, Place]:
    """A tensor as it is in a file."""
    return Stack(place.shape, (RowRange(file, place, 0, place.rows),))


def stack_experts(tensors: Mapping[str, tuple[File, Place]], origin: str) -> dict[str, Stack[File, Place]]:
    """The tensors of files by the hub's names, with experts as transformers 5 has them.

    Raises:
        CheckpointError: an expert is missing, is there twice, or has matrices of other shapes than the others.
    """
    found: dict[str, Stack[File, Place]] = {}
    experts: dict[str, dict[str, dict[int, RowRange[File, Place]]]] = {}
    for name, (file, place) in tensors.items():
        if (one := _OF_ONE.fullmatch(name)) is not None:
            parts = {int(one["number"]): RowRange(file, place, 0, place.rows)}
        elif (one := _OF_ALL.fullmatch(name)) is not None and len(place.shape) == 3 and place.shape[0]:
            count, rows, _ = place.shape
            steps = range(min(count, MAX_EXPERTS + 1))
            parts = {number: RowRange(file, place, number * rows, (number + 1) * rows) for number in steps}
        elif name.endswith(_VECTORS) and place.shape[:-1] == (1,):
            found[name] = replace(whole(file, place), shape=place.shape[1:])
            continue
        else:
            found[name] = whole(file, place)
            continue
        matrix = _NAMES[one["matrix"]]
        own = experts.setdefault(one["experts"], {}).setdefault(matrix, {})
        if twice := own.keys() & parts.keys():
            raise CheckpointError(f"{origin}: {one['experts']} has the {matrix} of expert {min(twice)} twice")
        own.update(parts)
    for prefix, matrices in experts.items():
        joined = {"gate_up_proj": ("gate", "up"), "down_proj": ("down",)}
        for name, names in joined.items():
            if matrices.keys().isdisjoint(names):
                continue
            if f"{prefix}.{name}" in found:
                raise CheckpointError(f"{origin}: {prefix} has matrices of single experts beside {name}")
            stack = _stacked(f"{origin}: {prefix}", *(matrices.get(each, {}) for each in names))
            found[f"{prefix}.{name}"] = stack
    for one in [one for name in found if (one := _OF_GATE.fullmatch(name)) is not None]:
        gate, up = found.pop(one[0]), found.pop(f"{one['experts']}.up_proj_bias", None)
        if up is None or up.shape != gate.shape or len(gate.shape) != 2:
            raise CheckpointError(f"{origin}: {one['experts']} has not the biases of gate and of up, of one shape")
        count, inner = gate.shape
        halves = (part for number in range(count) for each in (gate, up) for part in each.between(number, number + 1))
        found[f"{one['experts']}.gate_up_proj_bias"] = Stack((count, 2 * inner), tuple(halves))
    return found


def _stacked(origin: str, *matrices: Mapping[int, RowRange[File, Place]]) -> Stack[File, Place]:
    """One tensor [experts, rows, width] of several matrices of each expert, one above the other."""
    count = max(map(len, matrices))
    if missing := [number for number in range(count) for each in matrices if number not in each]:
        raise CheckpointError(f"{origin} has not all matrices of expert {missing[0]}")
    parts = tuple(each[number] for number in range(count) for each in matrices)
    shapes = {(part.count, *part.place.shape[1:][-1:]) for part in parts}
    if len(shapes) > 1 or shapes == {(1,)}:  # a vector has one row, and no width
        raise CheckpointError(f"{origin} has experts of different shapes")
    ((rows, width),) = shapes
    return Stack((count, len(matrices) * rows, width), parts)
