"""How the weights of a matrix are stored: what the exporter, the graphs' readers, the pack and the kernels share.

A width more is a module beside `engines/simd/kernels/int4.py`, its lines in `codes.py` there, and a case of the tests.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class WeightFormat:
    """Codes of 2, 4 or 8 bits, packed low bits first, or plain numbers; a code's weight is its scale * (code - zero).

    Attributes:
        bits: of a code; 16 for bfloat16 and 32 for float32.
        group: neighbouring weights of a row that share a scale; 0 where all of a row do, or where there is none.
    """

    bits: int
    group: int = 0

    @property
    def quantised(self) -> bool:
        """Whether weights are codes with scales."""
        return self.bits <= 8

    @property
    def name(self) -> str:
        """As people call it."""
        return f"int{self.bits}" if self.quantised else "bfloat16" if self.bits == 16 else "float32"

    @property
    def zero(self) -> int:
        """The code of a zero weight: what MatMulNBits and GatherBlockQuantized assume for unsigned codes."""
        return 1 << (self.bits - 1)

    def bytes(self, weights: int) -> int:
        """Of that many weights, without scales."""
        return weights * self.bits // 8

    def scales(self, width: int) -> int:
        """How many scales a row of `width` weights has."""
        return 0 if not self.quantised else width // self.group if self.group else 1

    def stored_bits(self, scale_bits: int) -> float:
        """Bits per weight with its share of a scale of `scale_bits`, where rows are long."""
        return self.bits + (scale_bits / self.group if self.group else 0)

    def unpack(self, packed: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """The codes in bytes uint8[..., n]: uint8[..., n * 8 / bits]."""
        if self.bits == 8:
            return packed
        fields = [packed >> shift & (1 << self.bits) - 1 for shift in range(0, 8, self.bits)]
        return np.stack(fields, axis=-1).reshape(*packed.shape[:-1], -1)


INT4 = WeightFormat(4, 32)
INT8 = WeightFormat(8, 32)
BFLOAT16 = WeightFormat(16)
FLOAT32 = WeightFormat(32)

IN_GROUPS = {each.bits: each for each in (INT4, INT8)}
"""Codes with a scale for every 32 weights, by their bits."""

BY_ROW = {bits: WeightFormat(bits) for bits in (2, 4, 8)}
"""Codes with one scale for all weights of a row, by their bits."""
