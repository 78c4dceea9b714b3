"""What every component of a decoder is recorded with."""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir

from ondevice_export.config import TextConfig
from ondevice_export.graph.tape import Tape
from ondevice_export.graph.weights import Weights


@dataclass(frozen=True)
class Block:
    """A place in the model: the graph under construction, the configuration, and the weights below one prefix."""

    tape: Tape
    config: TextConfig
    weights: Weights

    def at(self, prefix: str) -> Block:
        """The block below a prefix."""
        return Block(self.tape, self.config, self.weights.at(prefix))

    def linear(self, x: ir.Value, name: str) -> ir.Value:
        """`x @ weight.T`: [T, width] -> [T, rows]."""
        return self.weights.linear(x, f"{name}.weight")

    def norm(self, x: ir.Value, name: str) -> ir.Value:
        """`rms_norm` with the weight of this name."""
        return self.rms_norm(x, self.weights.vector(f"{name}.weight"))

    def rms_norm(self, x: ir.Value, weight: ir.Value) -> ir.Value:
        """`x * (mean(x**2) + eps)**-0.5 * weight` over the last axis (Gemma4RMSNorm)."""
        return self.tape.op("RMSNormalization", x, weight, axis=-1, epsilon=self.config.norm_eps)
