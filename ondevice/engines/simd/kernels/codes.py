"""The widths of weights: what unpacks the codes of each, and the numbers that plans and kernels call the formats by.

What a kernel is made of lies in this folder, or its compiled code would be kept when it changes.
"""

from __future__ import annotations

from ondevice.engines.simd.kernels import int4, int8
from ondevice.weight_format import INT4, INT8

CODES = {4: int4.codes, 8: int8.codes}
"""By bits: the eight vectors of codes of a block."""

NUMBERS = {INT4: 0, INT8: 1}
INT4_NUMBER, INT8_NUMBER = range(2)
