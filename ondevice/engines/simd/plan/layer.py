"""The steps of a decoder layer, of the target or the drafter.

A layer is a list of blocks (attention, feed-forward, per-layer embedding). Each block reads quantised rows of the
residual stream and adds its output to the stream; the same step then quantises the input of the next block. Start with
`build_layer`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from ondevice.arrays import Float32Array
from ondevice.engines.simd.buffers import float_bits
from ondevice.engines.simd.caches import LookupSettings
from ondevice.engines.simd.kernels.matmul.sizes import SCRATCH_BYTES, TILE
from ondevice.engines.simd.kernels.steps.layouts import Attend, AttendChosen, AttendLookedUp, Head, LookUp
from ondevice.engines.simd.model import Attention, DecoderLayer, PerLayer
from ondevice.engines.simd.pack_layout import PackLayout
from ondevice.engines.simd.plan.builder import PlanBuilder, input_form
from ondevice.engines.simd.plan.experts import Choice, add_experts, pack_experts
from ondevice.engines.simd.tensor_files import Matrix

KIND_NUMBERS = {"full": 0, "sliding": 1}
"""Kind of attention -> its number in steps and slots."""


def pack_layer(layout: PackLayout, layer: DecoderLayer) -> None:
    """Add the matrices of a layer to the pack. Matrices that read the same input are joined where possible."""
    for matrices in joined_heads(layer.attention):
        layout.add(*matrices)
    layout.add(layer.attention.output)
    if layer.gate.joins(layer.up):
        layout.add_gated(layer.gate, layer.up)
    else:
        layout.add(layer.gate)
        layout.add(layer.up)
    layout.add(layer.down)
    if layer.per_layer is not None:
        layout.add(layer.per_layer.gate)
        layout.add(layer.per_layer.projection)
    if layer.experts is not None:
        pack_experts(layout, layer.experts)


def joined_heads(attention: Attention) -> list[list[Matrix]]:
    """The query, key and value projections that a layer has; each inner list is packed as one matrix."""
    heads, new = [[attention.query]], attention.new
    for matrix in [] if new is None else [new.key] if new.value is None else [new.key, new.value]:
        if matrix.joins(heads[-1][0]):
            heads[-1].append(matrix)
        else:
            heads.append([matrix])
    return heads


@dataclass(frozen=True)
class PerLayerInputs:
    """Where the per-layer embeddings of a row set lie, their projection included."""

    address: int
    """Address of float32[rows, layers, size]."""
    layers: int
    size: int
    """Width of one layer's slice."""


@dataclass(frozen=True)
class Workspace:
    """Addresses of the buffers that layers work in."""

    hidden: int
    """float32[rows, width], the residual stream."""
    scratch: int
    """float32[rows, widest projection]."""
    entry: int
    """Activations: the input of a block."""
    inner: int
    """Activations: the input of a block's last projection."""


class Input(NamedTuple):
    """The input of a block: the residual stream, normed and quantised."""

    norm: Float32Array | None
    """float32[width]; None if the stream is not normed."""
    reader: Matrix
    """The matrix that reads the rows, which determines how they are quantised."""


@dataclass(frozen=True)
class LookupPlan:
    """How layers with full attention choose the positions that they attend to."""

    settings: LookupSettings
    places: int
    """Number of caches in a sequence's record; the addresses of key codes and codebooks come after them."""
    chosen: int
    """Address of int64[rows, kv_heads, 1 + most_units], the choice of one layer; all layers share it."""


@dataclass(frozen=True)
class LayerPlace:
    """The operands of a layer: its rows, buffers and cache."""

    row_set: int
    """`slots.ALL` or `slots.WANTED`."""
    work: Workspace
    cache: int
    """Index of the layer's cache in a sequence's record."""
    per_layer: PerLayerInputs | None = None
    lookup: LookupPlan | None = None
    """None for exact attention."""
    following: Input | None = None
    """Input of the block that runs on the same rows after this layer; None if there is none."""
    without_attention: bool = False
    """Leave out the attention block."""
    without_mlp: bool = False
    """Leave out the feed-forward block, experts included."""
    choice: Choice | None = None
    """Buffers of the experts; None if the model has no experts."""


@dataclass(frozen=True)
class Block:
    """A block of a layer: h += norm(f(input)).

    input : the input, which is quantised before the block
    norm : norm of the block's output
    add : adds the steps of f, which read `Workspace.entry` and write `Workspace.scratch`
    """

    input: Input
    norm: Float32Array
    add: Callable[[], None]


