"""A decoder layer: its blocks with their norms, experts, and its slice of the per-layer embeddings (PLE)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import onnx_ir as ir

from ondevice.bundle_format.decoder import Activation, Body, ExpertsConfig, FeedForward, Layer, LayerEmbedding, Mixer
from ondevice.bundle_format.model_config import PerLayerEmbeddings
from ondevice.bundle_format.tensor_table import NORMS, PLE_TABLE
from ondevice_export.graph.graph_builder import GraphBuilder
from ondevice_export.graph.matrix import gather, linear, product
from ondevice_export.graph.weights import Module

READERS = {
    "attention": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.gate_proj"),
    "short_convolution": ("conv.in_proj",),
    "gated_delta": (),
    "feed_forward": ("mlp.gate_proj", "mlp.up_proj"),
    "layer_embedding": ("per_layer_input_gate",),
}
"""Type of a block -> the modules that read the output of the norm before it, if nothing else does."""


def decoder_layer(
    module: Module,
    layer: Layer,
    hidden: ir.Value,
    mix: Callable[[Module, Mixer, ir.Value], ir.Value],
    own: ir.Value | None = None,
) -> ir.Value:
    """Add one decoder layer: [T, H] -> [T, H].

    Args:
        module: the layer's weights.
        layer: its blocks.
        hidden: the residual stream, [T, H].
        mix: adds the attention or convolution, from the layer's weights and the block's input [T, H].
        own: the layer's slice of the per-layer embeddings, [T, P].
    """
    builder = module.builder
    for block in layer.blocks:
        before, after = NORMS[block.body.type]
        x = module.norm(hidden, before, _readers(block.body)) if block.norm_in else hidden
        if isinstance(block.body, Mixer):
            out = mix(module, block.body, x)
        elif isinstance(block.body, FeedForward):
            out = _feed_forward(module, block.body, hidden, x)
        else:
            assert own is not None
            out = _layer_embedding(module, block.body, x, own)
        hidden = builder.op("Add", hidden, module.norm(out, after) if block.norm_out else out)
    return builder.op("Mul", hidden, module.vector("layer_scalar")) if layer.scalar else hidden


def _readers(body: Body) -> Sequence[str]:
    """The modules of READERS; none if a router reads the norm's output too, which is never rescaled then."""
    routed = isinstance(body, FeedForward) and body.experts is not None and not body.normed
    return () if routed else READERS[body.type]


def per_layer_inputs(
    module: Module, config: PerLayerEmbeddings, layers: int, ids: ir.Value, embedded: ir.Value
) -> ir.Value:
    """The per-layer embeddings of all layers: ids [T] and their token embeddings [T, H] -> [T, layers, P]."""
    builder, size = module.builder, config.width
    context = module.linear(embedded, "per_layer_model_projection")
    context = builder.reshape(builder.op("Mul", context, builder.scalar(config.context_factor)), -1, layers, size)
    context = module.norm(context, "per_layer_projection_norm")
    # fp16 scales make the largest table of E2B a ninth smaller; the gather's output is then fp16.
    table = module.matrix(PLE_TABLE, half_scales=True)
    own = builder.op(
        "Mul", builder.reshape(gather(builder, table, ids), -1, layers, size), builder.scalar(config.table_factor)
    )
    return builder.op("Mul", builder.op("Add", context, own), builder.scalar(config.factor))


def _layer_embedding(module: Module, body: LayerEmbedding, x: ir.Value, own: ir.Value) -> ir.Value:
    """`projection(activation(gate(x)) * own)`, own [T, P]: [T, H] -> [T, H]."""
    gate = activated(module.builder, body.activation, module.linear(x, "per_layer_input_gate"))
    return module.linear(module.builder.op("Mul", gate, own), "per_layer_projection")


