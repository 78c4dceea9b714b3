"""Collects the steps of a plan, and turns sizes into addresses.

Kernels do not check bounds, so this is the only file that computes their addresses. It computes them from arrays whose
shapes `ondevice.bundle_format.tensor_table` has checked.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from ondevice.arrays import Float32Array
from ondevice.engines.simd.buffers import Buffers, float_bits
from ondevice.engines.simd.kernels.isa import instruction_set
from ondevice.engines.simd.kernels.matmul.sizes import (
    BLOCK,
    FLOATS_FORM,
    KIND,
    PLAIN,
    PRODUCTS,
    TILE,
    groups_form,
    row_bytes,
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
    Select,
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
        self._pack = buffers.hold(pack)
        self._eps = float_bits(eps)
        self._steps: list[Step] = []
        self._constants: dict[int, tuple[Float32Array, int]] = {}
        self._scalars: dict[float, int] = {}
        self._nothing: dict[int, int] = {}

    def plan(self) -> NDArray[np.int64]:
        """Return the collected steps, int64[steps, WIDTH], and begin the next plan. Layout: `kernels.steps.layouts`."""
        plan = np.zeros((len(self._steps), WIDTH), np.int64)
        for row, step in zip(plan, self._steps, strict=True):
            words = to_row(step)
            row[: len(words)] = words
        self._steps = []
        return plan

    def constant(self, values: Float32Array) -> int:
        """The address of a copy of an array, such as a norm's weights; the same address for the same array."""
        if id(values) not in self._constants:
            self._constants[id(values)] = values, self.buffers.constant(values)
        return self._constants[id(values)][1]

    def nothing(self, width: int) -> int:
        """The address of float32[most_rows, width], zeros that no step writes to."""
        if width not in self._nothing:
            self._nothing[width] = self.rows(width)
        return self._nothing[width]

    def add(self, step: Step) -> None:
        """Add a step that is already complete."""
        self._steps.append(step)

    def activations(self, width: int, readers: Iterable[Matrix]) -> int:
        """Allocate activations [most_rows, width] in the widest form that `readers` need; returns the address."""
        widest = max(row_bytes(input_form(reader), width // BLOCK) for reader in readers)
        return self.buffers.bytes(self.most_rows * widest)

    def rows(self, width: int) -> int:
        """Allocate float32[most_rows, width]; returns the address."""
        return self.buffers.floats(self.most_rows * width)

    def table(self, table: Matrix) -> tuple[int, int, int, int, int]:
        """The fields `codes`, `scales`, `half`, `bits` and `group` of a step that reads rows of a table."""
        half = int(table.scales.dtype == np.float16)
        count = table.format.scales(table.width)
        group = table.width // count if count else 0
        return self.buffers.hold(table.codes), self.buffers.hold(table.scales), half, table.format.bits, group

    def embed(self, table: Matrix, factor: float, out: int, stride: int) -> None:
        """out[row] = table[tokens[row]] * factor, float32[rows, table.width], with `stride` bytes from row to row."""
        self.add(Embed(out, stride, *self.table(table), table.width, float_bits(factor)))

    def quantize(self, row_set: int, h: int, width: int, activations: int, reader: Matrix) -> None:
        """Write h, float32[rows, width], to `activations` in the form that `reader` reads."""
        self.add(Residual(row_set, h, width, self._eps, activations=activations, form=input_form(reader)))

    def norm_quantize(
        self, row_set: int, h: int, weight: Float32Array, activations: int, reader: Matrix, out_slot: int = 0
    ) -> None:
        """Write norm(h), float32[rows, len(weight)], to `activations` in the form that `reader` reads.

        With `out_slot`, norm(h) is also written as float32 to the address in that slot.
        """
        self.add(
            Residual(
                row_set,
                h,
                len(weight),
                self._eps,
                next_weight=self.constant(weight),
                out_slot=out_slot,
                activations=activations,
                form=input_form(reader),
            )
        )

    def residual(
        self,
        row_set: int,
        h: int,
        x: int,
        weight: Float32Array,
        *,
        scalar: float | None = None,
        next_norm: Float32Array | None = None,
        activations: int = 0,
        reader: Matrix | None = None,
    ) -> None:
        """h = (h + norm(x)) * scalar; then write h to `activations` in the form that `reader` reads.

        With `next_norm`, the activations are next_norm(h). Without `reader`, none are written.
        """
        constant = self.constant
        self.add(
            Residual(
                row_set,
                h,
                len(weight),
                self._eps,
                x=x,
                weight=constant(weight),
                scalar=0 if scalar is None else self._scalar(scalar),
                next_weight=0 if next_norm is None else constant(next_norm),
                activations=activations,
                form=0 if reader is None else input_form(reader),
            )
        )

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
        packed = self._packed(matrix, experts)
        self.add(
            Project(
                row_set,
                *self._matrix(packed),
                activations=activations,
                form=input_form(matrix),
                blocks=packed.blocks,
                tiles=packed.tiles,
                out=out,
                out_slot=out_slot,
                stride=stride or 4 * TILE * packed.tiles,
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
            row_set: rows to run on.
            matrix: gate and up packed as one matrix; gate alone if `factor` is given.
            activations: address of the input, in the form that `matrix` reads.
            out: address of the output.
            reader: the matrix that will read the output.
            factor: address of float32 rows that are used instead of up; 0 for none.
            factor_stride: bytes from a row of `factor` to the next.
            experts, groups: as for `project`.
        """
        packed = self._packed(matrix, experts)
        self.add(
            Gated(
                row_set,
                *self._matrix(packed),
                activations=activations,
                form=input_form(matrix),
                blocks=packed.blocks,
                units=packed.tiles // (2 if factor else 4),
                out=out,
                out_form=input_form(reader),
                factor=factor,
                factor_stride=factor_stride,
                groups=groups,
            )
        )

    def select(self, source: int, out: int, width: int) -> None:
        """Copy the wanted rows of float32[T, width] at `source` to float32[R, width] at `out`."""
        self.add(Select(source, out, width))

    @property
    def eps(self) -> int:
        """The epsilon of the norms, as the bits of a float32."""
        return self._eps

    def _scalar(self, value: float) -> int:
        if value not in self._scalars:
            self._scalars[value] = self.buffers.constant(np.array([value], np.float32))
        return self._scalars[value]

    def _packed(self, matrix: Matrix, experts: int) -> Packed:
        """The place of a matrix; for experts, the place of the first of `experts` that were packed as one matrix."""
        packed = self.places[matrix]
        return packed if experts == 1 else replace(packed, tiles=packed.tiles // experts)

    def _matrix(self, packed: Packed) -> tuple[int, int, int, int]:
        """The fields `product`, `tile_bytes`, `weights` and `scales` of a step that reads a matrix."""
        return product_kind(packed.matrix), packed.tile_bytes, self._pack + packed.weights, self._pack + packed.scales


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
    steps = [from_row(words) for words in plan]
    rows = []
    for step in steps:
        if isinstance(step, AttendChosen | AttendLookedUp):
            rows.append(to_row(Attend(*step[: len(Attend._fields)])))
        elif not isinstance(step, LookUp):
            rows.append(to_row(step))
    exact = np.zeros((len(rows), WIDTH), np.int64)
    for words, row in zip(exact, rows, strict=True):
        words[: len(row)] = row
    return exact
