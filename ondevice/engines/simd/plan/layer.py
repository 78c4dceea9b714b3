"""A decoder layer as steps: what the target's layers and the drafter's have in common."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from ondevice.engines.simd.buffers import float_bits
from ondevice.engines.simd.graph.model import DecoderLayer, Floats, Matrix, PerLayer
from ondevice.engines.simd.kernels.attention_layouts import Attend, AttendChosen, AttendLookedUp, LookUp
from ondevice.engines.simd.kernels.project import SCRATCH_BYTES
from ondevice.engines.simd.kernels.projection_layouts import Head
from ondevice.engines.simd.kernels.sizes import TILE
from ondevice.engines.simd.lookup_settings import LookupSettings
from ondevice.engines.simd.pack.layout import Packed, PackLayout
from ondevice.engines.simd.plan.builder import PlanBuilder
from ondevice.engines.simd.plan.experts import Choice, PackedExperts, add_experts, pack_experts
from ondevice.engines.simd.plan.reading import input_form

KIND_NUMBERS = {"full": 0, "sliding": 1}


@dataclass(frozen=True)
class PackedLayer:
    """Where a layer's matrices lie in the pack."""

    heads: list[Packed]
    """Query, key and value, as far as the layer has them; those side by side that can be one matrix are."""
    output: Packed
    gated: Packed
    """Gate and up, or gate alone."""
    up: Packed | None
    """Where it cannot be one matrix with the gate."""
    down: Packed
    per_layer_gate: Packed | None
    per_layer_projection: Packed | None
    experts: PackedExperts | None

    def dense(self) -> list[Packed]:
        """What every row is multiplied with."""
        some = (self.up, self.per_layer_gate, self.per_layer_projection)
        return [*self.heads, self.output, self.gated, self.down, *(matrix for matrix in some if matrix is not None)]


def pack_layer(layout: PackLayout, layer: DecoderLayer) -> PackedLayer:
    attention, new, own = layer.attention, layer.attention.new, layer.per_layer
    heads = [[attention.query]]
    for matrix in [] if new is None else [new.key] if new.value is None else [new.key, new.value]:
        if matrix.joins(heads[-1][0]):
            heads[-1].append(matrix)
        else:
            heads.append([matrix])
    joined = layer.gate.joins(layer.up)
    return PackedLayer(
        [layout.add(*matrices) for matrices in heads],
        layout.add(attention.output),
        layout.add_gated(layer.gate, layer.up) if joined else layout.add(layer.gate),
        None if joined else layout.add(layer.up),
        layout.add(layer.down),
        None if own is None else layout.add(own.gate),
        None if own is None else layout.add(own.projection),
        None if layer.experts is None else pack_experts(layout, layer.experts),
    )


@dataclass(frozen=True)
class PerLayerInputs:
    """Per-layer embeddings of the rows of a set, with their projection added."""

    address: int
    """Of float32[rows, layers, size]."""
    layers: int
    size: int
    """Of a layer's part."""


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


class Input(NamedTuple):
    """What a block of a layer reads of the residual stream."""

    norm: Floats | None
    """float32[width]; None where it reads the stream as it is."""
    reader: Matrix
    """What the rows are quantised for."""


@dataclass(frozen=True)
class LookupPlan:
    """How layers of full attention choose what they attend to."""

    settings: LookupSettings
    places: int
    """Caches in a sequence's record, behind which codes and codebooks are."""
    chosen: int
    """Address of int64[rows, kv_heads, 1 + most_units]: for the layer that is at work."""


@dataclass(frozen=True)
class LayerPlace:
    """What a layer runs on: its rows, buffers and cache."""

    row_set: int
    """`slots.ALL` or `slots.WANTED`."""
    work: Workspace
    cache: int
    """The place of its cache in a sequence's record."""
    per_layer: PerLayerInputs | None = None
    lookup: LookupPlan | None = None
    """None where rows attend to all that they see."""
    following: Input | None = None
    """Of what runs on the same rows after the layer; None where nothing does."""
    without_attention: bool = False
    without_mlp: bool = False
    choice: Choice | None = None
    """Where experts are chosen; None where there are none."""


@dataclass(frozen=True)
class Block:
    """A part of a layer: h += norm(what `add` makes of `input`).

    add : adds the steps from the quantised input to `Workspace.scratch`
    """

    input: Input
    norm: Floats
    add: Callable[[], None]


def first_input(layer: DecoderLayer, *, without_attention: bool = False, without_mlp: bool = False) -> Input | None:
    """What the first of a layer's blocks reads; None where all are left out."""
    if not without_attention:
        return Input(layer.input_norm, layer.attention.query)
    if not without_mlp:
        return Input(layer.pre_norm, _first_of_mlp(layer))
    return None if layer.per_layer is None else Input(None, layer.per_layer.gate)


def build_layer(builder: PlanBuilder, layer: DecoderLayer, packed: PackedLayer, place: LayerPlace) -> None:
    """Add the steps of a layer, whose first block's input is in `place.work.entry`.

    Args:
        builder: collects the steps.
        layer: its sizes and norms.
        packed: its matrices.
        place: its rows, buffers and cache.
    """
    blocks = list(_blocks(builder, layer, packed, place))
    if not blocks:  # the scalar counts nevertheless: nothing is added, and the sum is multiplied by it
        nothing = builder.nothing(len(layer.post_norm))
        _add_block(builder, place, nothing, layer.post_norm, place.following, layer.scalar)
        return
    inputs = [*(block.input for block in blocks[1:]), place.following]
    for block, after in zip(blocks, inputs, strict=True):
        block.add()
        scalar = layer.scalar if block is blocks[-1] else None
        _add_block(builder, place, place.work.scratch, block.norm, after, scalar)


