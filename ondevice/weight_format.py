"""How the weights of a matrix are stored: what the exporter, the graphs' readers, the pack and the kernels share.

A width more is an instance here, a module beside `engines/simd/kernels/int4.py`, and a case of the tests.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class WeightFormat:
    """Codes of `bits` bits, packed low bits first; a weight is its scale times (code - zero).

    Attributes:
        name: for readers.
        bits: of a code, or of a weight where there are no codes.
        group: neighbouring weights of a row that share a scale; 0 where weights are plain numbers.
    """

    name: str
    bits: int
    group: int

    @property
    def quantised(self) -> bool:
        return self.group > 0

    @property
    def zero(self) -> int:
        """The code of a zero weight: what MatMulNBits and GatherBlockQuantized assume for unsigned codes."""
        return 1 << (self.bits - 1)

    def bytes(self, weights: int) -> int:
        """Of that many weights, without scales."""
        return weights * self.bits // 8

    def stored_bits(self, scale_bits: int) -> float:
        """Bits per weight with its share of a scale of `scale_bits`."""
        return self.bits + (scale_bits / self.group if self.quantised else 0)

    def unpack(self, packed: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """The codes in bytes uint8[..., n]: uint8[..., n * 8 / bits]."""
        if self.bits == 8:
            return packed
        fields = [packed >> shift & (1 << self.bits) - 1 for shift in range(0, 8, self.bits)]
        return np.stack(fields, axis=-1).reshape(*packed.shape[:-1], -1)


INT4 = WeightFormat("int4", 4, 32)
INT8 = WeightFormat("int8", 8, 32)
FLOAT32 = WeightFormat("float32", 32, 0)


IN_GROUPS = {each.bits: each for each in (INT4, INT8)}
"""Codes with a scale for every 32 weights, by their bits."""
