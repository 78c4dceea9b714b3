"""Per-layer embeddings (PLE): a small second embedding that every layer adds its own slice of."""

from __future__ import annotations

import math

import onnx_ir as ir

from ondevice_export.graph.matrix import gather
from ondevice_export.graph.mlp import gelu
from ondevice_export.graph.module_builder import ModuleBuilder


def per_layer_inputs(module: ModuleBuilder, ids: ir.Value, embedded: ir.Value) -> ir.Value:
    """ids [T] and their embeddings [T, H] -> [T, layers, P].

    `(norm(projection(embedded) * H**-0.5) + table(id) * P**0.5) * 2**-0.5` (Gemma4TextModel.get_per_layer_inputs and
    project_per_layer_inputs).
    """
    builder, config, weights = module.builder, module.config, module.weights
    layers, size = len(config.layers), config.ple_size
    context = module.linear(embedded, "per_layer_model_projection")
    context = builder.reshape(builder.op("Mul", context, builder.scalar(config.hidden_size**-0.5)), -1, layers, size)
    context = module.norm(context, "per_layer_projection_norm")
    # fp16 scales take a ninth off the largest table of E2B; the gather then answers in fp16.
    table = weights.matrix("embed_tokens_per_layer.weight", weights.formats.layers, half_scales=True)
    own = builder.op(
        "Mul", builder.reshape(gather(builder, table, ids), -1, layers, size), builder.scalar(math.sqrt(size))
    )
    return builder.op("Mul", builder.op("Add", context, own), builder.scalar(2.0**-0.5))


def add_per_layer_input(module: ModuleBuilder, hidden: ir.Value, own: ir.Value) -> ir.Value:
    """`hidden + norm(projection(gelu(gate(hidden)) * own))`, own [T, P] (Gemma4TextDecoderLayer)."""
    builder = module.builder
    gate = gelu(builder, module.linear(hidden, "per_layer_input_gate"))
    update = module.linear(builder.op("Mul", gate, own), "per_layer_projection")
    return builder.op("Add", hidden, module.norm(update, "post_per_layer_input_norm"))
