"""The tensor types of GGUF files: blocks of codes with scales and minimums, and plain numbers.

A block of a quantised type stands for weights scale * (code - zero), scale * code + minimum or scale * level[code].
`read_blocks` takes the bytes of rows apart into these numbers without rounding, and `to_float32` computes the weights.
Every product and sum is exact in float32 but for the sum with a minimum, which rounds once, as in llama.cpp.

Source: `ggml-common.h` and `dequantize_row_*` in `ggml-quants.c` of llama.cpp. The `gguf` package is the tests' oracle.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ondevice.arrays import Float32Array
from ondevice.bundle_format.weight_format import INT4_TABLE, MXFP4, TABLES
from ondevice.errors import CheckpointError
from ondevice_export.checkpoint.quantized.mxfp4 import in_ascending_codes, scales_of

Bytes = NDArray[np.uint8]


@dataclass(frozen=True)
class Blocks:
    """Rows of a quantised matrix.

    Attributes:
        codes: uint8[rows, groups, weights of a group].
        scales: float32[rows, groups].
        minimums: float32[rows, groups], or None for a type with a `zero`.
        zero: the code of a zero weight; 0 for a type with minimums or a table.
        table: the number of the table in `weight_format.TABLES` in which codes are looked up; 0 for none.
    """

    codes: Bytes
    scales: Float32Array
    minimums: Float32Array | None = None
    zero: int = 0
    table: int = 0

    def weights(self) -> Float32Array:
        """The weights, float32[rows, width]."""
        weights = np.array(TABLES[self.table], np.float32)[self.codes] if self.table else self.codes.astype(np.float32)
        weights -= np.float32(self.zero)
        weights *= self.scales[..., None]
        if self.minimums is not None:
            weights += self.minimums[..., None]
        return weights.reshape(len(weights), -1)


@dataclass(frozen=True)
class TensorType:
    """A type of tensors: `bytes` of the file hold `weights` weights."""

    name: str
    weights: int
    bytes: int
    unpack: Callable[[Bytes], Blocks] | None = None
    """Takes blocks uint8[rows, blocks, bytes] apart; None for plain numbers."""


def read_blocks(data: Bytes, kind: TensorType) -> Blocks:
    """Rows of bytes uint8[rows, bytes] of a quantised type as codes, scales and minimums."""
    assert kind.unpack is not None
    with np.errstate(invalid="ignore"):  # scales that are NaN are refused where weights are stored
        return kind.unpack(data.reshape(len(data), -1, kind.bytes))


def to_float32(data: Bytes, kind: TensorType) -> Float32Array:
    """Rows of bytes uint8[rows, bytes] as weights float32[rows, width]; infinite and NaN weights stay what they are."""
    if kind.unpack is not None:
        with np.errstate(invalid="ignore", over="ignore"):
            return read_blocks(data, kind).weights()
    if kind.name == "BF16":
        return (data.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    return data.view(np.float16).astype(np.float32) if kind.name == "F16" else data.view(np.float32)


def find_type(number: int, origin: str) -> TensorType:
    """The type with this number in a file; `origin` names the tensor in the message.

    Raises:
        CheckpointError: tensors of this type are not read.
    """
    if number not in TYPES:
        name = _OTHERS.get(number, f"of the unknown type {number}")
        known = ", ".join(kind.name for kind in TYPES.values())
        raise CheckpointError(f"{origin} is {name}, which is not read (only {known}): take another file of the model")
    return TYPES[number]


def _halves(block: Bytes) -> Float32Array:
    """fp16 numbers at the end of an array's shape as float32: uint8[..., 2 n] -> float32[..., n]."""
    return np.ascontiguousarray(block).view(np.float16).astype(np.float32)


def _nibbles(packed: Bytes) -> Bytes:
    """The low nibbles of uint8[..., n] and then the high ones, uint8[..., 2 n]."""
    return np.concatenate([packed & 15, packed >> 4], axis=-1)


def _fifth_bits(packed: Bytes) -> Bytes:
    """32 bits, the lowest first, each as the 16 that a 5-bit code adds: uint8[..., 4] -> uint8[..., 32]."""
    return np.left_shift(np.unpackbits(packed, axis=-1, bitorder="little"), np.uint8(4))


def _q4_0(block: Bytes) -> Blocks:
    return Blocks(_nibbles(block[..., 2:]), _halves(block[..., :2])[..., 0], zero=8)


def _q4_1(block: Bytes) -> Blocks:
    numbers = _halves(block[..., :4])
    return Blocks(_nibbles(block[..., 4:]), numbers[..., 0], numbers[..., 1])


def _q5_0(block: Bytes) -> Blocks:
    codes = _nibbles(block[..., 6:]) | _fifth_bits(block[..., 2:6])
    return Blocks(codes, _halves(block[..., :2])[..., 0], zero=16)


def _q5_1(block: Bytes) -> Blocks:
    numbers = _halves(block[..., :4])
    return Blocks(_nibbles(block[..., 8:]) | _fifth_bits(block[..., 4:8]), numbers[..., 0], numbers[..., 1])


def _q8_0(block: Bytes) -> Blocks:
    return Blocks(block[..., 2:] ^ np.uint8(128), _halves(block[..., :2])[..., 0], zero=128)