def first_input(layer: DecoderLayer, *, without_attention: bool = False, without_mlp: bool = False) -> Input | None:
    """The input of the first block that a layer runs; None if all its blocks are left out."""
    if not without_attention:
        return Input(layer.input_norm, layer.attention.query)
    if not without_mlp:
        return Input(layer.pre_norm, _first_of_mlp(layer))
    return None if layer.per_layer is None else Input(None, layer.per_layer.gate)


def build_layer(builder: PlanBuilder, layer: DecoderLayer, place: LayerPlace) -> None:
    """Add the steps of a layer. The input of its first block must already be in `place.work.entry`.

    Args:
        builder: collects the steps.
        layer: sizes, norms and matrices of the layer.
        place: rows, buffers and cache of the layer.
    """
    blocks = list(_blocks(builder, layer, place))
    if not blocks:  # the layer's scalar still applies: add a block of zeros, then multiply the stream by the scalar
        nothing = builder.nothing(len(layer.post_norm))
        _add_block(builder, place, nothing, layer.post_norm, place.following, layer.scalar)
        return
    inputs = [*(block.input for block in blocks[1:]), place.following]
    for block, after in zip(blocks, inputs, strict=True):
        block.add()
        scalar = layer.scalar if block is blocks[-1] else None
        _add_block(builder, place, place.work.scratch, block.norm, after, scalar)


def _first_of_mlp(layer: DecoderLayer) -> Matrix:
    """The matrix that reads the feed-forward block's input first: gate and up joined, else up."""
    return layer.gate if layer.gate.joins(layer.up) else layer.up


def _add_block(
    builder: PlanBuilder, place: LayerPlace, x: int, norm: Float32Array, after: Input | None, scalar: float | None
) -> None:
    """h = (h + norm(x)) * scalar; then write the input `after` of the next block, unless it is None."""
    activations, reader = (0, None) if after is None else (place.work.entry, after.reader)
    builder.residual(
        place.row_set, place.work.hidden, x, norm,
        scalar=scalar, next_norm=None if after is None else after.norm, activations=activations, reader=reader,
    )  # fmt: skip


def _blocks(builder: PlanBuilder, layer: DecoderLayer, place: LayerPlace) -> Iterator[Block]:
    row_set, work, own = place.row_set, place.work, layer.per_layer

    def mlp() -> None:
        if layer.gate.joins(layer.up):
            builder.gated(row_set, layer.gate, work.entry, work.inner, layer.down)
        else:
            builder.project(row_set, layer.up, work.entry, work.scratch)
            builder.norm_quantize(row_set, work.hidden, layer.pre_norm, work.entry, layer.gate)
            stride = 4 * TILE * builder.places[layer.up].tiles
            builder.gated(row_set, layer.gate, work.entry, work.inner, layer.down, work.scratch, stride)
        builder.project(row_set, layer.down, work.inner, work.scratch)
        if layer.experts is not None:
            assert place.choice is not None
            add_experts(builder, layer.experts, place.choice, row_set, work.hidden, work.scratch)

    if not place.without_attention:
        entry = Input(layer.input_norm, layer.attention.query)
        yield Block(entry, layer.post_attention_norm, partial(_attention, builder, layer, place))
    if not place.without_mlp:
        yield Block(Input(layer.pre_norm, _first_of_mlp(layer)), layer.post_norm, mlp)
    if own is not None:
        add = partial(_per_layer, builder, own, place)
        yield Block(Input(None, own.gate), own.norm, add)


def _per_layer(builder: PlanBuilder, own: PerLayer, place: LayerPlace) -> None:
    row_set, work, inputs = place.row_set, place.work, place.per_layer
    assert inputs is not None
    factor, stride = inputs.address + 4 * own.index * inputs.size, 4 * inputs.layers * inputs.size
    builder.gated(row_set, own.gate, work.entry, work.inner, own.projection, factor, stride)
    builder.project(row_set, own.projection, work.inner, work.scratch)


