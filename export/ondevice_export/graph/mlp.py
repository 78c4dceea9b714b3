"""The gated feed-forward block."""

from __future__ import annotations

import onnx_ir as ir

from ondevice_export.graph.block import Block
from ondevice_export.graph.tape import Tape


def gelu(tape: Tape, x: ir.Value) -> ir.Value:
    """The tanh approximation (gelu_pytorch_tanh)."""
    return tape.op("Gelu", x, approximate="tanh")


def mlp(block: Block, x: ir.Value) -> ir.Value:
    """`down(gelu(gate(x)) * up(x))`: [T, H] -> [T, H] (Gemma4TextMLP)."""
    gate = gelu(block.tape, block.linear(x, "gate_proj"))
    return block.linear(block.tape.op("Mul", gate, block.linear(x, "up_proj")), "down_proj")
