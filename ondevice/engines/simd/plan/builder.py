"""Collects the steps of a plan, and turns matrices, constants and sizes into addresses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from ondevice.arrays import Float32Array
from ondevice.engines.simd.buffers import Buffers, float_bits
from ondevice.engines.simd.kernels.isa import instruction_set
from ondevice.engines.simd.kernels.matmul.sizes import (
    FLOATS_FORM,
    KIND,
    PLAIN,
    PRODUCTS,
    TILE,
    groups_form,
    steps_form,
)
from ondevice.engines.simd.kernels.steps.layouts import (
    WIDTH,
    Attend,
    AttendChosen,
    AttendLookedUp,
    Embed,
    Gated,
    LookUp,
    Project,
    Residual,
    Step,
    from_row,
    to_row,
)
from ondevice.engines.simd.pack_layout import Packed
from ondevice.engines.simd.tensor_files import Matrix


class PlanBuilder:
    """Collects the steps of one plan after another. The plans share constants and buffers.

    A `row_set` is `slots.ALL` or `slots.WANTED`, the rows that a step runs on. An argument named `reader` is the matrix
    that will read the activations; it determines the form in which they are written (`input_form`).

    Attributes:
        buffers: allocates the memory that steps read and write.
        places: places of the matrices in the pack; see `PackLayout.places`.
        most_rows: most rows of a forward, for which buffers are allocated.
        eps: the epsilon of the norms, as the bits of a float32.
    """

    def __init__(
        self,
        places: Mapping[Matrix, Packed],
        pack: NDArray[np.uint8],
        buffers: Buffers,
        most_rows: int,
        eps: float,
    ) -> None:
        self.buffers = buffers
        self.places = places
        self.most_rows = most_rows
        self.eps = float_bits(eps)
        self._pack = buffers.hold(pack)
        self._steps: list[Step] = []
        self._constants: dict[int, tuple[Float32Array, int]] = {}

    def plan(self) -> NDArray[np.int64]:
        """Return the collected steps, int64[steps, WIDTH], and begin the next plan. Layout: `kernels.steps.layouts`."""
        steps, self._steps = self._steps, []
        return _plan(steps)

    def constant(self, values: Float32Array) -> int:
        """The address of a copy of an array, such as a norm's weights; the same address for the same array."""
        if id(values) not in self._constants:
            self._constants[id(values)] = values, self.buffers.constant(values)
        return self._constants[id(values)][1]

    def add(self, step: Step) -> None:
        """Add a step that is already complete."""
        self._steps.append(step)

    def rows(self, width: int) -> int:
        """Allocate float32[most_rows, width]; returns the address.

        There is room for activations of that width in every form: the largest has the numbers themselves. Pages that
        a smaller form leaves alone take no memory.
        """
        return self.buffers.floats(self.most_rows * width)

    def table(self, table: Matrix) -> tuple[int, int, int, int, int]:
        """The fields `codes`, `scales`, `half`, `bits` and `group` of a step that reads rows of a table."""
        form, half = table.format, int(table.scales.dtype == np.float16)
        group = form.group or (table.width if form.quantised else 0)
        return self.buffers.hold(table.codes), self.buffers.hold(table.scales), half, form.bits, group

    def embed(self, table: Matrix, factor: float, out: int, stride: int) -> None:
        """out[row] = table[tokens[row]] * factor, float32[rows, table.width], with `stride` bytes from row to row."""
        self.add(Embed(out, stride, *self.table(table), table.width, float_bits(factor)))

    def quantize(
        self,
        row_set: int,
        h: int,
        width: int,
        activations: int,
        reader: Matrix,
        norm: Float32Array | None = None,
        out_slot: int = 0,
    ) -> None:
        """Write norm(h), float32[rows, width], or h if there is no norm, to `activations` in the form for `reader`.

        With a norm and an `out_slot`, norm(h) is also written as float32 to the address in that slot.
        """
        step = Residual(row_set, h, width, self.eps, activations=activations, form=input_form(reader))
        self.add(step if norm is None else step._replace(next_weight=self.constant(norm), out_slot=out_slot))

    def project(
        self,
        row_set: int,
        matrix: Matrix,
        activations: int,
        out: int = 0,
        *,
        out_slot: int = 0,
        stride: int = 0,
        cap: float | None = None,
        experts: int = 1,
        groups: int = 0,
    ) -> None:
        """out[rows, 16 * tiles] = activations @ matrix.T.

        Args:
            row_set: rows to run on.
            matrix: the matrix; for experts the first of `experts` consecutive matrices of the same size.
            activations: address of the input, in the form that `matrix` reads.
            out: address of the output, float32.
            out_slot: slot with the address of the output, instead of `out`.
            stride: bytes from a row of `out` to the next; 0 if rows are contiguous.
            cap: softcap of the output, or None.
            experts: number of experts, 1 for a matrix that all rows use.
            groups: address of `Choose.groups`: each group of rows is multiplied with the matrix of its expert.
        """
        tiles = self.places[matrix].tiles // experts
        self.add(
            Project(
                row_set,
                *self._matrix(matrix),
                activations=activations,
                form=input_form(matrix),
                blocks=self.places[matrix].blocks,
                tiles=tiles,
                out=out,
                out_slot=out_slot,
                stride=stride or 4 * TILE * tiles,
                cap=float_bits(cap or 0.0),
                groups=groups,
            )
        )

    def gated(
        self,
        row_set: int,
        matrix: Matrix,
        activations: int,
        out: int,
        reader: Matrix,
        factor: int = 0,
        factor_stride: int = 0,
        experts: int = 1,
        groups: int = 0,
    ) -> None:
        """gelu(gate) * up, written to `out` in the form that `reader` reads.

        Args:
            row_set, activations, experts, groups: as for `project`.
            matrix: gate and up packed as one matrix; gate alone if `factor` is given.
            out: address of the output.
            reader: the matrix that will read the output.
            factor: address of float32 rows that are used instead of up; 0 for none.
            factor_stride: bytes from a row of `factor` to the next.
        """
        self.add(
            Gated(
                row_set,
                *self._matrix(matrix),
                activations=activations,
                form=input_form(matrix),
                blocks=self.places[matrix].blocks,
                units=self.places[matrix].tiles // experts // (2 if factor else 4),
                out=out,
                out_form=input_form(reader),
                factor=factor,
                factor_stride=factor_stride,
                groups=groups,
            )
        )

    def _matrix(self, matrix: Matrix) -> tuple[int, int, int, int]:
        """The fields `product`, `tile_bytes`, `weights` and `scales` of a step that reads a matrix."""
        packed = self.places[matrix]
        return product_kind(matrix), packed.tile_bytes, self._pack + packed.weights, self._pack + packed.scales


