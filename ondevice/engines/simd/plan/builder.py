"""A forward as a flat list of steps, put together from layers. The one place where sizes become addresses.

Every address a kernel sees is made here, from arrays whose shapes `graph.matching` and the graph readers have checked.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ondevice.engines.simd.buffers import Buffers, float_bits
from ondevice.engines.simd.graph.model import DecoderLayer, Floats, Table
from ondevice.engines.simd.kernels import instruction_set, steps
from ondevice.engines.simd.kernels.project import SCRATCH_BYTES
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
class Slices:
    """Per-layer embeddings of the rows of a set: address of float32[rows, layers * size]."""

    address: int
    layers: int
    size: int


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
        self._steps: list[tuple[int, ...]] = []

    def plan(self) -> NDArray[np.int64]:
        """int64[steps, WIDTH]"""
        plan = np.zeros((len(self._steps), steps.WIDTH), np.int64)
        for index, step in enumerate(self._steps):
            plan[index, : len(step)] = step
        return plan

    def records(self, width: int) -> int:
        """Room for quantised rows."""
        return self.buffers.bytes(self.most_rows * width // BLOCK * ACTIVATION_BYTES)

    def rows(self, width: int) -> int:
        """Room for float32 rows."""
        return self.buffers.floats(self.most_rows * width)

    def zero(self, bits: int) -> int:
        """The code of a zero weight, as quantised activations need it."""
        return 8 if bits == 4 else self._int8_zero

    def embed(self, table: Table, factor: float, out: int, stride: int) -> None:
        codes, scales = self.buffers.hold(table.codes), self.buffers.hold(table.scales)
        half = int(table.scales.dtype == np.float16)
        self._add(steps.EMBED, out, stride, codes, scales, half, table.bits, table.width, float_bits(factor))

    def quantize(self, row_set: int, h: int, width: int, records: int, bits: int) -> None:
        self._add(steps.RESIDUAL, row_set, h, width, self._eps, 0, 0, 0, 0, 0, records, self.zero(bits))

    def norm_quantize(self, row_set: int, h: int, weight: Floats, records: int, bits: int, out_slot: int = 0) -> None:
        """Norm and quantise; with a slot, the normed rows go to the address there too."""
        at = self.buffers.constant(weight)
        width, zero = len(weight), self.zero(bits)
        self._add(steps.RESIDUAL, row_set, h, width, self._eps, 0, 0, 0, at, out_slot, records, zero)

    def residual(
        self,
        row_set: int,
        h: int,
        x: int,
        weight: Floats,
        *,
        scalar: float | None = None,
        next_norm: Floats | None = None,
        records: int = 0,
        bits: int = 4,
    ) -> None:
        """h = (h + norm(x)) * scalar, then quantise it, normed once more where `next_norm` is given."""
        constant = self.buffers.constant
        factor = 0 if scalar is None else constant(np.array([scalar], np.float32))
        following = 0 if next_norm is None else constant(next_norm)
        arguments = (row_set, h, len(weight), self._eps, x, constant(weight), factor, following, 0, records)
        self._add(steps.RESIDUAL, *arguments, self.zero(bits))

    def project(
        self, row_set: int, matrix: Packed, records: int, out: int = 0, *, out_slot: int = 0, cap: float | None = None
    ) -> None:
        """out[rows, 16 * tiles] = rows times the matrix, with a softcap where one is given."""
        stride = 4 * TILE * matrix.tiles
        self._add(
            steps.PROJECT, row_set, *self._matrix(matrix, records), matrix.tiles, out, out_slot, stride,
            float_bits(cap or 0.0),
        )  # fmt: skip

    def gated(
        self, row_set: int, matrix: Packed, records: int, out: int, bits: int, factor: int = 0, stride: int = 0
    ) -> None:
        """gelu(gate) * up, quantised for a matrix of `bits`; `factor` replaces up."""
        units = matrix.tiles // (2 if factor else 4)
        arguments = (*self._matrix(matrix, records), units, out, self.zero(bits), factor, stride)
        self._add(steps.GATED, row_set, *arguments)

    def select(self, source: int, out: int, width: int) -> None:
        """The wanted rows."""
        self._add(steps.SELECT, source, out, width)

    def step(self, kind: int, *arguments: int) -> None:
        """A step without sizes to work out."""
        self._add(kind, *arguments)

    @property
    def eps(self) -> int:
        """The bits of the norms' epsilon."""
        return self._eps

    def _matrix(self, matrix: Packed, records: int) -> tuple[int, ...]:
        return matrix.bits, self._pack + matrix.weights, self._pack + matrix.scales, records, matrix.blocks

    def _add(self, *step: int) -> None:
        self._steps.append(step)


