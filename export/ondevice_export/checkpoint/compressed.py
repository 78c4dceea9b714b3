"""Weights that `compressed-tensors` has packed: integers of 4 or 8 bits with scales, and perhaps zeros.

A checkpoint of the hub with the `quant_method` compressed-tensors and the format pack-quantized, as llm-compressor
writes it for GPTQ, AWQ or plain rounding, has several tensors for a matrix `X.weight` [rows, width]:

    X.weight_packed      int32[rows, width * bits / 32], codes, the lowest bits first
    X.weight_scale       [rows, groups], each for width / groups neighbouring weights of a row
    X.weight_zero_point  int32[rows * bits / 32, groups], the code of 0 of each group, packed row below row; only of
                         weights that are not symmetric, where it is in the middle
    X.weight_shape       int64[2]

A weight is scale * (code - zero). They are read as one tensor `X.weight`, of which a bundle keeps codes and scales, if
a group is a multiple of its own 32 weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ondevice.arrays import Float32Array
from ondevice.bundle_format.weight_format import INT4, INT4_AFFINE, INT8, WeightFormat
from ondevice.errors import CheckpointError
from ondevice_export.checkpoint.json_fields import JsonFields
from ondevice_export.checkpoint.safetensors_file import SafetensorsFile, TensorEntry, to_float32
from ondevice_export.quantize import BLOCK

METHOD, FORMAT = "compressed-tensors", "pack-quantized"
"""`quant_method` and `format` of the `quantization_config` of such a checkpoint."""
_PACKED, _SCALES, _ZEROS, _SHAPE, _ORDER = (
    f".weight_{part}" for part in ("packed", "scale", "zero_point", "shape", "g_idx")
)
_FORMS = {4: (INT4, INT4_AFFINE), 8: (INT8, None)}
"""By the bits of a code: the bundle's formats of symmetric weights, and of the others."""
_WORD = 32

Stored = tuple[SafetensorsFile, TensorEntry]
"""A tensor, and the file that has it."""


