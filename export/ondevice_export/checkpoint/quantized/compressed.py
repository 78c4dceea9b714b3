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

import numpy as np

from ondevice.arrays import Float32Array
from ondevice.errors import CheckpointError
from ondevice_export.checkpoint.json_fields import JsonFields
from ondevice_export.checkpoint.quantized.grouped import SUPPORTED_BITS, WORD, GroupedEntry, GroupedRows, unpack
from ondevice_export.checkpoint.safetensors_file import SafetensorsFile, Stored, TensorEntry, to_float32

METHOD, FORMAT = "compressed-tensors", "pack-quantized"
"""`quant_method` and `format` of the `quantization_config` of such a checkpoint."""
_PACKED, _SCALES, _ZEROS, _SHAPE, _ORDER = (
    f".weight_{part}" for part in ("packed", "scale", "zero_point", "shape", "g_idx")
)


@dataclass(frozen=True)
class CompressedEntry(GroupedEntry):
    """A matrix that compressed-tensors has packed.

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
        return self.packed.shape[0], self.packed.shape[1] * WORD // self.bits

    @property
    def groups(self) -> int:
        return self.scales[1].shape[1]

    @property
    def symmetric(self) -> bool:
        return self.zeros is None

    def read(self, file: SafetensorsFile, start: int, stop: int, step: int) -> GroupedRows:
        count, stride = stop - start, 4 * self.packed.shape[1]
        packed = np.frombuffer(file.read(self.packed, start * stride, count * stride), np.uint8)
        scale_file, scales = self.scales
        size = scales.nbytes // scales.shape[0]
        found = to_float32(scale_file.read(scales, start * size, count * size), scales.dtype, scales.name)
        codes = unpack(packed.reshape(count, -1)[::step], self.bits)
        return GroupedRows(codes, found.reshape(count, self.groups)[::step], self._zeros(start, stop, step))

    def _zeros(self, start: int, stop: int, step: int) -> Float32Array:
        """The codes of 0, float32[rows, groups], or [1, 1] of symmetric weights."""
        if self.zeros is None:
            return np.full((1, 1), self.middle, np.float32)
        file, entry = self.zeros
        rows, each, size = np.arange(start, stop, step), WORD // self.bits, 4 * entry.shape[1]
        first, last = start // each, -(-stop // each)
        words = np.frombuffer(file.read(entry, first * size, (last - first) * size), np.uint32)
        words = words.reshape(-1, entry.shape[1])
        shifts = (self.bits * (rows % each)).astype(np.uint32)[:, None]
        return (words[rows // each - first] >> shifts & np.uint32((1 << self.bits) - 1)).astype(np.float32)


def join_packed(
    tensors: Mapping[str, Stored], fields: JsonFields, origin: str
) -> dict[str, tuple[SafetensorsFile, TensorEntry | CompressedEntry]]:
    """The tensors of files by name, with one in place of those that hold its codes, scales and zeros.

    Args:
        tensors: the tensors of a checkpoint's files.
        fields: its `quantization_config`.
        origin: what error messages call the checkpoint.

    Raises:
        CheckpointError: the format is not supported, or one of these tensors is missing or of another shape.
    """
    found: dict[str, tuple[SafetensorsFile, TensorEntry | CompressedEntry]] = dict(tensors)
    bits = _read_bits(fields)
    for full in [name for name in tensors if name.endswith(_PACKED)]:
        base = full.removesuffix(_PACKED)
        if base + _ORDER in tensors:
            raise CheckpointError(
                f"{origin}: the columns of {base}.weight lie in another order, which is not supported"
            )
        if base + _SCALES not in tensors:
            raise CheckpointError(f"{origin} holds {full} without {base + _SCALES}")
        if f"{base}.weight" in tensors:
            raise CheckpointError(f"{origin} holds {base}.weight beside {full}")
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
        if weights.data.get("type", "int") != "int" or number not in SUPPORTED_BITS:
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
            return next((each for each in bits if width * each == packed.shape[1] * WORD), min(bits))
    return min(bits)


def _check(entry: CompressedEntry, origin: str) -> None:
    """Raise CheckpointError unless the tensors of a matrix fit each other."""
    packed, scales, each = entry.packed, entry.scales[1], WORD // entry.bits
    fits = packed.dtype == "I32" and len(packed.shape) == len(scales.shape) == 2 and 0 not in packed.shape
    fits = fits and scales.shape[0] == packed.shape[0] and scales.shape[1] > 0 and not entry.shape[1] % scales.shape[1]
    if fits and entry.zeros is not None:
        zeros = entry.zeros[1]
        fits = zeros.dtype == "I32" and zeros.shape == (-(-entry.rows // each), scales.shape[1])
    if not fits:
        raise CheckpointError(f"{origin}: the shapes or types of the codes and scales of {entry.name} do not fit")
