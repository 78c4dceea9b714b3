"""Collects the steps of a plan, and turns matrices, constants and sizes into addresses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ondevice.arrays import Float32Array
from ondevice.bundle_format.decoder import Activation
from ondevice.engines.simd.buffers import Buffers, float_bits
from ondevice.engines.simd.kernels.contract.instruction_sets import instruction_set
from ondevice.engines.simd.kernels.contract.matrices import (
    FLOATS_FORM,
    FORM_SHIFT,
    PLAIN,
    PRODUCTS,
    SUMS,
    TILE,
    groups_form,
    steps_form,
)
from ondevice.engines.simd.kernels.contract.steps import (
    CLAMPED,
    GELU,
    SILU,
    WIDTH,
    Attend,
    Embed,
    Gated,
    KernelStep,
    LookUp,
    PackedMatrix,
    Project,
    Residual,
    Table,
    to_row,
)
from ondevice.engines.simd.pack_layout import Packed
from ondevice.engines.simd.tensor_files import Matrix
from ondevice.native.features import native_features

FUNCTIONS: dict[Activation, int] = {"gelu_tanh": GELU, "silu": SILU, "clamped_swiglu": CLAMPED}
"""Activation of a gated product -> its number in steps."""


@dataclass(frozen=True, eq=False)
class Plan:
    """The steps of a plan in two forms, both int64[steps, WIDTH]. Layout: `contract.steps`.

    steps : with lookup attention where it was chosen
    exact : with exact attention, for forwards in which no row sees enough positions for a lookup. Both compute the same
        bits then, but exact attention also divides the positions of a row among threads if there are few rows
    """

    steps: NDArray[np.int64]
    exact: NDArray[np.int64]

    @classmethod
    def of(cls, steps: Sequence[KernelStep]) -> Plan:
        """The plan of these steps. All steps but those of lookup attention are the same in both forms."""
        exact = [
            Attend(*step[: Attend._fields.index("window")]) if isinstance(step, Attend) else step
            for step in steps
            if not isinstance(step, LookUp)
        ]
        return cls(_words(steps), _words(exact))


def _words(steps: Sequence[KernelStep]) -> NDArray[np.int64]:
    return np.array([to_row(step) for step in steps], np.int64).reshape(-1, WIDTH)


class PlanBuilder:
    """Collects the steps of one plan after another. The plans share constants and buffers.

    A `row_set` is `slots.ALL` or `slots.WANTED`, the rows that a step runs on. An argument named `reader` is the
    matrix that will read the activations; it determines the form in which they are written (`input_form`).

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
        self._steps: list[KernelStep] = []
        self._constants: dict[int, tuple[Float32Array, int]] = {}

    def plan(self) -> Plan:
        """Return the collected steps, and begin the next plan."""
        steps, self._steps = self._steps, []
        return Plan.of(streamed(steps) if pays_to_stream(weight_bytes(steps)) else steps)

    def constant(self, values: Float32Array) -> int:
        """The address of a copy of an array, such as a norm's weights; the same address for the same array."""
        if id(values) not in self._constants:
            self._constants[id(values)] = values, self.buffers.constant(values)
        return self._constants[id(values)][1]

    def add(self, step: KernelStep) -> None:
        """Add a step that is already complete."""
        self._steps.append(step)

    def rows(self, width: int) -> int:
        """Allocate float32[most_rows, width]; returns the address.

        There is room for activations of that width in every form: the largest has the numbers themselves. Pages that
        a smaller form leaves alone take no memory.
        """
        return self.buffers.floats(self.most_rows * width)

    def table(self, table: Matrix) -> Table:
        """A table as steps read its rows."""
        form, half, hold = table.format, int(table.scales.dtype == np.float16), self.buffers.hold
        group = form.group or (table.width if form.quantised else 0)
        minimums = 0 if table.minimums is None else hold(table.minimums)
        numbers = hold(table.codes), hold(table.scales), minimums
        return Table(*numbers, half, form.bits, int(form.table), group, table.width)

    def embed(self, table: Matrix, factor: float, out: int, stride: int) -> None:
        """out[row] = table[tokens[row]] * factor, float32[rows, table.width], with `stride` bytes from row to row."""
        self.add(Embed(out, stride, self.table(table), float_bits(factor)))

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
        bias: Float32Array | None = None,
    ) -> None:
        """out[rows, 16 * tiles] = activations @ matrix.T + bias.

        Args:
            row_set, activations, out, out_slot, stride, groups: see `Project`; a stride of 0 if rows are contiguous.
            matrix: the matrix; for experts the first of `experts` consecutive matrices of the same size.
            cap: softcap of the output, or None.
            experts: number of experts, 1 for a matrix that all rows use.
            bias: float32[experts, 16 * tiles], or None.
        """
        tiles = self.places[matrix].tiles // experts
        self.add(
            Project(
                row_set,
                self._packed(matrix, bias),
                activations,
                input_form(matrix),
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
        activation: Activation,
        factor: int = 0,
        factor_stride: int = 0,
        experts: int = 1,
        groups: int = 0,
        bias: Float32Array | None = None,
    ) -> None:
        """activation(gate) * up, written to `out` in the form that `reader` reads.

        Args:
            row_set, activations, out, factor, factor_stride, groups: see `Gated`.
            matrix: gate and up packed as one matrix; gate alone if `factor` is given; for experts as for `project`.
            reader: the matrix that will read the output.
            activation: the function of the gate.
            experts: as for `project`.
            bias: float32[experts, 16 * tiles] in the order of the tiles, or None.
        """
        self.add(
            Gated(
                row_set,
                self._packed(matrix, bias),
                activations,
                input_form(matrix),
                units=self.places[matrix].tiles // experts // (2 if factor else 4),
                out=out,
                out_form=input_form(reader),
                factor=factor,
                factor_stride=factor_stride,
                function=FUNCTIONS[activation],
                groups=groups,
            )
        )

    def _packed(self, matrix: Matrix, bias: Float32Array | None = None) -> PackedMatrix:
        packed = self.places[matrix]
        weights, scales = self._pack + packed.weights, self._pack + packed.scales
        added = 0 if bias is None else self.constant(bias)
        sizes = packed.tile_bytes, weights, scales, packed.blocks
        return PackedMatrix(product_kind(matrix), *sizes, added, streamed=0)


CACHED = 64 << 20
"""Bytes of weights that the caches of two cores may still have from one forward to the next."""


def weight_bytes(steps: Sequence[KernelStep]) -> int:
    """Bytes of weights that some steps read, without scales; of experts those of one, the least that is read."""
    products = [step for step in steps if isinstance(step, Project | Gated)]
    tiles = (step.tiles() if isinstance(step, Gated) else step.tiles for step in products)
    return sum(step.matrix.tile_bytes * count for step, count in zip(products, tiles, strict=True))


def streamed(steps: Sequence[KernelStep]) -> list[KernelStep]:
    """The same steps with streamed matrices: see `contract.steps.PackedMatrix`."""
    return [
        step._replace(matrix=step.matrix._replace(streamed=1)) if isinstance(step, Project | Gated) else step
        for step in steps
    ]


def pays_to_stream(size: int) -> bool:
    """Whether steps that read `size` bytes of weights, each of them once, should stream them.

    The last cache of AMD's CPUs is filled with what falls out of the one before. So weights that pass level 2 are
    written to level 3, where none is read again. Without that, at E2B's shape forwards of one and two rows take 0.85
    and 0.95 of the time where two cores read 58 GB/s, 0.97 and 0.96 where they read 35 (AMD Zen 4,
    `benchmarks.speed.streaming`). Not elsewhere: on an Intel Xeon of 2024 weights that went to level 1 alone took an
    eighth more time, as its level 1 has room for fewer requests than its memory can answer.
    """
    return size > CACHED and "sse4a" in native_features()


def input_form(matrix: Matrix) -> int:
    """The form of the activations that a matrix reads; see `kernels.activations`."""
    if matrix.format.affine:
        return groups_form(SUMS)
    if matrix.format.group:
        bytes8 = matrix.format.bits == 8 or matrix.format.table
        return groups_form(instruction_set().int8_zero if bytes8 else matrix.format.zero)
    return steps_form(matrix.input_step) if matrix.format.quantised and matrix.input_step else FLOATS_FORM


def product_kind(matrix: Matrix) -> int:
    """The kind of a matrix's product with activations: a value of `matrices.PRODUCTS`, or PLAIN."""
    return PRODUCTS.get((input_form(matrix) >> FORM_SHIFT, matrix.format), PLAIN)
