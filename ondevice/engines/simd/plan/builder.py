"""A forward as a flat list of steps, put together from layers. The one place where sizes become addresses.

Every address a kernel sees is made here, from arrays whose shapes `graph.matching` and the graph readers have checked.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ondevice.engines.simd.buffers import Buffers, float_bits
from ondevice.engines.simd.graph.model import DecoderLayer, Floats, Table
from ondevice.engines.simd.kernels import instruction_set
from ondevice.engines.simd.kernels.project import SCRATCH_BYTES
from ondevice.engines.simd.kernels.step_layouts import (
    WIDTH,
    Attend,
    Embed,
    Gated,
    Head,
    Project,
    Residual,
    Select,
    Step,
    to_row,
)
from ondevice.engines.simd.kernels.tile import ACTIVATION_BYTES, BLOCK, TILE
from ondevice.engines.simd.pack.layout import Packed, PackLayout

KIND_NUMBERS = {"full": 0, "sliding": 1}


@dataclass(frozen=True)
class PackedLayer:
    """Where a layer's matrices lie in the pack."""

    heads: Packed
    """Query, key and value, as far as the layer has them."""
    output: Packed
    gated: Packed
    down: Packed
    per_layer_gate: Packed | None
    per_layer_projection: Packed | None


def pack_layer(layout: PackLayout, layer: DecoderLayer) -> PackedLayer:
    attention, new, own = layer.attention, layer.attention.new, layer.per_layer
    heads = [attention.query]
    if new is not None:
        heads += [new.key] if new.value is None else [new.key, new.value]
    return PackedLayer(
        layout.add(*heads),
        layout.add(attention.output),
        layout.add_gated(layer.gate, layer.up),
        layout.add(layer.down),
        None if own is None else layout.add(own.gate),
        None if own is None else layout.add(own.projection),
    )


