"""One decoder layer."""

from __future__ import annotations

from collections.abc import Callable

import onnx_ir as ir

from ondevice_export.config import ExpertsConfig
from ondevice_export.graph.experts import mix_experts
from ondevice_export.graph.mlp import mlp
from ondevice_export.graph.module_builder import ModuleBuilder
from ondevice_export.graph.per_layer import add_per_layer_input


def decoder_layer(
    module: ModuleBuilder,
    hidden: ir.Value,
    attention: Callable[[ir.Value], ir.Value],
    per_layer: ir.Value | None = None,
    experts: ExpertsConfig | None = None,
) -> ir.Value:
    """[T, H] -> [T, H] (Gemma4TextDecoderLayer).

    `h += post_attention_norm(attention(input_norm(h)))`; `h += post_ff_norm(mlp(pre_ff_norm(h)))`, where with experts
    the sum of both, each after a norm of its own, takes the place of the mlp; with PLE the layer's slice [T, P] is
    added; last `h *= layer_scalar`.
    """
    builder = module.builder
    attended = attention(module.norm(hidden, "input_layernorm"))
    hidden = builder.op("Add", hidden, module.norm(attended, "post_attention_layernorm"))
    mixed = mlp(module.at("mlp."), module.norm(hidden, "pre_feedforward_layernorm"))
    if experts is not None:
        dense = module.norm(mixed, "post_feedforward_layernorm_1")
        chosen = module.norm(mix_experts(module, hidden, experts), "post_feedforward_layernorm_2")
        mixed = builder.op("Add", dense, chosen)
    hidden = builder.op("Add", hidden, module.norm(mixed, "post_feedforward_layernorm"))
    if per_layer is not None:
        hidden = add_per_layer_input(module, hidden, per_layer)
    return builder.op("Mul", hidden, module.weights.vector("layer_scalar"))
