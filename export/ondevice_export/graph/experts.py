"""A mixture of experts: every row goes through the few that a router chooses for it.

Each expert is two matrices of its own and runs on the rows that chose it, often on none: rows are sorted by expert,
split, and put back in order. `com.microsoft.QMoE` would be one node, but on CPU it has no gate (ONNX Runtime 1.31: "FC3
gating is not yet implemented"). A loop whose body gathers an expert's weights is a graph of few nodes as well, but
MatMulNBits then unpacks them to float32 in every run: 28 ms where a matrix that is known beforehand takes 0.4.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from ondevice_export.config import ExpertsConfig
from ondevice_export.graph.graph_builder import GraphBuilder
from ondevice_export.graph.matrix import linear
from ondevice_export.graph.mlp import gelu
from ondevice_export.graph.module_builder import ModuleBuilder


def mix_experts(module: ModuleBuilder, hidden: ir.Value, config: ExpertsConfig) -> ir.Value:
    """`sum of weight * expert(pre_ff_norm_2(hidden))` over the experts of each row: [T, H] -> [T, H].

    Source: Gemma4TextDecoderLayer, Gemma4TextExperts.
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


def _route(module: ModuleBuilder, hidden: ir.Value, config: ExpertsConfig) -> tuple[ir.Value, ir.Value]:
    """The weights [T, top] and numbers [T, top] of each row's experts, the likeliest first (Gemma4TextRouter).

    `softmax(proj(norm(hidden) * scale * H**-0.5))`; the largest are made to sum to 1 and times `per_expert_scale`.
    Every row is multiplied twice: ONNX Runtime rounds a lone row (GEMV) differently from one among others (GEMM).
    """
    builder, size, own = module.builder, module.config.hidden_size, module.weights.at("router.")
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
    """The indices that sort numbers int64 [N], equal ones in order; of a permutation, its inverse."""
    count = builder.op("Shape", numbers)
    return builder.ops("TopK", numbers, count, axis=0, largest=0, outputs=2)[1]


def _split(builder: GraphBuilder, rows: ir.Value, experts: ir.Value, count: int) -> Sequence[ir.Value]:
    """Rows [N, H], sorted by their experts [N], in one part per expert."""
    every = builder.constant(np.arange(count))
    taken = builder.op("Equal", builder.op("Unsqueeze", experts, builder.integers(1)), every)
    sizes = builder.op("ReduceSum", builder.op("Cast", taken, to=ir.DataType.INT64), builder.integers(0), keepdims=0)
    return builder.ops("Split", rows, sizes, axis=0, outputs=count)


def _run(module: ModuleBuilder, parts: Sequence[ir.Value], config: ExpertsConfig) -> list[ir.Value]:
    """`down(gelu(gate(x)) * up(x))` by each expert of its part of the rows; gate and up are one matrix."""
    builder, weights = module.builder, module.weights
    form = weights.formats.layers
    gate_up, down = weights.matrix("gate_up_proj", form), weights.matrix("down_proj", form)
    outputs = []
    for number, part in enumerate(parts):
        both = linear(builder, part, gate_up.part(number, config.count))
        gate, up = builder.ops("Split", both, axis=-1, num_outputs=2, outputs=2)
        inner = builder.op("Mul", gelu(builder, gate), up)
        outputs.append(linear(builder, inner, down.part(number, config.count)))
    return outputs
