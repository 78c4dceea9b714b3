"""Attention over a cache that is written in place (Gemma4TextAttention)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from ondevice_export.config import LayerConfig, TextConfig
from ondevice_export.graph.norm import rms_norm
from ondevice_export.graph.rope import rotate
from ondevice_export.graph.rows import Rows
from ondevice_export.graph.tape import Tape
from ondevice_export.graph.weights import Weights


@dataclass(frozen=True)
class KeyValue:
    """A layer's cache, each [1, S, kv_heads * head_dim]."""

    key: ir.Value
    value: ir.Value


def attend(
    tape: Tape, config: TextConfig, layer: LayerConfig, weights: Weights, x: ir.Value, rows: Rows, cache: KeyValue
) -> ir.Value:
    """`o_proj(softmax(rope(q_norm(q_proj(x))) @ k.T + mask) @ v)`, scale 1: [T, H] -> [T, H].

    The query heads that share a KV head become rows of one head. ONNX Runtime rounds a lone row (GEMV) differently
    from the same row among others (GEMM); with at least two heads per KV head no row is ever alone.
    """
    kv, group = layer.kv_heads, config.query_heads // layer.kv_heads
    query = weights.linear(x, "q_proj.weight")
    query = _head_norm(
        tape, query, config.query_heads, layer.head_dim, weights.vector("q_norm.weight"), config.norm_eps
    )
    query = rotate(tape, query, *rows.rotary(layer), heads=config.query_heads)
    attended = tape.op(
        "Attention",
        _fold(tape, query, kv, group, layer.head_dim),
        cache.key,
        cache.value,
        rows.mask(layer.kind, group),
        q_num_heads=kv,
        kv_num_heads=kv,
        scale=1.0,
    )
    return weights.linear(_unfold(tape, attended, kv, group, layer.head_dim), "o_proj.weight")


def new_key_value(
    tape: Tape, config: TextConfig, layer: LayerConfig, weights: Weights, x: ir.Value, rows: Rows
) -> KeyValue:
    """The T new rows of the cache, [1, T, kv_heads * head_dim].

    `k = rope(k_norm(k_proj(x)))`, `v = v_norm(v_proj(x))`; with k_eq_v, v is made from k_proj's output.
    """
    key = weights.linear(x, "k_proj.weight")
    value = key if layer.k_eq_v else weights.linear(x, "v_proj.weight")
    unit = tape.constant(np.ones(layer.head_dim, np.float32))
    key = _head_norm(tape, key, layer.kv_heads, layer.head_dim, weights.vector("k_norm.weight"), config.norm_eps)
    key = rotate(tape, key, *rows.rotary(layer), heads=layer.kv_heads)
    return KeyValue(key, _head_norm(tape, value, layer.kv_heads, layer.head_dim, unit, config.norm_eps))


def write_cache(tape: Tape, past: KeyValue, new: KeyValue, index: ir.Value) -> KeyValue:
    """Put the new rows at `index` [1]; ONNX Runtime does it in place when past and present are one buffer."""
    return KeyValue(
        tape.op("TensorScatter", past.key, new.key, index, axis=-2),
        tape.op("TensorScatter", past.value, new.value, index, axis=-2),
    )


def _head_norm(tape: Tape, x: ir.Value, heads: int, head_dim: int, weight: ir.Value, eps: float) -> ir.Value:
    """RMS norm of each head: [T, heads * head_dim] -> [1, T, heads * head_dim]."""
    normed = rms_norm(tape, tape.reshape(x, 1, -1, heads, head_dim), weight, eps)
    return tape.reshape(normed, 1, -1, heads * head_dim)


def _fold(tape: Tape, query: ir.Value, kv: int, group: int, head_dim: int) -> ir.Value:
    """[1, T, kv * group * head_dim] -> [1, T * group, kv * head_dim]."""
    if kv > 1 and group > 1:
        query = tape.op("Transpose", tape.reshape(query, -1, kv, group, head_dim), perm=[0, 2, 1, 3])
    return tape.reshape(query, 1, -1, kv * head_dim)


def _unfold(tape: Tape, attended: ir.Value, kv: int, group: int, head_dim: int) -> ir.Value:
    """[1, T * group, kv * head_dim] -> [T, kv * group * head_dim]."""
    if kv > 1 and group > 1:
        attended = tape.op("Transpose", tape.reshape(attended, -1, group, kv, head_dim), perm=[0, 2, 1, 3])
    return tape.reshape(attended, -1, kv * group * head_dim)
