"""Rotary position embeddings."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from ondevice_export.config import Rope
from ondevice_export.graph.tape import Tape


def inverse_frequencies(rope: Rope, head_dim: int) -> npt.NDArray[np.float32]:
    """[head_dim / 2], zero beyond the rotated share (`_compute_proportional_rope_parameters`)."""
    rotated = int(rope.rotated * head_dim // 2)
    exponents = np.arange(0, 2 * rotated, 2, dtype=np.float32) / np.float32(head_dim)
    frequencies = np.zeros(head_dim // 2, np.float32)
    frequencies[:rotated] = np.float32(1.0) / np.float32(rope.theta) ** exponents / np.float32(rope.factor)
    return frequencies


def cos_sin(tape: Tape, rope: Rope, head_dim: int, positions: ir.Value) -> tuple[ir.Value, ir.Value]:
    """Positions [T] -> cos and sin [1, T, head_dim / 2] (Gemma4TextRotaryEmbedding).

    Computed from the positions: a table of the whole context would take 270 MB.
    """
    column = tape.op("Unsqueeze", tape.op("Cast", positions, to=ir.DataType.FLOAT), tape.integers(0, 2))
    angles = tape.op("Mul", column, tape.constant(inverse_frequencies(rope, head_dim)))
    return tape.op("Cos", angles), tape.op("Sin", angles)


def rotate(tape: Tape, x: ir.Value, turn: tuple[ir.Value, ir.Value], *, heads: int) -> ir.Value:
    """`x * cos + rotate_half(x) * sin` on [1, T, heads * head_dim], turn = (cos, sin) (apply_rotary_pos_emb)."""
    return tape.op("RotaryEmbedding", x, *turn, num_heads=heads, interleaved=0)
