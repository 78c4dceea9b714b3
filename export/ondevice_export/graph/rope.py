"""Rotary position embeddings."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from ondevice_export.config import Rope
from ondevice_export.graph.graph_builder import GraphBuilder


def inverse_frequencies(rope: Rope, head_dim: int) -> npt.NDArray[np.float32]:
    """Angle per position of each pair of numbers, [head_dim / 2]; zero beyond the rotated share.

    Source: `_compute_proportional_rope_parameters`. In float64 and rounded at the end: numpy's float32 power is another
    function with AVX-512 than without, 1 or 2 units of the last place apart.
    """
    rotated = int(rope.rotated * head_dim // 2)
    exponents = np.arange(0, 2 * rotated, 2) / head_dim
    frequencies = np.zeros(head_dim // 2, np.float32)
    frequencies[:rotated] = 1.0 / np.float64(rope.theta) ** exponents / rope.factor
    return frequencies


def cos_sin(builder: GraphBuilder, rope: Rope, head_dim: int, positions: ir.Value) -> tuple[ir.Value, ir.Value]:
    """cos and sin [1, T, head_dim / 2] of positions [T] (Gemma4TextRotaryEmbedding).

    They are computed from the positions: a table of the whole context would take 270 MB.
    """
    column = builder.op("Unsqueeze", builder.op("Cast", positions, to=ir.DataType.FLOAT), builder.integers(0, 2))
    angles = builder.op("Mul", column, builder.constant(inverse_frequencies(rope, head_dim)))
    return builder.op("Cos", angles), builder.op("Sin", angles)


def rotate(builder: GraphBuilder, x: ir.Value, angles: tuple[ir.Value, ir.Value], *, heads: int) -> ir.Value:
    """`x * cos + rotate_half(x) * sin` on [1, T, heads * head_dim], angles = (cos, sin) (apply_rotary_pos_emb)."""
    return builder.op("RotaryEmbedding", x, *angles, num_heads=heads, interleaved=0)