def _first_of_mlp(layer: DecoderLayer) -> Matrix:
    """What reads the block's input first: gate and up as one matrix, or up alone."""
    return layer.gate if layer.gate.joins(layer.up) else layer.up


def _add_block(
    builder: PlanBuilder, place: LayerPlace, x: int, norm: Floats, after: Input | None, scalar: float | None
) -> None:
    """h = (h + norm(x)) * scalar; then h is quantised for what follows, where anything does."""
    activations, reader = (0, None) if after is None else (place.work.entry, after.reader)
    builder.residual(
        place.row_set, place.work.hidden, x, norm,
        scalar=scalar, next_norm=None if after is None else after.norm, activations=activations, reader=reader,
    )  # fmt: skip


def _blocks(builder: PlanBuilder, layer: DecoderLayer, packed: PackedLayer, place: LayerPlace) -> Iterator[Block]:
    row_set, work, own = place.row_set, place.work, layer.per_layer

    def mlp() -> None:
        if packed.up is None:
            builder.gated(row_set, packed.gated, work.entry, work.inner, layer.down)
        else:
            builder.project(row_set, packed.up, work.entry, work.scratch)
            builder.norm_quantize(row_set, work.hidden, layer.pre_norm, work.entry, layer.gate)
            stride = 4 * TILE * packed.up.tiles
            builder.gated(row_set, packed.gated, work.entry, work.inner, layer.down, work.scratch, stride)
        builder.project(row_set, packed.down, work.inner, work.scratch)
        if layer.experts is not None:
            assert packed.experts is not None
            assert place.choice is not None
            add_experts(builder, layer.experts, packed.experts, place.choice, row_set, work.hidden, work.scratch)

    if not place.without_attention:
        entry = Input(layer.input_norm, layer.attention.query)
        yield Block(entry, layer.post_attention_norm, partial(_attention, builder, layer, packed, place))
    if not place.without_mlp:
        yield Block(Input(layer.pre_norm, _first_of_mlp(layer)), layer.post_norm, mlp)
    if own is not None:
        add = partial(_per_layer, builder, own, packed, place)
        yield Block(Input(None, own.gate), own.norm, add)


def _per_layer(builder: PlanBuilder, own: PerLayer, packed: PackedLayer, place: LayerPlace) -> None:
    row_set, work, inputs = place.row_set, place.work, place.per_layer
    assert inputs is not None
    assert packed.per_layer_gate is not None
    assert packed.per_layer_projection is not None
    factor, stride = inputs.address + 4 * own.index * inputs.size, 4 * inputs.layers * inputs.size
    builder.gated(row_set, packed.per_layer_gate, work.entry, work.inner, own.projection, factor, stride)
    builder.project(row_set, packed.per_layer_projection, work.inner, work.scratch)


def _attention(builder: PlanBuilder, layer: DecoderLayer, packed: PackedLayer, place: LayerPlace) -> None:
    attention, new = layer.attention, layer.attention.new
    row_set, work = place.row_set, place.work
    kind, cache = KIND_NUMBERS[attention.kind], 2 * place.cache
    stride, column = 4 * TILE * sum(part.tiles for part in packed.heads), 0
    for part in packed.heads:
        if column:
            builder.norm_quantize(row_set, work.hidden, layer.input_norm, work.entry, part.matrix)
        builder.project(row_set, part, work.entry, work.scratch + column, stride=stride)
        column += 4 * TILE * part.tiles
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
    builder.project(row_set, packed.output, work.inner, work.scratch)


def lookup_plan(
    builder: PlanBuilder, settings: LookupSettings, layers: Sequence[DecoderLayer], places: int
) -> LookupPlan:
    """With room for the choice of the layer that is at work."""
    heads = max((layer.attention.kv_heads for layer in layers if layer.attention.kind == "full"), default=0)
    chosen = builder.buffers.bytes(8 * (1 + settings.most_units) * heads * builder.most_rows)
    return LookupPlan(settings, places, chosen)


def _attend_to_chosen(builder: PlanBuilder, attend: Attend, lookup: LookupPlan) -> None:
    """Add a step that chooses keys, and the one that attends to them; or one that takes the scores that it looks up."""
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
    """The widest projection and the widest inner row of some layers."""
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
    """The matrices of some layers that read the residual stream."""
    found = []
    for layer in layers:
        new, own = layer.attention.new, layer.per_layer
        found += [layer.attention.query, layer.gate, layer.up]
        found += [] if new is None else [new.key, *([] if new.value is None else [new.value])]
        found += [] if own is None else [own.gate]
    return found


def inner_readers(layers: Sequence[DecoderLayer]) -> list[Matrix]:
    """The other ones."""
    found = [matrix for layer in layers for matrix in (layer.attention.output, layer.down)]
    return found + [layer.per_layer.projection for layer in layers if layer.per_layer is not None]


def scratch_bytes(layers: Sequence[DecoderLayer]) -> int:
    """Working memory of a thread: `kernels.project.gated`'s tiles, or a head."""
    return max(SCRATCH_BYTES, *(4 * layer.attention.head_dim for layer in layers))


def widest_attention(layers: Sequence[DecoderLayer]) -> tuple[int, int]:
    """The widest head of some layers, and the most query heads."""
    attentions = [layer.attention for layer in layers]
    return max(each.head_dim for each in attentions), max(each.query_heads for each in attentions)
