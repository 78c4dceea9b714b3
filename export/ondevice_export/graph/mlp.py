"""The gated feed-forward block."""

from __future__ import annotations

import onnx_ir as ir

from ondevice_export.graph.tape import Tape
from ondevice_export.graph.weights import Weights


def gelu(tape: Tape, x: ir.Value) -> ir.Value:
    """The tanh approximation (gelu_pytorch_tanh)."""
    return tape.op("Gelu", x, approximate="tanh")


def mlp(tape: Tape, weights: Weights, x: ir.Value) -> ir.Value:
    """`down(gelu(gate(x)) * up(x))`: [T, H] -> [T, H] (Gemma4TextMLP)."""
    gate = gelu(tape, weights.linear(x, "gate_proj.weight"))
    return weights.linear(tape.op("Mul", gate, weights.linear(x, "up_proj.weight")), "down_proj.weight")