def input_form(matrix: Matrix) -> int:
    """The form of the activations that a matrix reads; see `kernels.matmul.activations`."""
    if matrix.format.group:
        eight = matrix.format.bits == 8
        return groups_form(instruction_set.current().int8_zero if eight else matrix.format.zero)
    return steps_form(matrix.input_step) if matrix.format.quantised and matrix.input_step else FLOATS_FORM


def product_kind(matrix: Matrix) -> int:
    """The kind of a matrix's product with activations: a value of `kernels.matmul.formats.PRODUCTS`, or PLAIN."""
    return PRODUCTS.get((input_form(matrix) >> KIND, matrix.format.bits), PLAIN)


def exact_plan(plan: NDArray[np.int64]) -> NDArray[np.int64]:
    """A copy of a plan, int64[steps, WIDTH], with exact attention instead of lookups.

    It is used for forwards in which no row sees enough positions for a lookup. Both plans then compute the same bits,
    but exact attention also divides the positions of a row among threads if there are few rows. All other steps are the
    same and use the same memory.
    """
    steps = [step for step in map(from_row, plan) if not isinstance(step, LookUp)]
    return _plan([
        Attend(*step[: len(Attend._fields)]) if isinstance(step, AttendChosen | AttendLookedUp) else step
        for step in steps
    ])  # fmt: skip


def _plan(steps: Sequence[Step]) -> NDArray[np.int64]:
    plan = np.zeros((len(steps), WIDTH), np.int64)
    for row, step in zip(plan, steps, strict=True):
        words = to_row(step)
        row[: len(words)] = words
    return plan
