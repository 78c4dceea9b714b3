"""The steps of decoder layers, of the target or the drafter.

A layer is a list of blocks (`ondevice.bundle_format.decoder`). Each block reads quantised rows of the
residual stream and adds its output to the stream; the same step then quantises the input of the next block. Start with
`LayerPlanner`. `ExpertsPlanner` scores and chooses the experts of each row, sorts rows by expert, multiplies, and adds
up the results.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np

from ondevice.arrays import Float32Array
from ondevice.bundle_format.decoder import (
    Activation,
    Attention,
    FeedForward,
    GatedDelta,
    LayerEmbedding,
    Mixer,
    ShortConvolution,
)
from ondevice.bundle_format.graph_io import KINDS
from ondevice.bundle_format.tensor_table import NORMS
from ondevice.engines.layer_path import WHOLE, LayerPath
from ondevice.engines.simd.buffers import float_bits
from ondevice.engines.simd.caches import LookupSettings, half_width
from ondevice.engines.simd.kernels.contract.attention_memory import MAX_PAIRS
from ondevice.engines.simd.kernels.contract.instruction_sets import LANES
from ondevice.engines.simd.kernels.contract.matrices import BLOCK, FLOATS_FORM, PAIRED_BYTES, TILE
from ondevice.engines.simd.kernels.contract.steps import (
    Attend,
    Choose,
    Convolve,
    Gate,
    Head,
    LookUp,
    Mix,
    Recur,
    Residual,
    Score,
    Spread,
    WholeNorm,
)
from ondevice.engines.simd.model import DecoderLayer, DrafterModel, Experts, TargetModel
from ondevice.engines.simd.pack_layout import PackLayout
from ondevice.engines.simd.plan.builder import PlanBuilder, input_form
from ondevice.engines.simd.tensor_files import Matrix
from ondevice.errors import UsageError

KIND_NUMBERS = {kind: number for number, kind in enumerate(KINDS)}
"""Kind of attention -> its number in steps and slots."""

QUERY = "self_attn.q_proj"
HEADS = QUERY, "self_attn.k_proj", "self_attn.v_proj"
"""Names of the projections of queries, keys and values among a layer's matrices."""


GATE = "self_attn.gate_proj"
"""Name of the projection of the gates of attention."""


def cache_shape(own: Mixer) -> tuple[int, int, int]:
    """The shape of a layer's cache, as in `slots.CACHE_SHAPES`."""
    if isinstance(own, Attention):
        return KIND_NUMBERS[own.kind], own.kv_heads, own.head_dim
    return KIND_NUMBERS[own.kind], 0, half_width(own)


def pack_layer(layout: PackLayout, layer: DecoderLayer) -> None:
    """Add the matrices of a layer to the pack. Matrices that read the same input are joined where possible."""
    matrices, heads = layer.matrices, list[list[Matrix]]()
    for matrix in (matrices[name] for name in (*HEADS, GATE) if name in matrices):
        if heads and matrix.joins(heads[-1][0]):
            heads[-1].append(matrix)
        else:
            heads.append([matrix])
    for joined in heads:
        layout.add(*joined)
    for name in ("self_attn.o_proj", "conv.in_proj", "conv.out_proj", "delta.qkv", "delta.z", "delta.out"):
        if name in matrices:
            layout.add(matrices[name])
    if layer.config.feed_forward.width:
        gate, up = matrices["mlp.gate_proj"], matrices["mlp.up_proj"]
        if gate.joins(up):
            layout.add_gated(gate, up)
        else:
            layout.add(gate)
            layout.add(up)
        layout.add(matrices["mlp.down_proj"])
    for name in ("per_layer_input_gate", "per_layer_projection"):
        if name in matrices:
            layout.add(matrices[name])
    if layer.experts is not None:
        pack_experts(layout, layer.experts)


def pack_experts(layout: PackLayout, experts: Experts) -> None:
    """Add the matrices of a layer's experts to the pack: all `gate_up` one after the other, then all `down`."""
    layout.add_gated_experts(experts.gate_up)
    layout.add_experts(experts.down)


class Stream(NamedTuple):
    """The residual stream of a row set."""

    row_set: int
    """`slots.ALL` or `slots.WANTED`."""
    hidden: int
    """Address of float32[rows, width]."""
    per_layer: int = 0
    """Address of the rows' per-layer embeddings, float32[rows, layers, size]; 0 if the model has none."""


