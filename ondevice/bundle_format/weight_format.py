"""Storage formats of weights, shared by the exporter, the tensor tables, the pack and the kernels.

A new bit width also needs its layout in `engines/simd/kernels/formats.py`, its product in `tiles.py` next to it,
and test cases for both.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

IQ4_NL, E2M1 = 1, 2
"""Numbers of tables in which codes of 4 bits are looked up."""
TABLES = {
    IQ4_NL: (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113),
    E2M1: (-12, -8, -6, -4, -3, -2, -1, 0, 0, 1, 2, 3, 4, 6, 8, 12),
}
"""Weights of the 16 codes of a table format, before the scale, ascending. They are denser around 0, where most weights
are. In the table of GGUF's IQ4_NL none is 0: a weight of 0 becomes 1 times the scale. That of MXFP4 has twice the
numbers of the type E2M1, with 0 for both of its zeros.

All matrices of a format have the same table, so that it is a constant in the code of kernels and no operand.
"""
_NAMES = {IQ4_NL: "int4-table", E2M1: "mxfp4"}
"""Names of the formats with these tables."""


@dataclass(frozen=True)
class WeightFormat:
    """A storage format: codes of 2, 4 or 8 bits with scales, or plain numbers.

    The weight of a code is scale * (code - zero), scale * code + minimum in an affine format, or scale *
    TABLES[table][code] in a table format. Codes are packed into bytes with the lowest bits first.

    Attributes:
        bits: bits per code; 16 for bfloat16, 32 for float32.
        group: number of neighbouring weights in a row that share a scale; 0 if the whole row shares one, and for plain
            numbers, which have no scales.
        affine: whether each scale has a minimum beside it, the weight of code 0.
        table: the number of the table in which codes, of 4 bits, are looked up; 0 for none.
    """

    bits: int
    group: int = 0
    affine: bool = False
    table: int = 0

    @property
    def quantised(self) -> bool:
        """Whether the weights are codes with scales."""
        return self.bits <= 8

    @property
    def name(self) -> str:
        """Name of the number format, without the group, such as "int4", "int4-affine", "mxfp4" or "float32"."""
        if self.quantised:
            return _NAMES.get(self.table) or f"int{self.bits}" + ("-affine" if self.affine else "")
        return "bfloat16" if self.bits == 16 else "float32"

    @property
    def zero(self) -> int:
        """The code of a zero weight, as MatMulNBits and GatherBlockQuantized assume for unsigned codes. In an affine
        format, 0: the minimum is added to scale * code. In a table format too, where nothing is taken off codes.
        """
        return 0 if self.affine or self.table else 1 << (self.bits - 1)

    @property
    def levels(self) -> NDArray[np.float32]:
        """The weights of all codes of a quantised format before scale and minimum, float32[2**bits], ascending."""
        if self.table:
            return np.array(TABLES[self.table], np.float32)
        return np.arange(1 << self.bits, dtype=np.float32) - self.zero

    def bytes(self, weights: int) -> int:
        """Size in bytes of that many weights, without scales."""
        return weights * self.bits // 8

    def scales(self, width: int) -> int:
        """Number of scales of a row of `width` weights."""
        return 0 if not self.quantised else width // self.group if self.group else 1

    @property
    def stored_bits(self) -> float:
        """Bits per weight in memory, with its share of an fp16 scale and minimum. One scale per row counts as none."""
        return self.bits + (16 * (2 if self.affine else 1) / self.group if self.group else 0)

    def unpack(self, packed: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """Unpack bytes uint8[..., n] into one code per byte, uint8[..., n * 8 / bits]."""
        if self.bits == 8:
            return packed
        fields = [packed >> shift & (1 << self.bits) - 1 for shift in range(0, 8, self.bits)]
        return np.stack(fields, axis=-1).reshape(*packed.shape[:-1], -1)


INT4 = WeightFormat(4, 32)
INT4_AFFINE = WeightFormat(4, 32, affine=True)
"""The format of GGUF's Q4_1 blocks."""
INT4_TABLE = WeightFormat(4, 32, table=IQ4_NL)
"""The format of GGUF's IQ4_NL blocks."""
MXFP4 = WeightFormat(4, 32, table=E2M1)
"""The format of checkpoints in MXFP4 (OCP Microscaling), whose scales are powers of two. No weights are rounded to it
here: INT4_TABLE, of the same size, has finer scales and levels.
"""
INT8 = WeightFormat(8, 32)
BFLOAT16 = WeightFormat(16)
FLOAT32 = WeightFormat(32)

IN_GROUPS = (INT4, INT4_AFFINE, INT4_TABLE, MXFP4, INT8)
"""The formats of codes with a scale for every 32 weights."""

BY_ROW = {bits: WeightFormat(bits) for bits in (2, 4, 8)}
"""Bits -> the format of codes with one scale per row."""