def _feed_forward(module: Module, body: FeedForward, hidden: ir.Value, x: ir.Value) -> ir.Value:
    """The dense block and the experts, as `FeedForward` says: [T, H] -> [T, H]."""
    if body.experts is None:
        return _dense(module.at("mlp."), body.activation, x)
    builder, size, own = module.builder, module.config.hidden_size, module.at("router.")
    if not body.normed:
        with builder.scope("experts"):
            mixed = _mix_experts(module, x, body.experts, body.activation, _route(module, x, body.experts))
        if not body.shared:
            return mixed
        shared = _gated_dense if body.shared_gate else _dense
        return builder.op("Add", mixed, shared(module.at("mlp."), body.activation, x))
    dense = module.norm(_dense(module.at("mlp."), body.activation, x), "post_feedforward_layernorm_1")
    with builder.scope("experts"):
        scale = own.read("scale") * np.float32(size**-0.5)
        weights, chosen = _route(module, module.rms_norm(hidden, own.array("scale", scale)), body.experts)
        factors = builder.op("Gather", own.vector("per_expert_scale"), chosen, axis=0)
        routes = builder.op("Mul", weights, factors), chosen
        inputs = module.norm(hidden, "pre_feedforward_layernorm_2")
        mixed = _mix_experts(module, inputs, body.experts, body.activation, routes)
    return builder.op("Add", dense, module.norm(mixed, "post_feedforward_layernorm_2"))


def _gated_dense(mlp: Module, activation: Activation, x: ir.Value) -> ir.Value:
    """`dense(x) * sigmoid(gate @ x)`, gate [H]: [T, H] -> [T, H]."""
    builder, name, shape = mlp.builder, "shared_gate.weight", (1, mlp.config.hidden_size)
    gate = product(builder, x, mlp.array(name, mlp.read(name), shape), shape)
    return builder.op("Mul", _dense(mlp, activation, x), builder.op("Sigmoid", gate))


def _dense(mlp: Module, activation: Activation, x: ir.Value) -> ir.Value:
    """`down(activation(gate(x)) * up(x))`: [T, H] -> [T, H]."""
    gate, up = mlp.linear(x, "gate_proj"), mlp.linear(x, "up_proj")
    return mlp.linear(_gated(mlp.builder, activation, gate, up), "down_proj")


def _gated(builder: GraphBuilder, activation: Activation, gate: ir.Value, up: ir.Value) -> ir.Value:
    """`activation(gate) * up`, or the function of both that is named in place of one (`decoder.Activation`)."""
    if activation != "clamped_swiglu":
        return builder.op("Mul", activated(builder, activation, gate), up)
    alpha, limit, least, one = (builder.scalar(number) for number in (1.702, 7.0, -7.0, 1.0))
    gate = builder.op("Clip", gate, None, limit)
    gate = builder.op("Mul", gate, builder.op("Sigmoid", builder.op("Mul", gate, alpha)))
    return builder.op("Mul", gate, builder.op("Add", builder.op("Clip", up, least, limit), one))


def activated(builder: GraphBuilder, activation: Activation, x: ir.Value) -> ir.Value:
    """GELU in its tanh approximation, or SiLU."""
    if activation == "silu":
        return builder.silu(x)
    return builder.op("Gelu", x, approximate="tanh")


_ADDED = 1e-6
"""Added to the sum of a row's sigmoids (Lfm2MoeTopKRouter)."""

Routes = tuple[ir.Value, ir.Value]
"""Weights [T, top] and expert indices [T, top] of each row, the best expert first."""


def _mix_experts(
    module: Module, x: ir.Value, config: ExpertsConfig, activation: Activation, routes: Routes
) -> ir.Value:
    """`sum of weight * expert(x)` over the experts of each row: [T, H] -> [T, H].

    Each expert is two matrices and runs on the rows routed to it, often none: rows are sorted by expert, split, and
    put back in order. Two rejected alternatives: `com.microsoft.QMoE` would be one node, but on CPU it has no gate
    (ONNX Runtime 1.31: "FC3 gating is not yet implemented"). A loop whose body gathers an expert's weights also needs
    few nodes, but MatMulNBits then unpacks them to float32 in every run: 28 ms, against 0.4 ms for a constant matrix.
    """
    builder, size = module.builder, module.config.hidden_size
    weights, chosen = routes
    flat = builder.reshape(chosen, -1)
    order = _sorted(builder, flat)
    rows = builder.op("Div", order, builder.constant(np.array(config.top, np.int64)))
    inputs = builder.op("Gather", x, rows, axis=0)
    outputs = _run(module.at("experts."), _split(builder, inputs, flat, config.count), config, activation)
    joined = builder.op("Concat", *outputs, axis=0)
    back = builder.op("Gather", joined, _sorted(builder, order), axis=0)
    mixed = builder.op(
        "MatMul",
        builder.reshape(weights, -1, 1, config.top),
        builder.reshape(back, -1, config.top, size),
    )
    return builder.reshape(mixed, -1, size)


