"""A decoder layer: norms, the gated feed-forward block, experts, and its slice of the per-layer embeddings (PLE)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import onnx_ir as ir

from ondevice.bundle_format.model_config import ExpertsConfig, Target
from ondevice.bundle_format.tensor_table import PLE_TABLE
from ondevice_export.graph.graph_builder import GraphBuilder
from ondevice_export.graph.matrix import gather, linear
from ondevice_export.graph.weights import Module


def decoder_layer(
    module: Module,
    hidden: ir.Value,
    attention: Callable[[ir.Value], ir.Value],
    per_layer: ir.Value | None = None,
    experts: ExpertsConfig | None = None,
) -> ir.Value:
    """Add one decoder layer: [T, H] -> [T, H] (Gemma4TextDecoderLayer).

    1. `h += post_attention_norm(attention(input_norm(h)))`
    2. `h += post_ff_norm(mlp(pre_ff_norm(h)))`; with experts, `mlp` is replaced by the sum of the mlp and the experts,
       each normed separately.
    3. With per-layer embeddings, the layer's slice [T, P] is added (`_add_per_layer_input`).
    4. `h *= layer_scalar`
    """
    builder = module.builder
    attended = attention(module.norm(hidden, "input_layernorm"))
    hidden = builder.op("Add", hidden, module.norm(attended, "post_attention_layernorm"))
    mixed = _mlp(module.at("mlp."), module.norm(hidden, "pre_feedforward_layernorm"))
    if experts is not None:
        dense = module.norm(mixed, "post_feedforward_layernorm_1")
        chosen = module.norm(_mix_experts(module, hidden, experts), "post_feedforward_layernorm_2")
        mixed = builder.op("Add", dense, chosen)
    hidden = builder.op("Add", hidden, module.norm(mixed, "post_feedforward_layernorm"))
    if per_layer is not None:
        hidden = _add_per_layer_input(module, hidden, per_layer)
    return builder.op("Mul", hidden, module.vector("layer_scalar"))


def per_layer_inputs(module: Module, target: Target, ids: ir.Value, embedded: ir.Value) -> ir.Value:
    """The per-layer inputs of all layers: ids [T] and their embeddings [T, H] -> [T, layers, P].

    `(norm(projection(embedded) * H**-0.5) + table(id) * P**0.5) * 2**-0.5` (Gemma4TextModel.get_per_layer_inputs and
    project_per_layer_inputs).
    """
    builder, layers, size = module.builder, len(target.layers), target.ple_size
    context_factor, row_factor, factor = target.ple_factors
    context = module.linear(embedded, "per_layer_model_projection")
    context = builder.reshape(builder.op("Mul", context, builder.scalar(context_factor)), -1, layers, size)
    context = module.norm(context, "per_layer_projection_norm")
    # fp16 scales make the largest table of E2B a ninth smaller; the gather's output is then fp16.
    table = module.matrix(PLE_TABLE, half_scales=True)
    own = builder.op("Mul", builder.reshape(gather(builder, table, ids), -1, layers, size), builder.scalar(row_factor))
    return builder.op("Mul", builder.op("Add", context, own), builder.scalar(factor))


def _add_per_layer_input(module: Module, hidden: ir.Value, own: ir.Value) -> ir.Value:
    """`hidden + norm(projection(gelu(gate(hidden)) * own))`, own [T, P] (Gemma4TextDecoderLayer)."""
    builder = module.builder
    gate = gelu(builder, module.linear(hidden, "per_layer_input_gate"))
    update = module.linear(builder.op("Mul", gate, own), "per_layer_projection")
    return builder.op("Add", hidden, module.norm(update, "post_per_layer_input_norm"))


def _mlp(module: Module, x: ir.Value) -> ir.Value:
    """`down(gelu(gate(x)) * up(x))`: [T, H] -> [T, H] (Gemma4TextMLP)."""
    gate = gelu(module.builder, module.linear(x, "gate_proj"))
    return module.linear(module.builder.op("Mul", gate, module.linear(x, "up_proj")), "down_proj")


def gelu(builder: GraphBuilder, x: ir.Value) -> ir.Value:
    """GELU in its tanh approximation (gelu_pytorch_tanh)."""
    return builder.op("Gelu", x, approximate="tanh")


def _mix_experts(module: Module, hidden: ir.Value, config: ExpertsConfig) -> ir.Value:
    """`sum of weight * expert(pre_ff_norm_2(hidden))` over the experts of each row: [T, H] -> [T, H].

    Source: Gemma4TextDecoderLayer, Gemma4TextExperts.

    Each expert is two matrices and runs on the rows routed to it, often none: rows are sorted by expert, split, and
    put back in order. Two rejected alternatives: `com.microsoft.QMoE` would be one node, but on CPU it has no gate
    (ONNX Runtime 1.31: "FC3 gating is not yet implemented"). A loop whose body gathers an expert's weights also needs
    few nodes, but MatMulNBits then unpacks them to float32 in every run: 28 ms, against 0.4 ms for a constant matrix.
    """
    builder, size = module.builder, module.config.hidden_size
    with builder.scope("experts"):
        weights, chosen = _route(module, hidden, config)
        flat = builder.reshape(chosen, -1)
        order = _sorted(builder, flat)
        rows = builder.op("Div", order, builder.constant(np.array(config.top, np.int64)))
        inputs = builder.op("Gather", module.norm(hidden, "pre_feedforward_layernorm_2"), rows, axis=0)
        outputs = _run(module.at("experts."), _split(builder, inputs, flat, config.count), config)
        joined = builder.op("Concat", *outputs, axis=0)
        back = builder.op("Gather", joined, _sorted(builder, order), axis=0)
        mixed = builder.op(
            "MatMul",
            builder.reshape(weights, -1, 1, config.top),
            builder.reshape(back, -1, config.top, size),
        )
        return builder.reshape(mixed, -1, size)


def _route(module: Module, hidden: ir.Value, config: ExpertsConfig) -> tuple[ir.Value, ir.Value]:
    """Expert routing: weights [T, top] and expert indices [T, top] of each row, likeliest first (Gemma4TextRouter).

    `softmax(proj(norm(hidden) * scale * H**-0.5))`; the `top` largest are scaled to sum to 1, then multiplied by
    `per_expert_scale`. The product gets every row twice, because ONNX Runtime rounds a single row (GEMV) differently
    from the same row among others (GEMM).
    """
    builder, size, own = module.builder, module.config.hidden_size, module.at("router.")
    scale = own.read("scale") * np.float32(size**-0.5)
    normed = module.rms_norm(hidden, own.array("scale", scale))
    twice = builder.reshape(builder.op("Concat", normed, normed, axis=-1), -1, size)
    scores = builder.reshape(builder.op("Gemm", twice, own.vector("proj.weight"), transB=1), -1, 2 * config.count)
    scores = builder.op("Slice", scores, builder.integers(0), builder.integers(config.count), builder.integers(1))
    shares = builder.op("Softmax", scores, axis=-1)
    best, chosen = builder.ops("TopK", shares, builder.integers(config.top), axis=-1, outputs=2)
    best = builder.op("Div", best, builder.op("ReduceSum", best, builder.integers(-1), keepdims=1))
    return builder.op("Mul", best, builder.op("Gather", own.vector("per_expert_scale"), chosen, axis=0)), chosen


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


def _run(module: Module, parts: Sequence[ir.Value], config: ExpertsConfig) -> list[ir.Value]:
    """Run each expert on its part of the rows: `down(gelu(gate(x)) * up(x))`; gate and up are one stored matrix."""
    builder, gate_up, down = module.builder, module.matrix("gate_up_proj"), module.matrix("down_proj")
    outputs = []
    for number, part in enumerate(parts):
        both = linear(builder, part, gate_up.part(number, config.count))
        gate, up = builder.ops("Split", both, axis=-1, num_outputs=2, outputs=2)
        inner = builder.op("Mul", gelu(builder, gate), up)
        outputs.append(linear(builder, inner, down.part(number, config.count)))
    return outputs
