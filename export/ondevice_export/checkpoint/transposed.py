"""Matrices of experts that are stored transposed, [experts, width, rows], as transformers has those of gpt-oss."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from ondevice.arrays import Float32Array
from ondevice_export.checkpoint.safetensors_file import SafetensorsFile, TensorEntry, to_float32


@dataclass(frozen=True)
class TransposedEntry:
    """A tensor [experts, rows, width] that is stored as [experts, width, rows].

    Attributes:
        stored: the tensor in its file.
    """

    stored: TensorEntry
    _last: list[tuple[int, Float32Array]] = field(default_factory=list, repr=False, compare=False)
    """The expert that was read last and its matrix as it is stored: the next rows lie in the same bytes."""

    @property
    def name(self) -> str:
        return self.stored.name

    @property
    def shape(self) -> tuple[int, ...]:
        experts, width, rows = self.stored.shape
        return experts, rows, width

    @property
    def rows(self) -> int:
        """Number of rows, of all matrices together."""
        return self.shape[0] * self.shape[1]

    def numbers(self, file: SafetensorsFile, start: int, stop: int, step: int) -> Float32Array:
        """Every `step`-th of the rows from `start` to `stop`."""
        count, found = self.shape[1], []
        for expert in range(start // count, -(-stop // count)):
            low, high = max(start - expert * count, 0), min(stop - expert * count, count)
            found.append(self._matrix(file, expert)[:, low:high].T)
        return np.concatenate(found)[::step]

    def _matrix(self, file: SafetensorsFile, expert: int) -> Float32Array:
        """The matrix of one expert as it is stored, [width, rows]."""
        for number, matrix in self._last[:]:  # a copy: several threads read rows
            if number == expert:
                return matrix
        entry, (experts, *shape) = self.stored, self.stored.shape
        size = entry.nbytes // experts
        data = file.read(entry, expert * size, size)
        matrix = to_float32(data, entry.dtype, f"{file.path}: {entry.name}").reshape(shape)
        self._last[:] = [(expert, matrix)]
        return matrix