def _six_bits(packed: Bytes) -> tuple[Bytes, Bytes]:
    """The 8 scales and 8 minimums of a K block, 6 bits each, from uint8[..., 12] to uint8[..., 8] twice.

    The low 6 bits of the first 8 bytes are the first four of both; the last 4 bytes have the low nibbles of the others,
    whose upper 2 bits are those that the first 8 bytes have left.
    """
    first, second, rest = packed[..., :4], packed[..., 4:8], packed[..., 8:]
    scales = np.concatenate([first & 63, (rest & 15) | (first >> 6 << 4)], axis=-1)
    return scales, np.concatenate([second & 63, (rest >> 4) | (second >> 6 << 4)], axis=-1)


def _in_groups(codes: Bytes, scales: Float32Array, minimums: Float32Array) -> Blocks:
    """Blocks of 256 codes as groups of 32: scales and minimums are float32[rows, blocks, 8]."""
    rows = len(codes)
    return Blocks(codes.reshape(rows, -1, 32), scales.reshape(rows, -1), minimums.reshape(rows, -1))


def _k_scales(block: Bytes) -> tuple[Float32Array, Float32Array]:
    """Scales d * s and minimums -(dmin * t) of the groups of a K block whose first 16 bytes have them."""
    numbers, (scales, minimums) = _halves(block[..., :4]), _six_bits(block[..., 4:16])
    return numbers[..., :1] * scales, -(numbers[..., 1:] * minimums)


def _q4_k(block: Bytes) -> Blocks:
    packed = block[..., 16:].reshape(*block.shape[:2], 4, 32)
    return _in_groups(_nibbles(packed), *_k_scales(block))


def _q5_k(block: Bytes) -> Blocks:
    packed, high = block[..., 48:].reshape(*block.shape[:2], 4, 32), block[..., 16:48]
    fifth = np.stack([high >> np.uint8(group) & 1 for group in range(8)], axis=-2)
    codes = _nibbles(packed) | np.left_shift(fifth.reshape(*packed.shape[:-1], 64), np.uint8(4))
    return _in_groups(codes, *_k_scales(block))


def _q6_k(block: Bytes) -> Blocks:
    """Groups of 16: every 128 codes have 64 bytes of nibbles and 32 bytes of the upper two bits."""
    shape = block.shape[:2]
    low = _nibbles(block[..., :128].reshape(*shape, 2, 64))
    upper = block[..., 128:192].reshape(*shape, 2, 32)
    high = np.concatenate([upper >> np.uint8(shift) & 3 for shift in (0, 2, 4, 6)], axis=-1)
    scales = block[..., 192:208].view(np.int8).astype(np.float32) * _halves(block[..., 208:])
    codes = low | np.left_shift(high, np.uint8(4))
    return Blocks(codes.reshape(shape[0], -1, 16), scales.reshape(shape[0], -1), zero=32)


def _iq4_nl(block: Bytes) -> Blocks:
    return Blocks(_nibbles(block[..., 2:]), _halves(block[..., :2])[..., 0], table=INT4_TABLE.table)


def _iq4_xs(block: Bytes) -> Blocks:
    """Groups of 32 with scales d * (s - 32): bytes 2 and 3 have the upper two bits of all s, 4 to 7 the lower four."""
    shape, groups = block.shape[:2], np.arange(8, dtype=np.uint8)
    upper = np.ascontiguousarray(block[..., 2:4]).view("<u2") >> 2 * groups & 3
    whole = block[..., 4:8].repeat(2, axis=-1) >> 4 * (groups % 2) & 15 | upper << 4
    scales = _halves(block[..., :2]) * (whole.astype(np.float32) - np.float32(32))
    codes = _nibbles(block[..., 8:].reshape(*shape, 8, 16))
    return Blocks(codes.reshape(shape[0], -1, 32), scales.reshape(shape[0], -1), table=INT4_TABLE.table)


def _mxfp4(block: Bytes) -> Blocks:
    """As `Q4_0` but for the scale, the exponent of a power of two."""
    return Blocks(_nibbles(in_ascending_codes(block[..., 1:])), scales_of(block[..., 0]), table=MXFP4.table)


TYPES = {
    0: TensorType("F32", 1, 4),
    1: TensorType("F16", 1, 2),
    30: TensorType("BF16", 1, 2),
    2: TensorType("Q4_0", 32, 18, _q4_0),
    3: TensorType("Q4_1", 32, 20, _q4_1),
    6: TensorType("Q5_0", 32, 22, _q5_0),
    7: TensorType("Q5_1", 32, 24, _q5_1),
    8: TensorType("Q8_0", 32, 34, _q8_0),
    12: TensorType("Q4_K", 256, 144, _q4_k),
    13: TensorType("Q5_K", 256, 176, _q5_k),
    14: TensorType("Q6_K", 256, 210, _q6_k),
    20: TensorType("IQ4_NL", 32, 18, _iq4_nl),
    23: TensorType("IQ4_XS", 256, 136, _iq4_xs),
    39: TensorType("MXFP4", 32, 17, _mxfp4),
}
"""Types that are read, by their number in a file (`enum ggml_type`)."""

_OTHERS = {
    9: "Q8_1", 10: "Q2_K", 11: "Q3_K", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S",
    21: "IQ3_S", 22: "IQ2_S", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64",
    29: "IQ1_M", 34: "TQ1_0", 35: "TQ2_0", 40: "NVFP4",
}  # fmt: skip