def _attention(builder: PlanBuilder, layer: DecoderLayer, place: LayerPlace) -> None:
    attention, new = layer.attention, layer.attention.new
    row_set, work = place.row_set, place.work
    kind, cache = KIND_NUMBERS[attention.kind], 2 * place.cache
    heads_parts = [matrices[0] for matrices in joined_heads(attention)]
    widths = [4 * TILE * builder.places[part].tiles for part in heads_parts]
    stride, column = sum(widths), 0
    for part, width in zip(heads_parts, widths, strict=True):
        if column:
            builder.norm_quantize(row_set, work.hidden, layer.input_norm, work.entry, part)
        builder.project(row_set, part, work.entry, work.scratch + column, stride=stride)
        column += width
    heads = (attention.query_heads, attention.kv_heads, attention.head_dim)
    constant = builder.constant
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
    form = input_form(attention.output)
    attend = Attend(row_set, work.scratch, stride, *heads, kind=kind, cache=cache, activations=work.inner, form=form)
    if place.lookup is None or attention.kind != "full":
        builder.add(attend)
    else:
        _attend_to_chosen(builder, attend, place.lookup)
    builder.project(row_set, attention.output, work.inner, work.scratch)


def lookup_plan(
    builder: PlanBuilder, settings: LookupSettings, layers: Sequence[DecoderLayer], places: int
) -> LookupPlan:
    """Allocate the buffer for the chosen positions, large enough for each of these layers.

    Args:
        builder: allocates the buffer.
        settings: how positions are chosen.
        layers: the layers that will use the plan.
        places: number of caches in a sequence's record.
    """
    heads = max((layer.attention.kv_heads for layer in layers if layer.attention.kind == "full"), default=0)
    chosen = builder.buffers.bytes(8 * (1 + settings.most_units) * heads * builder.most_rows)
    return LookupPlan(settings, places, chosen)


def _attend_to_chosen(builder: PlanBuilder, attend: Attend, lookup: LookupPlan) -> None:
    """Add lookup attention: a step that chooses positions and one that attends to them.

    In the mode "nomad" it is a single step, which uses the looked-up scores themselves.
    """
    settings, most = lookup.settings, lookup.settings.most_units
    codes = 2 * lookup.places + attend.cache
    if settings.mode == "nomad":
        builder.add(
            AttendLookedUp(*attend, codes=codes, width=settings.width, window=settings.window, begin=settings.begin)
        )
        return
    builder.add(
        LookUp(
            attend.row_set, attend.x, attend.stride, attend.query_heads, attend.kv_heads, attend.size,
            codes=codes, width=settings.width, window=settings.window, begin=settings.begin,
            least=settings.least_units, most=most, left=float_bits(settings.left), chosen=lookup.chosen,
        )
    )  # fmt: skip
    builder.add(AttendChosen(*attend, window=settings.window, most=most, chosen=lookup.chosen))


def widest(layers: Sequence[DecoderLayer], width: int) -> tuple[int, int]:
    """Widths of the widest rows in `Workspace.scratch` and `Workspace.inner`.

    Args:
        layers: layers that will share a workspace.
        width: width of the residual stream.
    """
    outer, inner = width, width
    for layer in layers:
        attention = layer.attention
        heads = attention.query_heads + (0 if attention.new is None else 2 * attention.kv_heads)
        outer = max(outer, heads * attention.head_dim, 0 if layer.gate.joins(layer.up) else layer.up.rows)
        inner = max(inner, layer.down.width, attention.output.width)
        if layer.per_layer is not None:
            inner = max(inner, layer.per_layer.projection.width)
    return outer, inner


def entry_readers(layers: Sequence[DecoderLayer]) -> list[Matrix]:
    """The matrices that read `Workspace.entry`, the input of a block."""
    found = []
    for layer in layers:
        new, own = layer.attention.new, layer.per_layer
        found += [layer.attention.query, layer.gate, layer.up]
        found += [] if new is None else [new.key, *([] if new.value is None else [new.value])]
        found += [] if own is None else [own.gate]
    return found


def inner_readers(layers: Sequence[DecoderLayer]) -> list[Matrix]:
    """The matrices that read `Workspace.inner`, the input of a block's last projection."""
    found = [matrix for layer in layers for matrix in (layer.attention.output, layer.down)]
    return found + [layer.per_layer.projection for layer in layers if layer.per_layer is not None]


def scratch_bytes(layers: Sequence[DecoderLayer]) -> int:
    """Working memory per thread in bytes: tiles of `kernels.matmul.project.gated`, or one attention head."""
    return max(SCRATCH_BYTES, *(4 * layer.attention.head_dim for layer in layers))


def widest_attention(layers: Sequence[DecoderLayer]) -> tuple[int, int]:
    """The largest head dimension of some layers, and the most query heads."""
    attentions = [layer.attention for layer in layers]
    return max(each.head_dim for each in attentions), max(each.query_heads for each in attentions)
