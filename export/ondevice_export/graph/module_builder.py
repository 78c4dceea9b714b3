"""Builds one module of a decoder: the graph, the configuration, and the weights below a prefix."""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir

from ondevice_export.config import TextConfig
from ondevice_export.graph.graph_builder import GraphBuilder
from ondevice_export.graph.weights import Weights


@dataclass(frozen=True)
class ModuleBuilder:
    """What a module such as `layers.3.self_attn` is built with; its weights are named relative to that prefix."""

    builder: GraphBuilder
    config: TextConfig
    weights: Weights

    def at(self, prefix: str) -> ModuleBuilder:
        """A module inside this one."""
        return ModuleBuilder(self.builder, self.config, self.weights.at(prefix))

    def linear(self, x: ir.Value, name: str) -> ir.Value:
        """`x @ weight.T`: [T, width] -> [T, rows]."""
        return self.weights.linear(x, f"{name}.weight")

    def norm(self, x: ir.Value, name: str) -> ir.Value:
        """`rms_norm` with the weight of this name."""
        return self.rms_norm(x, self.weights.vector(f"{name}.weight"))

    def rms_norm(self, x: ir.Value, weight: ir.Value) -> ir.Value:
        """`x * (mean(x**2) + eps)**-0.5 * weight` over the last axis (Gemma4RMSNorm)."""
        return self.builder.op("RMSNormalization", x, weight, axis=-1, epsilon=self.config.norm_eps)
