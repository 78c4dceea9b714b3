"""One decoder layer."""

from __future__ import annotations

from collections.abc import Callable

import onnx_ir as ir

from ondevice_export.graph.mlp import mlp
from ondevice_export.graph.module_builder import ModuleBuilder
from ondevice_export.graph.per_layer import add_per_layer_input


def decoder_layer(
    module: ModuleBuilder, hidden: ir.Value, attention: Callable[[ir.Value], ir.Value], per_layer: ir.Value | None
) -> ir.Value:
    """[T, H] -> [T, H] (Gemma4TextDecoderLayer).

    `h += post_attention_norm(attention(input_norm(h)))`; `h += post_ff_norm(mlp(pre_ff_norm(h)))`; with PLE the
    layer's slice [T, P] is added; last `h *= layer_scalar`.
    """
    builder = module.builder
    attended = attention(module.norm(hidden, "input_layernorm"))
    hidden = builder.op("Add", hidden, module.norm(attended, "post_attention_layernorm"))
    mixed = mlp(module.at("mlp."), module.norm(hidden, "pre_feedforward_layernorm"))
    hidden = builder.op("Add", hidden, module.norm(mixed, "post_feedforward_layernorm"))
    if per_layer is not None:
        hidden = add_per_layer_input(module, hidden, per_layer)
    return builder.op("Mul", hidden, module.weights.vector("layer_scalar"))
