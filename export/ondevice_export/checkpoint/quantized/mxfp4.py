"""Weights in MXFP4 (OCP Microscaling): blocks of 32 codes of the type E2M1 with a scale of the type E8M0.

A checkpoint of the hub has them in two tensors for each tensor X of experts: `X_blocks` uint8[experts, rows, groups,
16], two codes in a byte, the low nibble first, and `X_scales` uint8[experts, rows, groups]. They are read as one tensor
X [experts, rows, 32 * groups], of which a bundle keeps codes and scales.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ondevice.arrays import Float32Array
from ondevice.bundle_format.weight_format import MXFP4, WeightFormat
from ondevice.errors import CheckpointError
from ondevice_export.checkpoint.json_fields import JsonFields
from ondevice_export.checkpoint.safetensors_file import SafetensorsFile, Stored, TensorEntry

METHOD = "mxfp4"
"""`quant_method` of the `quantization_config` of such a checkpoint."""
_BLOCKS, _SCALES = "_blocks", "_scales"
_BLOCK_BYTES = MXFP4.bytes(MXFP4.group)

_CODES = [8 + code if code < 8 else 15 - code for code in range(16)]
"""The bundle's codes, whose levels ascend, for those of E2M1: a sign, and then numbers from 0 on."""
_PAIRS = np.array([_CODES[pair & 15] | _CODES[pair >> 4] << 4 for pair in range(256)], np.uint8)
"""The same for the two codes of a byte."""


def in_ascending_codes(packed: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Bytes with two codes of a bundle each, of bytes with two codes of E2M1."""
    return _PAIRS[packed]


def scales_of(exponents: NDArray[np.uint8]) -> Float32Array:
    """The scales of a bundle, whose levels are twice the numbers of E2M1: 2**(e - 128), NaN where e is 255."""
    scales: Float32Array = np.ldexp(np.float32(1), exponents.astype(np.int32) - 128)
    scales[exponents == 255] = np.nan
    return scales


@dataclass(frozen=True)
class Mxfp4Entry:
    """A tensor whose codes and scales are two of the tensors of files.

    Attributes:
        name: its name.
        codes: its codes; the file that goes with the entry has them.
        scales: its scales.
        scale_file: the file that has these.
    """

    name: str
    codes: TensorEntry
    scales: TensorEntry
    scale_file: SafetensorsFile

    @property
    def shape(self) -> tuple[int, ...]:
        *leading, groups = self.scales.shape
        return *leading, MXFP4.group * groups

    @property
    def rows(self) -> int:
        """Number of rows, of all matrices together."""
        return math.prod(self.shape[:-1])

    @property
    def form(self) -> WeightFormat:
        """The format in which a bundle stores it as it is."""
        return MXFP4

    def blocks(
        self, file: SafetensorsFile, start: int, stop: int, step: int
    ) -> tuple[NDArray[np.uint8], Float32Array, None]:
        """Every `step`-th of the rows from `start` to `stop`: codes uint8[rows, width], and scales [rows, groups].

        They are read with those between them: a seek for each row would take longer.
        """
        groups, count = self.scales.shape[-1], stop - start
        packed, exponents = (
            np.frombuffer(each.read(entry, start * size, count * size), np.uint8).reshape(count, size)[::step]
            for each, entry, size in (
                (file, self.codes, groups * _BLOCK_BYTES),
                (self.scale_file, self.scales, groups),
            )
        )
        return MXFP4.unpack(in_ascending_codes(packed)), scales_of(exponents), None

    def numbers(self, file: SafetensorsFile, start: int, stop: int, step: int) -> Float32Array:
        """The weights of the same rows, float32[rows, width]."""
        codes, scales, _ = self.blocks(file, start, stop, step)
        with np.errstate(over="ignore"):  # infinite weights are refused where they are stored
            blocks = MXFP4.levels[codes].reshape(*scales.shape, MXFP4.group) * scales[..., None]
        return blocks.reshape(len(codes), -1)


def join_blocks(
    tensors: Mapping[str, Stored], fields: JsonFields, origin: str
) -> dict[str, tuple[SafetensorsFile, TensorEntry | Mxfp4Entry]]:
    """The tensors of files by name, with one in place of each two that hold its codes and its scales.

    Args:
        tensors: the tensors of a checkpoint's files.
        fields: its `quantization_config`, of which the method says all.
        origin: what error messages call the checkpoint.

    Raises:
        CheckpointError: one of two is missing, or they have not one shape.
    """
    found: dict[str, tuple[SafetensorsFile, TensorEntry | Mxfp4Entry]] = dict(tensors)
    for full in [name for name in tensors if name.endswith((_BLOCKS, _SCALES))]:
        name = full.removesuffix(_BLOCKS).removesuffix(_SCALES)
        if name in found:
            if isinstance(found[name][1], Mxfp4Entry):
                continue
            raise CheckpointError(f"{origin} holds {name} beside {full}")
        missing = [name + suffix for suffix in (_BLOCKS, _SCALES) if name + suffix not in tensors]
        if missing:
            raise CheckpointError(f"{origin} holds {full} without {missing[0]}")
        (file, blocks), (scale_file, scales) = found.pop(name + _BLOCKS), found.pop(name + _SCALES)
        assert isinstance(blocks, TensorEntry)
        assert isinstance(scales, TensorEntry)
        fits = blocks.shape == (*scales.shape, _BLOCK_BYTES) and len(scales.shape) > 1 and 0 not in scales.shape
        if not fits or {blocks.dtype, scales.dtype} != {"U8"}:
            raise CheckpointError(
                f"{origin}: {blocks.name} is {blocks.dtype} {list(blocks.shape)!s:.99}, and {scales.name} is "
                f"{scales.dtype} {list(scales.shape)!s:.99}: no codes and scales of MXFP4"
            )
        found[name] = file, Mxfp4Entry(name, blocks, scales, scale_file)
    return found
