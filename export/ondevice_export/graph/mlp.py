"""The gated feed-forward block."""

from __future__ import annotations

import onnx_ir as ir

from ondevice_export.graph.graph_builder import GraphBuilder
from ondevice_export.graph.module_builder import ModuleBuilder


def gelu(builder: GraphBuilder, x: ir.Value) -> ir.Value:
    """The tanh approximation (gelu_pytorch_tanh)."""
    return builder.op("Gelu", x, approximate="tanh")


def mlp(module: ModuleBuilder, x: ir.Value) -> ir.Value:
    """`down(gelu(gate(x)) * up(x))`: [T, H] -> [T, H] (Gemma4TextMLP)."""
    gate = gelu(module.builder, module.linear(x, "gate_proj"))
    return module.linear(module.builder.op("Mul", gate, module.linear(x, "up_proj")), "down_proj")
