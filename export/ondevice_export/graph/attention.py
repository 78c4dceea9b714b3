"""Attention over a cache that is written in place (Gemma4TextAttention)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from ondevice_export.config import LayerConfig
from ondevice_export.graph.graph_builder import GraphBuilder
from ondevice_export.graph.module_builder import ModuleBuilder
from ondevice_export.graph.rope import rotate
from ondevice_export.graph.token_rows import TokenRows


@dataclass(frozen=True)
class KeyValue:
    """A layer's cache, each [1, S, kv_heads * head_dim]."""

    key: ir.Value
    value: ir.Value

    def write(self, builder: GraphBuilder, new: KeyValue, index: ir.Value) -> KeyValue:
        """Put new rows at `index` [1]; ONNX Runtime does it in place when past and present are one buffer."""
        return KeyValue(
            builder.op("TensorScatter", self.key, new.key, index, axis=-2),
            builder.op("TensorScatter", self.value, new.value, index, axis=-2),
        )


class Attention:
    """The self-attention of one layer."""

    def __init__(self, module: ModuleBuilder, layer: LayerConfig) -> None:
        self._module = module
        self._layer = layer
        self._builder = module.builder
        self._group = module.config.query_heads // layer.kv_heads
        """Query heads that share a KV head."""

    def attend(self, x: ir.Value, rows: TokenRows, cache: KeyValue) -> ir.Value:
        """`o_proj(softmax(rope(q_norm(q_proj(x))) @ k.T + mask) @ v)`, scale 1: [T, H] -> [T, H].

        The query heads that share a KV head become rows of one head. ONNX Runtime rounds a lone row (GEMV)
        differently from the same row among others (GEMM); with two heads per KV head or more, no row is ever alone.
        """
        heads, kv = self._module.config.query_heads, self._layer.kv_heads
        query = self._head_norm(self._module.linear(x, "q_proj"), heads, self._module.weights.vector("q_norm.weight"))
        query = rotate(self._builder, query, rows.rotary(self._layer), heads=heads)
        attended = self._builder.op(
            "Attention",
            self._fold(query),
            cache.key,
            cache.value,
            rows.mask(self._layer.kind, self._group),
            q_num_heads=kv,
            kv_num_heads=kv,
            scale=1.0,
        )
        return self._module.linear(self._unfold(attended), "o_proj")

    def new_rows(self, x: ir.Value, rows: TokenRows) -> KeyValue:
        """The T new rows of the cache, [1, T, kv_heads * head_dim].

        `k = rope(k_norm(k_proj(x)))`, `v = v_norm(v_proj(x))`; with k_eq_v, v is made from k_proj's output.
        """
        heads = self._layer.kv_heads
        key = self._module.linear(x, "k_proj")
        value = key if self._layer.k_eq_v else self._module.linear(x, "v_proj")
        key = self._head_norm(key, heads, self._module.weights.vector("k_norm.weight"))
        unit = self._builder.constant(np.ones(self._layer.head_dim, np.float32))
        return KeyValue(
            rotate(self._builder, key, rows.rotary(self._layer), heads=heads), self._head_norm(value, heads, unit)
        )

    def _head_norm(self, x: ir.Value, heads: int, weight: ir.Value) -> ir.Value:
        """RMS norm of each head: [T, heads * head_dim] -> [1, T, heads * head_dim]."""
        split = self._builder.reshape(x, 1, -1, heads, self._layer.head_dim)
        return self._builder.reshape(self._module.rms_norm(split, weight), 1, -1, heads * self._layer.head_dim)

    def _fold(self, query: ir.Value) -> ir.Value:
        """[1, T, kv * group * head_dim] -> [1, T * group, kv * head_dim]."""
        kv, head_dim = self._layer.kv_heads, self._layer.head_dim
        if kv > 1 and self._group > 1:
            split = self._builder.reshape(query, -1, kv, self._group, head_dim)
            query = self._builder.op("Transpose", split, perm=[0, 2, 1, 3])
        return self._builder.reshape(query, 1, -1, kv * head_dim)

    def _unfold(self, attended: ir.Value) -> ir.Value:
        """[1, T * group, kv * head_dim] -> [T, kv * group * head_dim]."""
        kv, head_dim = self._layer.kv_heads, self._layer.head_dim
        if kv > 1 and self._group > 1:
            split = self._builder.reshape(attended, -1, self._group, kv, head_dim)
            attended = self._builder.op("Transpose", split, perm=[0, 2, 1, 3])
        return self._builder.reshape(attended, -1, kv * self._group * head_dim)