def _route(module: Module, x: ir.Value, config: ExpertsConfig) -> Routes:
    """The experts of each row with the best scores, `proj(x)`, and their weights: the softmax of these scores
    (GptOssTopKRouter), or of all (OlmoeTopKRouter), or their sigmoids divided by the sum of these (Lfm2MoeTopKRouter).
    A bias may be added for the choice alone: to the sigmoids, or to the softmax of all (Ernie4_5_MoeTopKRouter).

    The softmax of all scores, divided by the sum of the best (Qwen3MoeTopKRouter), would be the same number, but ONNX
    Runtime sums a row of 5 numbers, or 6 or 7, in an order that depends on the row's address.
    """
    builder, size, own = module.builder, module.config.hidden_size, module.at("router.")
    scores = product(builder, x, own.vector("proj.weight"), (config.count, size))
    if config.bias:
        scores = builder.op("Add", scores, own.vector("proj.bias"))
    if config.scoring == "sigmoid" or config.selection_bias:
        likely = (
            builder.op("Sigmoid", scores) if config.scoring == "sigmoid" else builder.op("Softmax", scores, axis=-1)
        )
        if config.selection_bias:
            likely = builder.op("Add", likely, own.vector("selection_bias"))
        chosen = builder.ops("TopK", likely, builder.integers(config.top), axis=-1, outputs=2)[1]
        best = builder.op("GatherElements", scores, chosen, axis=-1)
        if config.scoring == "sigmoid":
            return _divided(builder, best, config.top), chosen
        return builder.op("Softmax", best, axis=-1), chosen
    best, chosen = builder.ops("TopK", scores, builder.integers(config.top), axis=-1, outputs=2)
    if config.scoring == "softmax_of_all":
        return builder.op("GatherElements", builder.op("Softmax", scores, axis=-1), chosen, axis=-1), chosen
    return builder.op("Softmax", best, axis=-1), chosen


def _divided(builder: GraphBuilder, scores: ir.Value, top: int) -> ir.Value:
    """sigmoid(scores) / (their sum + 1e-6), [T, top]: the softmax of the logarithms of these numbers and of 1e-6."""
    shifted = builder.op("Sub", builder.log_sigmoid(scores, top), builder.scalar(np.log(_ADDED)))
    weights = builder.op("Softmax", builder.op("Pad", shifted, builder.integers(0, 0, 0, 1)), axis=-1)
    return builder.op("Slice", weights, builder.integers(0), builder.integers(top), builder.integers(1))


def _sorted(builder: GraphBuilder, numbers: ir.Value) -> ir.Value:
    """Stable argsort of int64 [N]; applied to a permutation, it returns the inverse permutation."""
    count = builder.op("Shape", numbers)
    return builder.ops("TopK", numbers, count, axis=0, largest=0, outputs=2)[1]


def _split(builder: GraphBuilder, rows: ir.Value, experts: ir.Value, count: int) -> Sequence[ir.Value]:
    """Split rows [N, H], sorted by their expert indices [N], into `count` parts, one per expert (some empty)."""
    every = builder.constant(np.arange(count))
    taken = builder.op("Equal", builder.op("Unsqueeze", experts, builder.integers(1)), every)
    sizes = builder.op("ReduceSum", builder.op("Cast", taken, to=ir.DataType.INT64), builder.integers(0), keepdims=0)
    return builder.ops("Split", rows, sizes, axis=0, outputs=count)


def _run(module: Module, parts: Sequence[ir.Value], config: ExpertsConfig, activation: Activation) -> list[ir.Value]:
    """Run each expert on its rows: `down(activation(gate(x)) * up(x))`; gate and up are one stored matrix."""
    builder, gate_up, down = module.builder, module.matrix("gate_up_proj"), module.matrix("down_proj")
    gate_up_bias = module.vector("gate_up_proj_bias") if config.bias else None
    down_bias = module.vector("down_proj_bias") if config.bias else None

    def biased(x: ir.Value, bias: ir.Value | None, number: int) -> ir.Value:
        if bias is None:
            return x
        return builder.op("Add", x, builder.op("Gather", bias, builder.constant(np.array(number, np.int64)), axis=0))

    outputs = []
    for number, part in enumerate(parts):
        both = biased(linear(builder, part, gate_up.part(number, config.count)), gate_up_bias, number)
        gate, up = builder.ops("Split", both, axis=-1, num_outputs=2, outputs=2)
        inner = _gated(builder, activation, gate, up)
        outputs.append(biased(linear(builder, inner, down.part(number, config.count)), down_bias, number))
    return outputs
