"""Per-layer embeddings (PLE): a small second embedding that every layer adds its own slice of."""

from __future__ import annotations

import math

import onnx_ir as ir

from ondevice_export.graph.block import Block
from ondevice_export.graph.matrix import gather
from ondevice_export.graph.mlp import gelu


def per_layer_inputs(block: Block, ids: ir.Value, embedded: ir.Value) -> ir.Value:
    """ids [T] and their embeddings [T, H] -> [T, layers, P].

    `(norm(projection(embedded) * H**-0.5) + table(id) * P**0.5) * 2**-0.5` (Gemma4TextModel.get_per_layer_inputs and
    project_per_layer_inputs).
    """
    tape, config, weights = block.tape, block.config, block.weights
    layers, size = len(config.layers), config.ple_size
    context = block.linear(embedded, "per_layer_model_projection")
    context = tape.reshape(tape.op("Mul", context, tape.scalar(config.hidden_size**-0.5)), -1, layers, size)
    context = block.norm(context, "per_layer_projection_norm")
    # fp16 scales take a ninth off the largest table of E2B; the gather then answers in fp16.
    table = weights.matrix("embed_tokens_per_layer.weight", weights.widths.layers, half_scales=True)
    own = tape.op("Mul", tape.reshape(gather(tape, table, ids), -1, layers, size), tape.scalar(math.sqrt(size)))
    return tape.op("Mul", tape.op("Add", context, own), tape.scalar(2.0**-0.5))


def add_per_layer_input(block: Block, hidden: ir.Value, own: ir.Value) -> ir.Value:
    """`hidden + norm(projection(gelu(gate(hidden)) * own))`, own [T, P] (Gemma4TextDecoderLayer)."""
    tape = block.tape
    gate = gelu(tape, block.linear(hidden, "per_layer_input_gate"))
    update = block.linear(tape.op("Mul", gate, own), "per_layer_projection")
    return tape.op("Add", hidden, block.norm(update, "post_per_layer_input_norm"))
