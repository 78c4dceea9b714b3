"""Per-layer embeddings (PLE): a small second embedding that every layer adds its own slice of."""

from __future__ import annotations

import math

import onnx_ir as ir

from ondevice_export.config import TextConfig
from ondevice_export.graph.matrix import gather
from ondevice_export.graph.mlp import gelu
from ondevice_export.graph.norm import rms_norm
from ondevice_export.graph.tape import Tape
from ondevice_export.graph.weights import Weights


def per_layer_inputs(tape: Tape, config: TextConfig, weights: Weights, ids: ir.Value, embedded: ir.Value) -> ir.Value:
    """ids [T] and their embeddings [T, H] -> [T, layers, P].

    `(norm(projection(embedded) * H**-0.5) + table(id) * P**0.5) * 2**-0.5` (Gemma4TextModel.get_per_layer_inputs and
    project_per_layer_inputs).
    """
    layers, size = len(config.layers), config.ple_size
    context = weights.linear(embedded, "per_layer_model_projection.weight")
    context = tape.reshape(tape.op("Mul", context, tape.scalar(config.hidden_size**-0.5)), -1, layers, size)
    context = rms_norm(tape, context, weights.vector("per_layer_projection_norm.weight"), config.norm_eps)
    # Scales of fp16 halve a sixth of the largest table of E2B; the gather then answers in fp16.
    table = weights.matrix("embed_tokens_per_layer.weight", weights.bits, half_scales=True)
    own = tape.op("Mul", tape.reshape(gather(tape, table, ids), -1, layers, size), tape.scalar(math.sqrt(size)))
    return tape.op("Mul", tape.op("Add", context, own), tape.scalar(2.0**-0.5))


def add_per_layer_input(tape: Tape, config: TextConfig, weights: Weights, hidden: ir.Value, own: ir.Value) -> ir.Value:
    """`hidden + norm(projection(gelu(gate(hidden)) * own))`, own [T, P] (Gemma4TextDecoderLayer)."""
    gate = gelu(tape, weights.linear(hidden, "per_layer_input_gate.weight"))
    update = weights.linear(tape.op("Mul", gate, own), "per_layer_projection.weight")
    norm = weights.vector("post_per_layer_input_norm.weight")
    return tape.op("Add", hidden, rms_norm(tape, update, norm, config.norm_eps))