@dataclass(frozen=True)
class PerLayerInputs:
    """Per-layer embeddings of the rows of a set, with their projection added."""

    address: int
    """Of float32[rows, layers, size]."""
    layers: int
    size: int
    """Of a layer's part."""


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
        self._int8_zero = instruction_set.current().int8_zero
        self._steps: list[Step] = []

    def plan(self) -> NDArray[np.int64]:
        """int64[steps, WIDTH]: see `kernels.step_layouts`."""
        plan = np.zeros((len(self._steps), WIDTH), np.int64)
        for row, step in zip(plan, self._steps, strict=True):
            words = to_row(step)
            row[: len(words)] = words
        return plan

    def add(self, step: Step) -> None:
        """A step without sizes to work out."""
        self._steps.append(step)

    def activations(self, width: int) -> int:
        """Room for rows of quantised activations: the address of int8[most_rows, width] in blocks with scales."""
        return self.buffers.bytes(self.most_rows * width // BLOCK * ACTIVATION_BYTES)

    def rows(self, width: int) -> int:
        """Room for float32[most_rows, width]."""
        return self.buffers.floats(self.most_rows * width)

    def zero(self, bits: int) -> int:
        """The code of a zero weight in a matrix of `bits`, as quantised activations need it."""
        return 8 if bits == 4 else self._int8_zero

    def table(self, table: Table) -> tuple[int, int, int, int]:
        """The fields `codes`, `scales`, `half` and `bits` of the steps that read rows of a table."""
        half = int(table.scales.dtype == np.float16)
        return self.buffers.hold(table.codes), self.buffers.hold(table.scales), half, table.bits

    def embed(self, table: Table, factor: float, out: int, stride: int) -> None:
        """out[row] = table[tokens[row]] * factor, float32[rows, table.width] with `stride` bytes from row to row."""
        codes, scales, half, bits = self.table(table)
        self.add(Embed(out, stride, codes, scales, half, bits, table.width, float_bits(factor)))

    def quantize(self, row_set: int, h: int, width: int, activations: int, bits: int) -> None:
        """Quantise float32[rows, width] for a matrix of `bits`."""
        zero = self.zero(bits)
        self.add(Residual(row_set, h, width, self._eps, activations=activations, zero=zero))

    def norm_quantize(
        self, row_set: int, h: int, weight: Floats, activations: int, bits: int, out_slot: int = 0
    ) -> None:
        """Norm and quantise float32[rows, width]; with a slot, the normed rows go to the address there too."""
        self.add(
            Residual(
                row_set,
                h,
                len(weight),
                self._eps,
                next_weight=self.buffers.constant(weight),
                out_slot=out_slot,
                activations=activations,
                zero=self.zero(bits),
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
        bits: int = 4,
    ) -> None:
        """h = (h + norm(x)) * scalar, then quantise it, normed once more where `next_norm` is given."""
        constant = self.buffers.constant
        self.add(
            Residual(
                row_set,
                h,
                len(weight),
                self._eps,
                x=x,
                weight=constant(weight),
                scalar=0 if scalar is None else constant(np.array([scalar], np.float32)),
                next_weight=0 if next_norm is None else constant(next_norm),
                activations=activations,
                zero=self.zero(bits),
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
        cap: float | None = None,
    ) -> None:
        """out[rows, 16 * tiles] = activations @ matrix.T, with a softcap where one is given."""
        self.add(
            Project(
                row_set,
                *self._matrix(matrix),
                activations=activations,
                blocks=matrix.blocks,
                tiles=matrix.tiles,
                out=out,
                out_slot=out_slot,
                stride=4 * TILE * matrix.tiles,
                cap=float_bits(cap or 0.0),
            )
        )

    def gated(
        self,
        row_set: int,
        matrix: Packed,
        activations: int,
        out: int,
        bits: int,
        factor: int = 0,
        factor_stride: int = 0,
    ) -> None:
        """gelu(gate) * up, quantised for a matrix of `bits`; `factor` replaces up."""
        self.add(
            Gated(
                row_set,
                *self._matrix(matrix),
                activations=activations,
                blocks=matrix.blocks,
                units=matrix.tiles // (2 if factor else 4),
                out=out,
                zero=self.zero(bits),
                factor=factor,
                factor_stride=factor_stride,
            )
        )

    def select(self, source: int, out: int, width: int) -> None:
        """Copy the wanted ones of all rows, float32[rows, width]."""
        self.add(Select(source, out, width))

    @property
    def eps(self) -> int:
        """The bits of the norms' epsilon."""
        return self._eps

    def _matrix(self, matrix: Packed) -> tuple[int, int, int]:
        """The fields `bits`, `weights` and `scales` of the steps that read a matrix."""
        return matrix.bits, self._pack + matrix.weights, self._pack + matrix.scales


@dataclass(frozen=True)
class Workspace:
    """Addresses of the buffers that layers work in."""

    hidden: int
    """float32[rows, width], the residual stream."""
    scratch: int
    """float32[rows, widest projection]."""
    entry: int
    """Activations: the input of attention and of the feed-forward block."""
    inner: int
    """Activations: the input of their last projections."""


class NextInput(NamedTuple):
    """What reads a layer's output next, on the same rows."""

    norm: Floats
    """Its norm, float32[width]."""
    bits: int
    """Of the matrix that the normed rows are quantised for."""


@dataclass(frozen=True)
class LayerPlace:
    """What a layer runs on: its rows, buffers and cache."""

    row_set: int
    """`slots.ALL` or `slots.WANTED`."""
    work: Workspace
    cache: int
    """The place of its cache in a sequence's record."""
    per_layer: PerLayerInputs | None = None
    following: NextInput | None = None
    """None where nothing reads the output on the same rows."""


def build_layer(builder: PlanBuilder, layer: DecoderLayer, packed: PackedLayer, place: LayerPlace) -> None:
    """Add the steps of a layer, whose normed and quantised input is in `place.work.entry`.

    Args:
        builder: collects the steps.
        layer: its sizes and norms.
        packed: its matrices.
        place: its rows, buffers and cache.
    """
    row_set, work, following = place.row_set, place.work, place.following
    _attention(builder, layer, packed, place)
    own = layer.per_layer
    builder.residual(
        row_set, work.hidden, work.scratch, layer.post_attention_norm,
        next_norm=layer.pre_norm, activations=work.entry, bits=layer.gate.bits,
    )  # fmt: skip
    builder.gated(row_set, packed.gated, work.entry, work.inner, layer.down.bits)
    builder.project(row_set, packed.down, work.inner, work.scratch)
    after, activations, bits = (None, 0, 4) if following is None else (following.norm, work.entry, following.bits)
    if own is None:
        builder.residual(
            row_set, work.hidden, work.scratch, layer.post_norm,
            scalar=layer.scalar, next_norm=after, activations=activations, bits=bits,
        )  # fmt: skip
        return
    inputs = place.per_layer
    assert inputs is not None
    assert packed.per_layer_gate is not None
    assert packed.per_layer_projection is not None
    builder.residual(row_set, work.hidden, work.scratch, layer.post_norm, activations=work.entry, bits=own.gate.bits)
    factor, stride = inputs.address + 4 * own.index * inputs.size, 4 * inputs.layers * inputs.size
    builder.gated(row_set, packed.per_layer_gate, work.entry, work.inner, own.projection.bits, factor, stride)
    builder.project(row_set, packed.per_layer_projection, work.inner, work.scratch)
    builder.residual(
        row_set, work.hidden, work.scratch, own.norm,
        scalar=layer.scalar, next_norm=after, activations=activations, bits=bits,
    )  # fmt: skip


def _attention(builder: PlanBuilder, layer: DecoderLayer, packed: PackedLayer, place: LayerPlace) -> None:
    attention, new = layer.attention, layer.attention.new
    row_set, work = place.row_set, place.work
    kind, cache = KIND_NUMBERS[attention.kind], 2 * place.cache
    builder.project(row_set, packed.heads, work.entry, work.scratch)
    stride = 4 * TILE * packed.heads.tiles
    heads = (attention.query_heads, attention.kv_heads, attention.head_dim)
    constant = builder.buffers.constant
    key_norm = value_norm = value = 0
    if new is not None:
        key_norm, value_norm = constant(new.key_norm), constant(new.value_norm)
        value = (attention.query_heads + (0 if new.value is None else attention.kv_heads)) * attention.head_dim
    query_norm = constant(attention.query_norm)
    builder.add(
        Head(
            row_set,
            work.scratch,
            stride,
            *heads,
            query_norm=query_norm,
            key_norm=key_norm,
            value_norm=value_norm,
            value=value,
            kind=kind,
            cache=cache,
            eps=builder.eps,
        )
    )
    zero = builder.zero(attention.output.bits)
    builder.add(
        Attend(row_set, work.scratch, stride, *heads, kind=kind, cache=cache, activations=work.inner, zero=zero)
    )
    builder.project(row_set, packed.output, work.inner, work.scratch)


def widest(layers: Sequence[DecoderLayer], width: int) -> tuple[int, int]:
    """The widest projection and the widest inner row of some layers."""
    outer, inner = width, width
    for layer in layers:
        attention = layer.attention
        heads = attention.query_heads + (0 if attention.new is None else 2 * attention.kv_heads)
        outer = max(outer, heads * attention.head_dim)
        inner = max(inner, layer.down.width, attention.output.width)
        if layer.per_layer is not None:
            inner = max(inner, layer.per_layer.projection.width)
    return outer, inner


def scratch_bytes(layers: Sequence[DecoderLayer]) -> int:
    """Working memory of a thread: `kernels.project.gated`'s tiles, or a head."""
    return max(SCRATCH_BYTES, *(4 * layer.attention.head_dim for layer in layers))
