"""Collects the steps of a forward. The one place where sizes become addresses.

Every address a kernel sees is made here, from arrays whose shapes `graph.matching` and the graph readers have checked.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from ondevice.engines.simd.buffers import Buffers, float_bits
from ondevice.engines.simd.graph.model import Floats, Matrix, Table
from ondevice.engines.simd.kernels.inputs import row_bytes
from ondevice.engines.simd.kernels.projection_layouts import Gated, Project
from ondevice.engines.simd.kernels.row_layouts import Embed, Residual, Select
from ondevice.engines.simd.kernels.sizes import BLOCK, TILE
from ondevice.engines.simd.kernels.step_layouts import WIDTH, Step, to_row
from ondevice.engines.simd.pack.layout import Packed
from ondevice.engines.simd.plan.reading import input_form, product_kind


class PlanBuilder:
    """Collects steps.

    Attributes:
        buffers: what the addresses point into.
    """

    def __init__(self, pack: NDArray[np.uint8], buffers: Buffers, most_rows: int, eps: float) -> None:
        self.buffers = buffers
        self.most_rows = most_rows
        self._pack = buffers.hold(pack)
        self._eps = float_bits(eps)
        self._steps: list[Step] = []
        self._constants: dict[int, tuple[Floats, int]] = {}
        self._scalars: dict[float, int] = {}
        self._nothing: dict[int, int] = {}

    def plan(self) -> NDArray[np.int64]:
        """The steps so far, int64[steps, WIDTH]: see `kernels.step_layouts`. The next plan begins."""
        plan = np.zeros((len(self._steps), WIDTH), np.int64)
        for row, step in zip(plan, self._steps, strict=True):
            words = to_row(step)
            row[: len(words)] = words
        self._steps = []
        return plan

    def constant(self, values: Floats) -> int:
        """The address of a copy of a norm's weights, the same in every plan."""
        if id(values) not in self._constants:
            self._constants[id(values)] = values, self.buffers.constant(values)
        return self._constants[id(values)][1]

    def nothing(self, width: int) -> int:
        """The address of float32[most_rows, width], zeros that nobody writes to."""
        if width not in self._nothing:
            self._nothing[width] = self.rows(width)
        return self._nothing[width]

    def add(self, step: Step) -> None:
        """A step without sizes to work out."""
        self._steps.append(step)

    def activations(self, width: int, readers: Iterable[Matrix]) -> int:
        """The address of room for rows of activations [most_rows, width], in the forms of all that will read them."""
        widest = max(row_bytes(input_form(reader), width // BLOCK) for reader in readers)
        return self.buffers.bytes(self.most_rows * widest)

    def rows(self, width: int) -> int:
        """Room for float32[most_rows, width]."""
        return self.buffers.floats(self.most_rows * width)

    def table(self, table: Table) -> tuple[int, int, int, int, int]:
        """The fields `codes`, `scales`, `half`, `bits` and `group` of the steps that read rows of a table."""
        half = int(table.scales.dtype == np.float16)
        count = table.format.scales(table.width)
        group = table.width // count if count else 0
        return self.buffers.hold(table.codes), self.buffers.hold(table.scales), half, table.format.bits, group

    def embed(self, table: Table, factor: float, out: int, stride: int) -> None:
        """out[row] = table[tokens[row]] * factor, float32[rows, table.width] with `stride` bytes from row to row."""
        self.add(Embed(out, stride, *self.table(table), table.width, float_bits(factor)))

    def quantize(self, row_set: int, h: int, width: int, activations: int, reader: Matrix) -> None:
        """Give float32[rows, width] to a matrix."""
        self.add(Residual(row_set, h, width, self._eps, activations=activations, form=input_form(reader)))

    def norm_quantize(
        self, row_set: int, h: int, weight: Floats, activations: int, reader: Matrix, out_slot: int = 0
    ) -> None:
        """Norm and quantise float32[rows, width]; with a slot, the normed rows go to the address there too."""
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
        weight: Floats,
        *,
        scalar: float | None = None,
        next_norm: Floats | None = None,
        activations: int = 0,
        reader: Matrix | None = None,
    ) -> None:
        """h = (h + norm(x)) * scalar, then quantise it, normed once more where `next_norm` is given."""
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
        matrix: Packed,
        activations: int,
        out: int = 0,
        *,
        out_slot: int = 0,
        stride: int = 0,
        cap: float | None = None,
        groups: int = 0,
    ) -> None:
        """out[rows, 16 * tiles] = activations @ matrix.T, with a softcap where one is given.

        `stride` is the bytes from a row of `out` to the next, where they are not side by side.
        With `groups`, rows are multiplied with the matrices of their groups, of which this is the first.
        """
        self.add(
            Project(
                row_set,
                *self._matrix(matrix),
                activations=activations,
                form=input_form(matrix.matrix),
                blocks=matrix.blocks,
                tiles=matrix.tiles,
                out=out,
                out_slot=out_slot,
                stride=stride or 4 * TILE * matrix.tiles,
                cap=float_bits(cap or 0.0),
                groups=groups,
            )
        )

    def gated(
        self,
        row_set: int,
        matrix: Packed,
        activations: int,
        out: int,
        reader: Matrix,
        factor: int = 0,
        factor_stride: int = 0,
        groups: int = 0,
    ) -> None:
        """gelu(gate) * up, for the matrix `reader`; `factor` replaces up, and `groups` are as in `project`."""
        self.add(
            Gated(
                row_set,
                *self._matrix(matrix),
                activations=activations,
                form=input_form(matrix.matrix),
                blocks=matrix.blocks,
                units=matrix.tiles // (2 if factor else 4),
                out=out,
                out_form=input_form(reader),
                factor=factor,
                factor_stride=factor_stride,
                groups=groups,
            )
        )

    def select(self, source: int, out: int, width: int) -> None:
        """Copy the wanted ones of all rows, float32[rows, width]."""
        self.add(Select(source, out, width))

    @property
    def eps(self) -> int:
        """The bits of the norms' epsilon."""
        return self._eps

    def _scalar(self, value: float) -> int:
        if value not in self._scalars:
            self._scalars[value] = self.buffers.constant(np.array([value], np.float32))
        return self._scalars[value]

    def _matrix(self, matrix: Packed) -> tuple[int, int, int, int]:
        """The fields `product`, `tile_bytes`, `weights` and `scales` of the steps that read a matrix."""
        return product_kind(matrix.matrix), matrix.tile_bytes, self._pack + matrix.weights, self._pack + matrix.scales
