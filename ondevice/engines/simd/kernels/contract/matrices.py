"""Sizes of packed matrices, kinds of products, and the forms of activations.

The layouts are described in `formats` (weights), `epilogue_tiles` and `activations`.
"""

from __future__ import annotations

import numpy as np

from ondevice.bundle_format.weight_format import BY_ROW, INT4, INT4_AFFINE, INT4_TABLE, INT8, MXFP4
from ondevice.engines.simd.kernels.contract.instruction_sets import INSTRUCTION_SETS

TILE = 16
"""Output rows of a tile."""
BLOCK = 32
"""Neighbouring weights of a row, or activations; in group formats they share a scale."""

GROUPS4, GROUPS8, GROUPS4_AFFINE, GROUPS4_TABLE, GROUPS4_E2M1, STEPS2, STEPS4, STEPS8, PLAIN = range(9)
"""Kinds of products: the form of the activations (GROUPS or STEPS, see `activations`) and the bits of a weight. Weights
of GROUPS4_AFFINE have a minimum per block, codes of GROUPS4_TABLE and GROUPS4_E2M1 are looked up. PLAIN multiplies
float32 rows with weights of any width."""

PAIRED_BYTES = 56
"""Most bytes of a row's quantised block: see `activations.ROW_BYTES`."""

SCRATCH_BYTES = max(each.group_rows for each in INSTRUCTION_SETS.values()) * 4 * TILE * 4
"""Working memory of `gated` in bytes, per thread: float32, four tiles of a group's rows."""

STATE_COLUMNS = 32
"""Columns of a head's state that are a unit of work of `recur`."""

EPILOGUE_BYTES = 2 * TILE * 4
"""Bytes of a tile's epilogue, float32[2][16]: a factor and an output step for each of its rows.

out = sum * factor; then, if the step is not 0, out = clamp(round(out / step), -128, 127) * step.
"""

# The form of activations, a number: its layout, and below that, in FORM_SHIFT bits, what the layout needs.

GROUPS, STEPS, FLOATS = range(3)
FORM_SHIFT = 32
"""Number of bits of a form below its layout."""

SUMS = 256
"""In GROUPS, in place of the code of a zero weight: blocks have `sum` instead of `start`."""

PRODUCTS = {
    (GROUPS, INT4): GROUPS4,
    (GROUPS, INT8): GROUPS8,
    (GROUPS, INT4_AFFINE): GROUPS4_AFFINE,
    (GROUPS, INT4_TABLE): GROUPS4_TABLE,
    (GROUPS, MXFP4): GROUPS4_E2M1,
    (STEPS, BY_ROW[2]): STEPS2,
    (STEPS, BY_ROW[4]): STEPS4,
    (STEPS, BY_ROW[8]): STEPS8,
}
"""(layout of the activations, format of the weights) -> kind of product. All others are PLAIN."""


def groups_form(zero: int) -> int:
    """The form for a matrix with a scale for every 32 weights, in which the code `zero` is a zero weight.

    `zero` is SUMS for a matrix with minimums.
    """
    return GROUPS << FORM_SHIFT | zero


def steps_form(step: float) -> int:
    """The form for a matrix whose input has a static scale, a float32."""
    return STEPS << FORM_SHIFT | int(np.float32(step).view(np.uint32))


FLOATS_FORM = FLOATS << FORM_SHIFT