class PlannedBlock(NamedTuple):
    """A block of a layer: h = (h + norm(f(input_norm(h)))) * scalar. A part that is None is left out."""

    input_norm: Float32Array | None
    reader: Matrix | None
    """The matrix that reads the input, which determines how it is quantised; None for a block that reads h itself, or
    nothing."""
    add: Callable[[], None]
    """Adds the steps of f."""
    out: int
    """Address of f's output, float32[rows, width]."""
    norm: Float32Array | None
    scalar: Float32Array | None = None


class LayerPlanner:
    """Adds the steps of a model's layers to plans. All layers work in the same buffers.

    Attributes:
        entry: address of activations of the stream's width: the input of a block, and of what comes after the layers.
    """

    def __init__(
        self,
        builder: PlanBuilder,
        model: TargetModel | DrafterModel,
        caches: Mapping[int, int],
        lookup: LookupSettings | None = None,
    ) -> None:
        """
        Args:
            builder: collects the steps, and allocates buffers.
            model: the model.
            caches: target layer -> index of its cache in a sequence's record.
            lookup: how layers with full attention choose the positions that they attend to; None for all.
        """
        self._builder, self._layers, self._caches, self._lookup = builder, model.layers, caches, lookup
        self._width = width = model.config.hidden_size
        pairs = [4 * len(each) for each in model.config.rotary]
        self._rotary = [sum(pairs[:index]) for index in range(len(pairs))]
        """Offsets in bytes of the rotary embeddings in a row of cosines."""
        bodies = model.config.attention
        projected = [(1 + own.gated) * own.query_width + 2 * own.kv_width for own in bodies]
        deltas = [own for each in model.layers if isinstance(own := each.config.mixer, GatedDelta)]
        projected += [2 * own.channels + own.value_width for own in deltas]
        mixed = [own.query_width for own in bodies if own.gated] + [own.value_width for own in deltas]
        self._mixed = builder.rows(max(mixed, default=0))
        """float32[rows, width], outputs of attention or of value heads before they are multiplied by their gates."""
        self._gates = builder.rows(2 * max((own.value_heads for own in deltas), default=0))
        """float32[rows, 2, value_heads], the b and a of a `GatedDelta`."""
        projected += [
            4 * own.channels for each in model.layers if isinstance(own := each.config.mixer, ShortConvolution)
        ]
        projected += [layer.config.feed_forward.width for layer in model.layers]
        self.entry = builder.rows(width)
        self._scratch = builder.rows(max(width, *projected))
        self._inner = builder.rows(max(matrix.width for layer in model.layers for matrix in layer.matrices.values()))
        """Activations: the input of a block's last projection."""
        self._ones = builder.constant(np.ones(max(own.head_dim for own in bodies), np.float32))
        """Weights of the norm of values."""
        self._zeros = builder.rows(width)
        self._biases: dict[DecoderLayer, list[Float32Array]] = {}
        self._taps: dict[DecoderLayer, Float32Array] = {}
        self._gate_weights: dict[DecoderLayer, Float32Array] = {}
        heads = max((own.kv_heads for own in bodies if own.kind == "full"), default=0)
        units = 0 if lookup is None else (1 + lookup.most_units) * heads
        self._chosen = builder.buffers.bytes(8 * units * builder.most_rows)
        """int64[rows, kv_heads, 1 + most_units], the positions that one layer has chosen."""
        experts = [layer.experts for layer in model.layers if layer.experts is not None]
        self._experts = ExpertsPlanner(builder, experts) if experts else None

    def add(self, stream: Stream, start: int, stop: int, path: LayerPath = WHOLE) -> None:
        """Add the steps of the layers from `start` to before `stop`, without the blocks that the path leaves out."""
        row_set, hidden = stream.row_set, stream.hidden
        builder = self._builder
        blocks = [block for index in range(start, stop) for block in self._blocks(index, stream, path)]
        if blocks and blocks[0].reader is not None:
            builder.quantize(row_set, hidden, self._width, self.entry, blocks[0].reader, blocks[0].input_norm)
        for block, after in zip(blocks, [*blocks[1:], None], strict=False):
            block.add()
            reader, norm = (None, None) if after is None else (after.reader, after.input_norm)
            builder.add(
                Residual(
                    row_set,
                    hidden,
                    self._width,
                    builder.eps,
                    x=block.out,
                    weight=self._address(block.norm),
                    scalar=self._address(block.scalar),
                    next_weight=self._address(norm),
                    activations=0 if reader is None else self.entry,
                    form=0 if reader is None else input_form(reader),
                )
            )

    def _address(self, values: Float32Array | None) -> int:
        """The address of an array; 0 for none."""
        return 0 if values is None else self._builder.constant(values)

    def _blocks(self, index: int, stream: Stream, path: LayerPath) -> list[PlannedBlock]:
        layer, out, scalar = self._layers[index], self._scratch, self._layers[index].floats.get("layer_scalar")
        planned = list[PlannedBlock]()
        for block in layer.config.blocks:
            body, (before, after) = block.body, NORMS[block.body.type]
            reader: Matrix | None
            if isinstance(body, Mixer):
                if index in path.without_attention:
                    continue
                if isinstance(body, Attention):
                    reader, add = layer.matrices[QUERY], partial(self._attention, layer, body, stream)
                elif isinstance(body, GatedDelta):
                    reader, add = layer.matrices["delta.qkv"], partial(self._delta, layer, body, stream)
                else:
                    reader, add = layer.matrices["conv.in_proj"], partial(self._convolution, layer, body, stream)
            elif isinstance(body, FeedForward):
                if index in path.without_mlp:
                    continue
                reader, add = self._gate_reader(layer), partial(self._feed_forward, layer, body, stream)
            else:
                reader = layer.matrices["per_layer_input_gate"]
                add = partial(self._layer_embedding, index, layer, body, stream)
            norms = layer.floats
            entry_norm = None if reader is None else norms.get(before)
            planned.append(PlannedBlock(entry_norm, reader, add, out, norms.get(after)))
        if not planned and scalar is not None:
            planned.append(PlannedBlock(None, None, lambda: None, self._zeros, None))
        return [*planned[:-1], planned[-1]._replace(scalar=scalar)] if planned else []

    def _attention(self, layer: DecoderLayer, body: Attention, stream: Stream) -> None:
        builder, row_set, x = self._builder, stream.row_set, self._scratch
        matrices, norms = layer.matrices, layer.floats
        names = (*HEADS, GATE)
        parts = [matrices[name] for name in names if matrices.get(name) in builder.places]  # the others are joined
        widths = [4 * TILE * builder.places[part].tiles for part in parts]
        stride, column = sum(widths), 0
        for part, width, bias in zip(parts, widths, self._bias(layer, widths), strict=True):
            if column:  # this matrix reads its input in another form
                norm = norms.get(NORMS[body.type][0])
                builder.quantize(row_set, stream.hidden, self._width, self.entry, part, norm)
            builder.project(row_set, part, self.entry, x + column, stride=stride, bias=bias)
            column += width
        query_norm, key_norm = (self._address(norms.get(f"self_attn.{name}")) for name in ("q_norm", "k_norm"))
        if body.whole_norms:
            builder.add(
                WholeNorm(
                    row_set,
                    x,
                    stride,
                    body.query_width,
                    body.kv_width,
                    query_norm=query_norm,
                    key_norm=key_norm,
                    eps=builder.eps,
                )
            )
            query_norm = key_norm = 0
        first_value = body.query_width if body.k_eq_v else body.query_width + body.kv_width
        heads = body.heads, body.kv_heads, body.head_dim
        kind, cache = KIND_NUMBERS[body.kind], 2 * self._caches[layer.source]
        builder.add(
            Head(
                row_set,
                x,
                stride,
                *heads,
                query_norm=query_norm,
                key_norm=key_norm,
                value_norm=self._ones if body.v_norm else 0,
                value=first_value if body.kv_source is None else 0,
                rotary=-1 if body.rotary is None else self._rotary[body.rotary],
                scale=float_bits(body.scale),
                kind=kind,
                cache=cache,
                eps=builder.eps,
            )
        )
        output = matrices["self_attn.o_proj"]
        attend = Attend(
            row_set,
            x,
            stride,
            *heads,
            kind=kind,
            cache=cache,
            activations=self._mixed if body.gated else self._inner,
            form=FLOATS_FORM if body.gated else input_form(output),
            sinks=self._address(norms.get("self_attn.sinks")),
            softcap=float_bits(body.softcap or 0.0),
        )
        if self._lookup is None or body.kind != "full":
            builder.add(attend)
        else:
            self._attend_to_chosen(attend, self._lookup)
        if body.gated:
            between = 2 * body.kv_width if body.kv_source is None else 0
            gate = x + 4 * (body.query_width + between)
            builder.add(
                Gate(row_set, self._mixed, body.query_width, gate, stride, self._inner, form=input_form(output))
            )
        builder.project(row_set, output, self._inner, x, bias=norms.get("self_attn.o_proj.bias"))

    def _convolution(self, layer: DecoderLayer, body: ShortConvolution, stream: Stream) -> None:
        builder, row_set, x, stride = self._builder, stream.row_set, self._scratch, 16 * body.channels
        entry, output = layer.matrices["conv.in_proj"], layer.matrices["conv.out_proj"]
        builder.project(row_set, entry, self.entry, x, stride=stride)
        self._convolve(layer, body, stream, stride, output)
        builder.project(row_set, output, self._inner, x)

    def _convolve(
        self,
        layer: DecoderLayer,
        body: ShortConvolution | GatedDelta,
        stream: Stream,
        stride: int,
        reader: Matrix | None = None,
    ) -> None:
        """Add the sums of a convolution; `reader` reads them where they are multiplied by C."""
        if layer not in self._taps:  # the same array for every plan, as it is a constant
            taps = layer.floats["conv.conv" if isinstance(body, ShortConvolution) else "delta.taps"]
            self._taps[layer] = np.ascontiguousarray(taps.T[::-1])
        self._builder.add(
            Convolve(
                stream.row_set,
                self._scratch,
                stride,
                body.channels,
                taps=self._builder.constant(self._taps[layer]),
                window=body.window,
                kind=KIND_NUMBERS[body.kind],
                cache=2 * self._caches[layer.source],
                half=4 * half_width(body),
                activations=0 if reader is None else self._inner,
                form=0 if reader is None else input_form(reader),
                gates=self._gates if isinstance(body, GatedDelta) else 0,
                heads=body.value_heads if isinstance(body, GatedDelta) else 0,
            )
        )

    def _delta(self, layer: DecoderLayer, body: GatedDelta, stream: Stream) -> None:
        builder, row_set, x, floats = self._builder, stream.row_set, self._scratch, layer.floats
        qkv, z, output = (layer.matrices[f"delta.{name}"] for name in ("qkv", "z", "out"))
        stride, convolved, gate = (
            4 * (2 * body.channels + body.value_width),
            x + 4 * body.channels,
            x + 8 * body.channels,
        )
        norm = floats[NORMS[body.type][0]]
        if layer not in self._gate_weights:  # the same array for every plan, as it is a constant
            self._gate_weights[layer] = np.concatenate([floats["delta.b"], floats["delta.a"]]) * norm
        builder.project(row_set, qkv, self.entry, x, stride=stride)
        if input_form(z) != input_form(qkv):
            builder.quantize(row_set, stream.hidden, self._width, self.entry, z, norm)
        builder.project(row_set, z, self.entry, gate, stride=stride)
        builder.add(
            Score(
                row_set,
                stream.hidden,
                self._width,
                builder.eps,
                weights=builder.constant(self._gate_weights[layer]),
                experts=2 * body.value_heads,
                scores=self._gates,
                norm=0,
                activations=0,
                form=0,
                bias=0,
                sigmoid=0,
            )
        )
        self._convolve(layer, body, stream, stride)
        sizes = body.key_heads, body.value_heads, body.key_dim, body.value_dim
        builder.add(
            Recur(
                convolved,
                stride,
                *sizes,
                scale=float_bits(body.key_dim**-0.5),
                gates=self._gates,
                decay=builder.constant(floats["delta.decay"]),
                dt_bias=builder.constant(floats["delta.dt_bias"]),
                states=2 * (len(self._caches) + self._caches[layer.source]),
                cache=2 * self._caches[layer.source],
                taps=builder.constant(self._taps[layer]),
                window=body.window,
                half=4 * half_width(body),
                out=self._mixed,
                tiled=body.tiled,
            )
        )
        builder.add(
            Gate(
                row_set,
                self._mixed,
                body.value_width,
                gate,
                stride,
                self._inner,
                form=input_form(output),
                norm=builder.constant(floats["delta.scale"]),
                size=body.value_dim,
                eps=builder.eps,
            )
        )
        builder.project(row_set, output, self._inner, x)

    def _bias(self, layer: DecoderLayer, widths: Sequence[int]) -> Sequence[Float32Array | None]:
        """The biases of queries, keys and values, as parts of the bytes that the packed matrices write."""
        names = [f"{name}.bias" for name in HEADS if f"{name}.bias" in layer.floats]
        if not names:
            return [None] * len(widths)
        if layer not in self._biases:  # the same arrays for every plan, as they are constants
            joined = np.concatenate([layer.floats[name] for name in names])
            self._biases[layer] = np.split(joined, np.cumsum(widths[:-1]) // joined.itemsize)
        return self._biases[layer]

    def _attend_to_chosen(self, attend: Attend, settings: LookupSettings) -> None:
        """Add lookup attention: a step that chooses positions and one that attends to them.

        In the mode "nomad" it is a single step, which uses the looked-up scores themselves.

        Raises:
            UsageError: more query heads share a KV head than are computed together.
        """
        if (group := attend.query_heads // attend.kv_heads) > MAX_PAIRS:
            raise UsageError(
                f"lookup attention takes {MAX_PAIRS} heads of a KV head, not {group}: use --attention exact"
            )
        width, window, begin, most = settings.width, settings.window, settings.begin, settings.most_units
        codes = 2 * len(self._caches) + attend.cache  # the codes' addresses follow those of all caches
        if settings.mode == "nomad":
            self._builder.add(attend._replace(codes=codes, width=width, window=window, begin=begin))
            return
        self._builder.add(
            LookUp(
                attend.row_set, attend.x, attend.stride, attend.query_heads, attend.kv_heads, attend.size,
                codes=codes, width=width, window=window, begin=begin,
                least=settings.least_units, most=most, left=float_bits(settings.left), chosen=self._chosen,
            )
        )  # fmt: skip
        self._builder.add(attend._replace(window=window, most=most, chosen=self._chosen))

    def _gate_reader(self, layer: DecoderLayer) -> Matrix | None:
        """The matrix that first reads the input of the feed-forward block; None for experts alone."""
        gate, up = (layer.matrices.get(f"mlp.{name}_proj") for name in ("gate", "up"))
        return up if up in self._builder.places else gate  # up is placed unless it is joined with gate

    def _feed_forward(self, layer: DecoderLayer, body: FeedForward, stream: Stream) -> None:
        out = self._scratch
        if body.width:
            self._dense(layer, body, stream, out)
        if layer.experts is not None:
            assert self._experts is not None
            self._experts.add(layer.experts, body.activation, stream.row_set, stream.hidden, out)

    def _dense(self, layer: DecoderLayer, body: FeedForward, stream: Stream, out: int) -> None:
        builder, row_set = self._builder, stream.row_set
        gate, up, down = (layer.matrices[f"mlp.{name}_proj"] for name in ("gate", "up", "down"))
        if up not in builder.places:  # it is joined with gate
            builder.gated(row_set, gate, self.entry, self._inner, down, body.activation)
        else:
            builder.project(row_set, up, self.entry, out)
            norm = layer.floats.get(NORMS[body.type][0])
            builder.quantize(row_set, stream.hidden, self._width, self.entry, gate, norm)
            stride = 4 * TILE * builder.places[up].tiles
            builder.gated(row_set, gate, self.entry, self._inner, down, body.activation, out, stride)
        builder.project(row_set, down, self._inner, out)

    def _layer_embedding(self, index: int, layer: DecoderLayer, body: LayerEmbedding, stream: Stream) -> None:
        gate, projection = (layer.matrices[f"per_layer_{name}"] for name in ("input_gate", "projection"))
        factor, stride = stream.per_layer + index * 4 * body.width, len(self._layers) * 4 * body.width
        self._builder.gated(stream.row_set, gate, self.entry, self._inner, projection, body.activation, factor, stride)
        self._builder.project(stream.row_set, projection, self._inner, self._scratch)


class ExpertsPlanner:
    """Adds the steps of layers' experts to plans. All layers use the same buffers, one after the other.

    A pair is a row and one of its experts. The shapes of most buffers: `contract.steps.Choose`.
    """

    def __init__(self, builder: PlanBuilder, layers: Sequence[Experts]) -> None:
        """Allocate buffers that are large enough for the experts of each of these layers."""
        self._builder, buffers = builder, builder.buffers
        count, top = max(len(each.scale) for each in layers), max(each.top for each in layers)
        width, inner = layers[0].down[0].rows, max(each.down[0].width for each in layers)
        pairs = builder.most_rows * top
        self._scores = buffers.floats(builder.most_rows * count)
        self._weights = buffers.floats(pairs + LANES)
        self._chosen = buffers.bytes(8 * pairs)
        self._groups = buffers.bytes(8 * (3 + 2 * count))
        self._pairs = buffers.bytes(8 * pairs)
        self._counts = buffers.bytes(8 * count)
        self._selection = buffers.floats(count)
        self._gates = buffers.floats(builder.most_rows)
        self._ones = np.ones(builder.most_rows, np.float32)
        """float32[rows], the factors of the output of a dense block that is shared, with a gate and without."""
        self._alone = builder.rows(width)
        """Activations of all rows, each row laid out as a group of its own."""
        self._entry = buffers.bytes(pairs * width // BLOCK * PAIRED_BYTES)
        """Activations of all pairs: the input of the experts' gate and up."""
        self._inner = buffers.bytes(pairs * inner // BLOCK * PAIRED_BYTES)
        """Activations of all pairs: the input of the experts' down projection."""
        self._outputs = buffers.floats(pairs * width)
        """float32[pairs, width], the output of the down projection."""
        self._gate_up_biases: dict[Experts, Float32Array] = {}
        """float32[experts, inner / 32, 2, 32], in the order of the tiles: for 32 outputs those of gate, then of up."""

    def add(self, experts: Experts, activation: Activation, row_set: int, hidden: int, out: int) -> None:
        """Add the steps that write the experts' output, or replace the dense block's by the sum of both.

        Args:
            experts: sizes, norms and matrices.
            activation: the function of their gates.
            row_set: rows to run on.
            hidden: address of float32[rows, width], the residual stream, which the experts read.
            out: address of float32[rows, width], the dense block's output if there is one, which is replaced.
        """
        builder, constant, groups = self._builder, self._builder.constant, self._groups
        (count, width), gate_up, down = experts.router.shape, experts.gate_up[0], experts.down[0]
        score = Score(
            row_set,
            hidden,
            width,
            builder.eps,
            weights=constant(experts.router),
            experts=count,
            scores=self._scores,
            norm=constant(experts.pre_norm),
            activations=self._alone,
            form=input_form(gate_up),
            bias=0 if experts.router_bias is None else constant(experts.router_bias),
            sigmoid=int(experts.scoring == "sigmoid"),
        )
        builder.add(score)
        builder.add(
            Choose(
                row_set,
                self._scores,
                count,
                experts.top,
                scale=constant(experts.scale),
                weights=self._weights,
                chosen=self._chosen,
                groups=groups,
                pairs=self._pairs,
                counts=self._counts,
                selection=0 if experts.selection_bias is None else self._selection,
                selection_bias=0 if experts.selection_bias is None else constant(experts.selection_bias),
                sigmoid=int(experts.scoring == "sigmoid"),
                of_all=int(experts.scoring == "softmax_of_all"),
            )
        )
        builder.add(Spread(groups, self._pairs, self._alone, self._entry, width // BLOCK))
        builder.gated(
            row_set,
            gate_up,
            self._entry,
            self._inner,
            down,
            activation,
            experts=count,
            groups=groups,
            bias=self._gate_up_bias(experts),
        )
        builder.project(row_set, down, self._inner, self._outputs, experts=count, groups=groups, bias=experts.down_bias)
        factors = constant(self._ones) if experts.shared else 0
        if experts.shared_gate is not None:
            factors = self._gates
            gate = score._replace(weights=constant(experts.shared_gate), experts=1, scores=self._gates, sigmoid=1)
            builder.add(gate._replace(norm=0, activations=0, form=0, bias=0))
        builder.add(
            Mix(
                row_set,
                out,
                width,
                builder.eps,
                weight=0 if experts.dense_norm is None else constant(experts.dense_norm),
                outputs=self._outputs,
                norm=0 if experts.norm is None else constant(experts.norm),
                weights=self._weights,
                chosen=self._chosen,
                top=experts.top,
                factors=factors,
            )
        )

    def _gate_up_bias(self, experts: Experts) -> Float32Array | None:
        if experts.gate_up_bias is None:
            return None
        if experts not in self._gate_up_biases:  # the same array for every plan, as it is a constant
            halves = experts.gate_up_bias.reshape(len(experts.gate_up), 2, -1, BLOCK)
            self._gate_up_biases[experts] = np.ascontiguousarray(halves.swapaxes(1, 2))
        return self._gate_up_biases[experts]
