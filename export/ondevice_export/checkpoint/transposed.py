"""Matrices of experts that are stored transposed, [experts, width, rows], as transformers has those of gpt-oss."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

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
            found.append(_matrix(file, self.stored, expert)[:, low:high].T)
        return np.concatenate(found)[::step]


@lru_cache(maxsize=1)
def _matrix(file: SafetensorsFile, entry: TensorEntry, expert: int) -> Float32Array:
    """The matrix of one expert as it is stored. It is kept for the next rows, which lie in the same bytes."""
    _, width, rows = entry.shape
    size = entry.nbytes // entry.shape[0]
    data = file.read(entry, expert * size, size)
    return to_float32(data, entry.dtype, f"{file.path}: {entry.name}").reshape(width, rows)
