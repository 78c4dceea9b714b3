"""Matrices of integers with a scale, and perhaps a zero, for each group of neighbouring weights of a row."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ondevice.arrays import Float32Array
from ondevice.bundle_format.weight_format import INT4, INT4_AFFINE, INT8, WeightFormat
from ondevice_export.checkpoint.safetensors_file import SafetensorsFile
from ondevice_export.quantize import BLOCK

_FORMS = {4: (INT4, INT4_AFFINE), 8: (INT8, None)}
"""By the bits of a code: the bundle's formats of symmetric weights, and of the others."""
SUPPORTED_BITS = tuple(_FORMS)
WORD = 32
"""Bits of the integers that codes are packed in."""


class GroupedRows(NamedTuple):
    """Rows of a matrix; a weight is scale * (code - zero)."""

    codes: NDArray[np.uint8]
    """[rows, width]"""
    scales: Float32Array
    """[rows, groups]"""
    zeros: Float32Array
    """[rows, groups], or [1, 1] where all are the same"""


class GroupedEntry(ABC):
    """A matrix [rows, width] whose codes, scales and zeros are tensors of files.

    Attributes:
        name: its name.
        bits: bits of a code, 4 or 8.
    """

    name: str
    bits: int

    @property
    @abstractmethod
    def shape(self) -> tuple[int, ...]: ...

    @property
    @abstractmethod
    def groups(self) -> int | None:
        """Groups of a row, which have `width / groups` neighbouring weights each; None if they are not neighbours."""

    @property
    @abstractmethod
    def symmetric(self) -> bool:
        """Whether the zero of all groups is the code in the middle."""

    @abstractmethod
    def read(self, file: SafetensorsFile, start: int, stop: int, step: int) -> GroupedRows:
        """Every `step`-th of the rows from `start` to `stop`."""

    @property
    def rows(self) -> int:
        """Number of rows."""
        return self.shape[0]

    @property
    def middle(self) -> int:
        """The zero of symmetric weights."""
        return 1 << (self.bits - 1)

    @property
    def form(self) -> WeightFormat | None:
        """The format in which a bundle stores it as it is; None if there is none."""
        form, groups = _FORMS[self.bits][not self.symmetric], self.groups
        return None if form is None or groups is None or self.shape[1] // groups % form.group else form

    def blocks(
        self, file: SafetensorsFile, start: int, stop: int, step: int
    ) -> tuple[NDArray[np.uint8], Float32Array, Float32Array | None]:
        """Every `step`-th of the rows from `start` to `stop`: codes uint8[rows, width], and scales and minimums, the
        weights of code 0, [rows, width / 32]; the latter None for symmetric weights.
        """
        codes, scales, zeros = self.read(file, start, stop, step)
        repeats = self.shape[1] // scales.shape[1] // BLOCK
        minimums = None if self.symmetric else np.repeat(-zeros * scales, repeats, axis=1)
        return codes, np.repeat(scales, repeats, axis=1), minimums

    def numbers(self, file: SafetensorsFile, start: int, stop: int, step: int) -> Float32Array:
        """The weights of the same rows, float32[rows, width]."""
        codes, scales, zeros = self.read(file, start, stop, step)
        grouped = codes.reshape(*scales.shape, -1).astype(np.float32)
        with np.errstate(over="ignore"):  # infinite weights are refused where they are stored
            weights: Float32Array = (grouped - zeros[..., None]) * scales[..., None]
        return weights.reshape(codes.shape)


def unpack(packed: NDArray[np.uint8], bits: int) -> NDArray[np.uint8]:
    """Codes uint8[rows, width] of bytes [rows, width * bits / 8], the lowest bits first."""
    return _FORMS[bits][0].unpack(packed)
