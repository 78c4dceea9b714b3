"""Attention over a KV cache that is updated in place (Gemma4TextAttention), rotary embeddings, positions and masks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from ondevice.bundle_format.graph_io import AttentionKind
from ondevice.bundle_format.model_config import LayerConfig, Rope
from ondevice_export.graph.graph_builder import GraphBuilder
from ondevice_export.graph.weights import Module


@dataclass(frozen=True)
class KeyValue:
    """The key and value caches of a layer, each [1, S, kv_heads * head_dim]."""

    key: ir.Value
    value: ir.Value

    def write(self, builder: GraphBuilder, new: KeyValue, index: ir.Value) -> KeyValue:
        """Write new rows from row `index`, int64[1], on: in place where past and present are bound to one buffer."""
        return KeyValue(
            builder.op("TensorScatter", self.key, new.key, index, axis=-2),
            builder.op("TensorScatter", self.value, new.value, index, axis=-2),
        )


class Attention:
    """The self-attention of one layer."""

    def __init__(self, module: Module, layer: LayerConfig) -> None:
        self._module = module
        self._layer = layer
        self._builder = module.builder
        self._group = module.config.query_heads // layer.kv_heads
        """Number of query heads per KV head."""

    def attend(self, x: ir.Value, rows: TokenRows, cache: KeyValue) -> ir.Value:
        """`o_proj(softmax(rope(q_norm(q_proj(x))) @ k.T + mask) @ v)`, scale 1: [T, H] -> [T, H].

        The query heads that share a KV head become rows of one head. ONNX Runtime rounds a single row (GEMV)
        differently from the same row among others (GEMM); with two or more query heads per KV head, every product has
        at least two rows.
        """
        heads, kv = self._module.config.query_heads, self._layer.kv_heads
        query = self._head_norm(self._module.linear(x, "q_proj"), heads, self._module.vector("q_norm.weight"))
        query = _rotate(self._builder, query, rows.rotary(self._layer), heads=heads)
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

    def new_rows(self, x: ir.Value, rows: TokenRows, *, k_eq_v: bool) -> KeyValue:
        """The T new rows of the cache, [1, T, kv_heads * head_dim].

        `k = rope(k_norm(k_proj(x)))`, `v = v_norm(v_proj(x))`; with `k_eq_v`, v is made from k_proj's output.
        """
        heads = self._layer.kv_heads
        key = self._module.linear(x, "k_proj")
        value = key if k_eq_v else self._module.linear(x, "v_proj")
        key = self._head_norm(key, heads, self._module.vector("k_norm.weight"))
        unit = self._builder.constant(np.ones(self._layer.head_dim, np.float32))
        return KeyValue(
            _rotate(self._builder, key, rows.rotary(self._layer), heads=heads), self._head_norm(value, heads, unit)
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


class TokenRows:
    """Positions [T] and masks [T, S] per attention kind.

    The rotary angles and repeated masks that layers derive from them are added to the graph once and shared.
    """

    def __init__(
        self,
        builder: GraphBuilder,
        positions: ir.Value,
        masks: Mapping[AttentionKind, ir.Value],
        ropes: Mapping[AttentionKind, Rope],
    ) -> None:
        self._builder = builder
        self._positions = positions
        self._masks = masks
        self._ropes = ropes
        self._rotary: dict[tuple[AttentionKind, int], tuple[ir.Value, ir.Value]] = {}
        self._folded: dict[tuple[AttentionKind, int], ir.Value] = {}

    def select(self, wanted: ir.Value) -> TokenRows:
        """The same for the rows `wanted` [R] alone."""
        masks = {kind: self._builder.op("Gather", mask, wanted, axis=0) for kind, mask in self._masks.items()}
        return TokenRows(self._builder, self._builder.op("Gather", self._positions, wanted, axis=0), masks, self._ropes)

    def rotary(self, layer: LayerConfig) -> tuple[ir.Value, ir.Value]:
        """cos and sin of a layer's rotary angles, each [1, T, head_dim / 2]."""
        key = (layer.kind, layer.head_dim)
        if key not in self._rotary:
            self._rotary[key] = _cos_sin(self._builder, self._ropes[layer.kind], layer.head_dim, self._positions)
        return self._rotary[key]

    def mask(self, kind: AttentionKind, group: int) -> ir.Value:
        """The mask [T * group, S]: each row of [T, S] repeated `group` times, for query heads folded into rows."""
        if group == 1:
            return self._masks[kind]
        key = (kind, group)
        if key not in self._folded:
            builder = self._builder
            column = builder.op("Unsqueeze", self._masks[kind], builder.integers(1))
            repeated = builder.op("Expand", column, builder.integers(1, group, 1))
            flat = builder.op("Concat", builder.integers(-1), builder.op("Shape", self._masks[kind], start=1), axis=0)
            self._folded[key] = builder.op("Reshape", repeated, flat)
        return self._folded[key]


def _cos_sin(builder: GraphBuilder, rope: Rope, head_dim: int, positions: ir.Value) -> tuple[ir.Value, ir.Value]:
    """cos and sin [1, T, head_dim / 2] of positions [T] (Gemma4TextRotaryEmbedding).

    They are computed from the positions, because a table for the whole context would take 270 MB.
    """
    column = builder.op("Unsqueeze", builder.op("Cast", positions, to=ir.DataType.FLOAT), builder.integers(0, 2))
    angles = builder.op("Mul", column, builder.constant(rope.frequencies(head_dim)))
    return builder.op("Cos", angles), builder.op("Sin", angles)


def _rotate(builder: GraphBuilder, x: ir.Value, angles: tuple[ir.Value, ir.Value], *, heads: int) -> ir.Value:
    """`x * cos + rotate_half(x) * sin` on [1, T, heads * head_dim], angles = (cos, sin) (apply_rotary_pos_emb)."""
    return builder.op("RotaryEmbedding", x, *angles, num_heads=heads, interleaved=0)