@dataclass(frozen=True)
class Workspace:
    """What a layer works in."""

    hidden: int
    """float32[rows, width], the residual stream."""
    scratch: int
    """float32[rows, widest projection]."""
    entry: int
    """Records: the input of attention and of the feed-forward block."""
    inner: int
    """Records: what lies between their first and their last projection."""


def build_layer(
    builder: PlanBuilder,
    layer: DecoderLayer,
    packed: PackedLayer,
    row_set: int,
    work: Workspace,
    cache: int,
    slices: Slices | None,
    following: tuple[Floats, int] | None,
) -> None:
    """The steps of a layer whose normed and quantised input is in `work.entry`.

    Args:
        builder: where to.
        layer: its sizes and norms.
        packed: its matrices.
        row_set: `slots.ALL` or `slots.WANTED`.
        work: buffers.
        cache: which pair of slots has its cache.
        slices: the per-layer embeddings.
        following: the norm and the bits of what reads the output next, on the same rows; None where nothing does.
    """
    _attention(builder, layer, packed, row_set, work, cache)
    own = layer.per_layer
    builder.residual(
        row_set, work.hidden, work.scratch, layer.post_attention_norm,
        next_norm=layer.pre_norm, records=work.entry, bits=layer.gate.bits,
    )  # fmt: skip
    builder.gated(row_set, packed.gated, work.entry, work.inner, layer.down.bits)
    builder.project(row_set, packed.down, work.inner, work.scratch)
    after, records, bits = (None, 0, 4) if following is None else (following[0], work.entry, following[1])
    if own is None:
        builder.residual(
            row_set, work.hidden, work.scratch, layer.post_norm,
            scalar=layer.scalar, next_norm=after, records=records, bits=bits,
        )  # fmt: skip
        return
    assert slices is not None
    assert packed.per_layer_gate is not None
    assert packed.per_layer_projection is not None
    builder.residual(row_set, work.hidden, work.scratch, layer.post_norm, records=work.entry, bits=own.gate.bits)
    factor, stride = slices.address + 4 * own.index * slices.size, 4 * slices.layers * slices.size
    builder.gated(row_set, packed.per_layer_gate, work.entry, work.inner, own.projection.bits, factor, stride)
    builder.project(row_set, packed.per_layer_projection, work.inner, work.scratch)
    builder.residual(
        row_set, work.hidden, work.scratch, own.norm,
        scalar=layer.scalar, next_norm=after, records=records, bits=bits,
    )  # fmt: skip


def _attention(
    builder: PlanBuilder, layer: DecoderLayer, packed: PackedLayer, row_set: int, work: Workspace, cache: int
) -> None:
    attention, new = layer.attention, layer.attention.new
    kind, slot = KIND_NUMBERS[attention.kind], 2 * cache
    stride = 4 * TILE * packed.heads.tiles
    builder.project(row_set, packed.heads, work.entry, work.scratch)
    shape = (attention.query_heads, attention.kv_heads, attention.head_dim)
    constant = builder.buffers.constant
    key_norm = value_norm = value = 0
    if new is not None:
        key_norm, value_norm = constant(new.key_norm), constant(new.value_norm)
        value = (attention.query_heads + (0 if new.value is None else attention.kv_heads)) * attention.head_dim
    norms = (constant(attention.query_norm), key_norm, value_norm)
    builder.step(steps.HEAD, row_set, work.scratch, stride, *shape, *norms, value, kind, slot, builder.eps)
    zero = builder.zero(attention.output.bits)
    builder.step(steps.ATTEND, row_set, work.scratch, stride, *shape, kind, slot, work.inner, zero)
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
