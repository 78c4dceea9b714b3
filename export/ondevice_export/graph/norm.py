"""Root-mean-square norms."""

from __future__ import annotations

import onnx_ir as ir

from ondevice_export.graph.tape import Tape


def rms_norm(tape: Tape, x: ir.Value, weight: ir.Value, eps: float) -> ir.Value:
    """`x * (mean(x**2) + eps)**-0.5 * weight` over the last axis (Gemma4RMSNorm)."""
    return tape.op("RMSNormalization", x, weight, axis=-1, epsilon=eps)
