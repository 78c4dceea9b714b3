"""How a matrix reads its input: in which form, and by which kernel."""

from __future__ import annotations

from ondevice.engines.simd.graph.model import Matrix
from ondevice.engines.simd.kernels import instruction_set
from ondevice.engines.simd.kernels.codes import PLAIN, PRODUCTS
from ondevice.engines.simd.kernels.inputs import FLOATS_FORM, KIND, groups_form, steps_form


def input_form(matrix: Matrix) -> int:
    """The form of the activations that a matrix reads: see `kernels.inputs`."""
    if matrix.format.group:
        eight = matrix.format.bits == 8
        return groups_form(instruction_set.current().int8_zero if eight else matrix.format.zero)
    return steps_form(matrix.input_step) if matrix.format.quantised and matrix.input_step else FLOATS_FORM


def product_kind(matrix: Matrix) -> int:
    """The kind of its product: see `kernels.codes`."""
    return PRODUCTS.get((input_form(matrix) >> KIND, matrix.format.bits), PLAIN)
