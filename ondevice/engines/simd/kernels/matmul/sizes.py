"""Sizes and numbers that engine and kernels share about packed matrices and activations; it imports no compiler.

The layouts themselves are described in `formats` (weights), `tiles` (epilogues) and `activations`.
"""

from __future__ import annotations

import numpy as np

from ondevice.bundle_format.weight_format import BY_ROW, INT4, INT4_AFFINE, INT8

TILE = 16
"""Output rows of a tile."""
BLOCK = 32
"""Neighbouring weights of a row, or activations; in group formats they share a scale."""

GROUPS4, GROUPS8, GROUPS4_AFFINE, STEPS2, STEPS4, STEPS8, PLAIN = range(7)
"""Kinds of products: the form of the activations (GROUPS or STEPS, see `activations`) and the bits of a weight. Weights
of GROUPS4_AFFINE have a minimum per block. PLAIN multiplies float32 rows with weights of any width."""

IN_GROUPS = (GROUPS4, GROUPS8, GROUPS4_AFFINE)
"""The kinds whose weights have a scale for every 32."""

ACTIVATION_BYTES = 44
"""Bytes of a quantised block of activations: 32 int8 `q`, int32 `start` or float32 `sum`, float32 `scale`, `shift`."""
START, SCALE, SHIFT = 32, 36, 40
"""Offsets of `start`, or `sum`, and of `scale` and `shift` in such a block."""

ORIGIN, ORIGIN_BITS = np.float32(1.5 * 2**23), 0x4B400000
"""The float32 at which integer dot products are summed in the bits of floats: see `tiles`."""

PAIRED_ROWS = 4
"""Fewest rows of a group that lie in pairs, on instruction sets that multiply pairs of rows. Three rows would take 1.07
times as many instructions in pairs."""
PAIRED_BYTES = 56
"""Bytes of a row's quantised block on these instruction sets, whether it lies in a pair or not."""
PAIR_START, PAIR_SCALE, PAIR_SHIFT = 64, 80, 96
"""Offsets of `start`, `scale` and `shift` of a pair of rows."""

MOST_ROWS = 8
"""Most rows of activations in one product. 12 or 16 are no faster: their sums do not fit in the registers."""
SCRATCH_BYTES = MOST_ROWS * 4 * TILE * 4
"""Working memory of `gated` in bytes, per thread: float32, four tiles of eight rows."""

EPILOGUE_BYTES = 2 * TILE * 4
"""Bytes of a tile's epilogue, float32[2][16]: a factor and an output step for each of its rows.

out = sum * factor; then, if the step is not 0, out = clamp(round(out / step), -128, 127) * step.
"""

# The form of activations, a number: its layout, and below that, in KIND bits, what the layout needs.

GROUPS, STEPS, FLOATS = range(3)
KIND = 32
"""Number of bits of a form below its layout."""

SUMS = 256
"""In GROUPS, in place of the code of a zero weight: blocks have `sum` instead of `start`."""

PRODUCTS = {
    (GROUPS, INT4): GROUPS4,
    (GROUPS, INT8): GROUPS8,
    (GROUPS, INT4_AFFINE): GROUPS4_AFFINE,
    (STEPS, BY_ROW[2]): STEPS2,
    (STEPS, BY_ROW[4]): STEPS4,
    (STEPS, BY_ROW[8]): STEPS8,
}
"""(layout of the activations, format of the weights) -> kind of product. All others are PLAIN."""


def groups_form(zero: int) -> int:
    """The form for a matrix with a scale for every 32 weights, in which the code `zero` is a zero weight.

    `zero` is SUMS for a matrix with minimums.
    """
    return GROUPS << KIND | zero


def steps_form(step: float) -> int:
    """The form for a matrix whose input has a static scale, a float32."""
    return STEPS << KIND | int(np.float32(step).view(np.uint32))


FLOATS_FORM = FLOATS << KIND
