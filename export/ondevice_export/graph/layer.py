"""One decoder layer."""

from __future__ import annotations

from collections.abc import Callable

import onnx_ir as ir

from ondevice_export.config import TextConfig
from ondevice_export.graph.mlp import mlp
from ondevice_export.graph.norm import rms_norm
from ondevice_export.graph.per_layer import add_per_layer_input
from ondevice_export.graph.tape import Tape
from ondevice_export.graph.weights import Weights


def decoder_layer(
    tape: Tape,
    config: TextConfig,
    weights: Weights,
    hidden: ir.Value,
    attention: Callable[[ir.Value], ir.Value],
    per_layer: ir.Value | None,
) -> ir.Value:
    """[T, H] -> [T, H] (Gemma4TextDecoderLayer).

    `h += post_attention_norm(attention(input_norm(h)))`; `h += post_ff_norm(mlp(pre_ff_norm(h)))`; with PLE the
    layer's slice [T, P] is added; last `h *= layer_scalar`.
    """

    def norm(x: ir.Value, name: str) -> ir.Value:
        return rms_norm(tape, x, weights.vector(f"{name}.weight"), config.norm_eps)

    attended = attention(norm(hidden, "input_layernorm"))
    hidden = tape.op("Add", hidden, norm(attended, "post_attention_layernorm"))
    mixed = mlp(tape, weights.at("mlp."), norm(hidden, "pre_feedforward_layernorm"))
    hidden = tape.op("Add", hidden, norm(mixed, "post_feedforward_layernorm"))
    if per_layer is not None:
        hidden = add_per_layer_input(tape, config, weights, hidden, per_layer)
    return tape.op("Mul", hidden, weights.vector("layer_scalar"))