@dataclass(frozen=True)
class CompressedEntry:
    """A matrix whose codes, scales and zeros are tensors of files.

    Attributes:
        name: its name.
        bits: bits of a code.
        packed: its codes; the file that goes with the entry has them.
        scales, zeros: its scales, and the codes of 0 or None, with their files.
    """

    name: str
    bits: int
    packed: TensorEntry
    scales: Stored
    zeros: Stored | None

    @property
    def shape(self) -> tuple[int, ...]:
        return self.rows, self.packed.shape[1] * _WORD // self.bits

    @property
    def rows(self) -> int:
        """Number of rows."""
        return self.packed.shape[0]

    @property
    def form(self) -> WeightFormat | None:
        """The format in which a bundle stores it as it is; None if there is none."""
        form, groups = _FORMS[self.bits][self.zeros is not None], self.scales[1].shape[1]
        return None if form is None or self.shape[1] // groups % form.group else form

    def blocks(
        self, file: SafetensorsFile, start: int, stop: int, step: int
    ) -> tuple[NDArray[np.uint8], Float32Array, Float32Array | None]:
        """Every `step`-th of the rows from `start` to `stop`: codes uint8[rows, width], and scales and minimums, the
        weights of code 0, [rows, width / 32]; the latter None for symmetric weights.
        """
        codes, scales, zeros = self._read(file, start, stop, step)
        repeats = self.shape[1] // scales.shape[1] // BLOCK
        minimums = None if self.zeros is None else np.repeat(-zeros * scales, repeats, axis=1)
        return codes, np.repeat(scales, repeats, axis=1), minimums

    def numbers(self, file: SafetensorsFile, start: int, stop: int, step: int) -> Float32Array:
        """The weights of the same rows, float32[rows, width]."""
        codes, scales, zeros = self._read(file, start, stop, step)
        grouped = codes.reshape(*scales.shape, -1).astype(np.float32)
        with np.errstate(over="ignore"):  # infinite weights are refused where they are stored
            weights: Float32Array = (grouped - zeros[..., None]) * scales[..., None]
        return weights.reshape(codes.shape)

    def _read(
        self, file: SafetensorsFile, start: int, stop: int, step: int
    ) -> tuple[NDArray[np.uint8], Float32Array, Float32Array]:
        """Codes uint8[rows, width]; scales and the codes of 0, float32[rows, groups] or [1, 1]."""
        count, stride = stop - start, 4 * self.packed.shape[1]
        packed = np.frombuffer(file.read(self.packed, start * stride, count * stride), np.uint8)
        (scale_file, scales), groups = self.scales, self.scales[1].shape[1]
        size = scales.nbytes // scales.shape[0]
        found = to_float32(scale_file.read(scales, start * size, count * size), scales.dtype, scales.name)
        codes = _FORMS[self.bits][0].unpack(packed.reshape(count, -1)[::step])
        return codes, found.reshape(count, groups)[::step], self._zeros(start, stop, step)

    def _zeros(self, start: int, stop: int, step: int) -> Float32Array:
        """The codes of 0, float32[rows, groups], or [1, 1] of symmetric weights."""
        if self.zeros is None:
            return np.full((1, 1), 1 << (self.bits - 1), np.float32)
        file, entry = self.zeros
        rows, each, size = np.arange(start, stop, step), _WORD // self.bits, 4 * entry.shape[1]
        first, last = start // each, -(-stop // each)
        words = np.frombuffer(file.read(entry, first * size, (last - first) * size), np.uint32)
        words = words.reshape(-1, entry.shape[1])
        shifts = (self.bits * (rows % each)).astype(np.uint32)[:, None]
        found: NDArray[np.uint32] = words[rows // each - first] >> shifts & np.uint32((1 << self.bits) - 1)
        return found.astype(np.float32)


def join_compressed(
    tensors: Mapping[str, Stored], config: Mapping[str, Any], origin: str
) -> dict[str, tuple[SafetensorsFile, TensorEntry | CompressedEntry]]:
    """The tensors of files by name, with one in place of those that hold its codes, scales and zeros.

    Raises:
        CheckpointError: the format is not supported, or one of these tensors is missing or of another shape.
    """
    found: dict[str, tuple[SafetensorsFile, TensorEntry | CompressedEntry]] = dict(tensors)
    bits = _read_bits(JsonFields(config, origin).mapping("quantization_config", {}))
    for full in [name for name in tensors if name.endswith(_PACKED)]:
        base = full.removesuffix(_PACKED)
        if base + _ORDER in tensors:
            raise CheckpointError(
                f"{origin}: the columns of {base}.weight lie in another order, which is not supported"
            )
        if base + _SCALES not in tensors:
            raise CheckpointError(f"{origin} holds {full} without {base + _SCALES}")
        for suffix in (_PACKED, _SCALES, _ZEROS, _SHAPE):
            found.pop(base + suffix, None)
        (file, packed), scales, zeros = tensors[full], tensors[base + _SCALES], tensors.get(base + _ZEROS)
        entry = CompressedEntry(
            f"{base}.weight", _bits_of(packed, tensors.get(base + _SHAPE), bits), packed, scales, zeros
        )
        _check(entry, origin)
        found[entry.name] = file, entry
    return found


def _read_bits(fields: JsonFields) -> set[int]:
    """The bits of codes that a `quantization_config` names.

    Raises:
        CheckpointError: weights are no packed integers, activations are quantised too, or rotated.
    """

    def refuse(what: str) -> CheckpointError:
        return CheckpointError(f"{fields.origin}: {what} is not supported: export the original checkpoint")

    if fields.data.get("transform_config"):
        raise refuse("transform_config")
    if (sparsity := fields.mapping("sparsity_config", {})).data.get("format", "dense") != "dense":
        raise refuse(f"the sparsity {sparsity.data['format']!r:.99}")
    groups, bits = fields.mapping("config_groups", {}), set()
    for name in groups.data:
        group = groups.mapping(name, {})
        if (form := group.data.get("format") or fields.data.get("format")) != FORMAT:
            raise refuse(f"the format {form!r:.99}")
        if group.data.get("input_activations") or group.data.get("output_activations"):
            raise refuse("quantisation of activations")
        weights = group.mapping("weights", {})
        number = weights.integer("num_bits", 0, minimum=0)
        if weights.data.get("type", "int") != "int" or number not in _FORMS:
            raise refuse(f"weights of the type {weights.data.get('type')!r:.99} of {number} bits")
        bits.add(number)
    if not bits:
        raise refuse("a quantization_config without config_groups")
    return bits


def _bits_of(packed: TensorEntry, shape: Stored | None, bits: set[int]) -> int:
    """The bits of a matrix's codes: where there are several numbers, its shape tells which."""
    if len(bits) > 1 and shape is not None and len(packed.shape) == 2 and packed.shape[1]:
        file, entry = shape
        if entry.dtype == "I64" and entry.shape == (2,):
            width = int(np.frombuffer(file.read(entry, 0, entry.nbytes), np.int64)[1])
            return next((each for each in bits if width * each == packed.shape[1] * _WORD), min(bits))
    return min(bits)


def _check(entry: CompressedEntry, origin: str) -> None:
    """Raise CheckpointError unless the tensors of a matrix fit each other."""
    packed, scales, each = entry.packed, entry.scales[1], _WORD // entry.bits
    fits = packed.dtype == "I32" and len(packed.shape) == len(scales.shape) == 2 and 0 not in packed.shape
    fits = fits and scales.shape[0] == packed.shape[0] and scales.shape[1] > 0 and not entry.shape[1] % scales.shape[1]
    if fits and entry.zeros is not None:
        zeros = entry.zeros[1]
        fits = zeros.dtype == "I32" and zeros.shape == (-(-entry.rows // each), scales.shape[1])
    if not fits:
        raise CheckpointError(f"{origin}: the shapes or types of the codes and scales of {entry.name} do not fit")
