"""Attention over a KV cache that is updated in place, rotary embeddings, positions and masks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from ondevice.bundle_format.decoder import Attention, Decoder
from ondevice.bundle_format.graph_io import AttentionKind
from ondevice_export.graph.graph_builder import GraphBuilder
from ondevice_export.graph.weights import Module

_MASKED_SCORES = 2
"""`qk_matmul_output_mode` of scores with the mask, whichever of mask and softcap is computed first."""


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


class SelfAttention:
    """The self-attention of one layer; with `alone`, of a graph whose forwards have a single row."""

    def __init__(self, module: Module, body: Attention, *, alone: bool = False) -> None:
        self._module = module
        self._body = body
        self._builder = module.builder
        self._copies = 2 if body.heads == body.kv_heads and not alone else 1
        """How often every query head occurs: see `attend`."""
        self._group = self._copies * body.heads // body.kv_heads
        """Number of query heads per KV head, with the copies."""

    def attend(self, x: ir.Value, rows: TokenRows, cache: KeyValue) -> ir.Value:
        """`o_proj(softmax(rope(q_norm(q_proj(x))) @ k.T * scale + mask) @ v)`: [T, H] -> [T, H], with sinks if any.

        The query heads that share a KV head become rows of one head. ONNX Runtime rounds a single row (GEMV)
        differently from the same row among others (GEMM); with two or more query heads per KV head, every product has
        at least two rows. Where each query head has a KV head of its own, it is computed twice.
        """
        body, kv = self._body, self._body.kv_heads
        query = self._normed(self._projected(x, "q_proj"), body.heads, "q_norm" if body.q_norm else None)
        query = self._rotated(query, rows, body.heads)
        inputs = self._fold(query), cache.key, cache.value, rows.mask(body.kind, self._group)
        sizes: dict[str, Any] = {"q_num_heads": kv, "kv_num_heads": kv, "scale": body.scale}
        if body.softcap is not None:
            attended = self._capped(*inputs, body.softcap)
        elif body.sinks:
            attended = self._beside_sinks(*inputs, sizes)
        else:
            attended = self._builder.op("Attention", *inputs, **sizes)
        unfolded = self._unfold(attended)
        if body.gated:
            gate = self._builder.op("Sigmoid", self._module.linear(x, "gate_proj"))
            unfolded = self._builder.op("Mul", unfolded, gate)
        out = self._module.linear(unfolded, "o_proj")
        return self._builder.op("Add", out, self._module.vector("o_proj.bias")) if body.output_bias else out

    def new_rows(self, x: ir.Value, rows: TokenRows) -> KeyValue:
        """The T new rows of the cache, [1, T, kv_heads * head_dim].

        `k = rope(k_norm(k_proj(x)))`, `v = v_norm(v_proj(x))`; with `k_eq_v`, v is made from k_proj's output.
        """
        body, heads = self._body, self._body.kv_heads
        key = self._projected(x, "k_proj")
        value = key if body.k_eq_v else self._projected(x, "v_proj")
        key = self._normed(key, heads, "k_norm" if body.k_norm else None)
        if body.v_norm:
            unit = self._builder.constant(np.ones(body.head_dim, np.float32))
            value = head_norm(self._module, value, (heads, body.head_dim), unit)
        else:
            value = self._builder.reshape(value, 1, -1, body.kv_width)
        return KeyValue(self._rotated(key, rows, heads), value)

    def _beside_sinks(
        self, query: ir.Value, key: ir.Value, value: ir.Value, mask: ir.Value, sizes: dict[str, Any]
    ) -> ir.Value:
        """Attention whose softmax has one more score, a head's sink s, of a position without a value.

        It is attention without sinks, times sum(e**scores) / (sum(e**scores) + e**s) = sigmoid(log(sum) - s).
        """
        builder, kv, head_dim = self._builder, self._body.kv_heads, self._body.head_dim
        attended, _, _, scores = builder.ops(
            "Attention", query, key, value, mask, outputs=4, qk_matmul_output_mode=_MASKED_SCORES, **sizes
        )
        total = builder.op("ReduceLogSumExp", scores, builder.integers(-1), keepdims=1)
        sinks = self._module.array("sinks", self._module.read("sinks"), (kv, 1, self._body.heads // kv))
        share = builder.op("Sigmoid", builder.op("Sub", builder.reshape(total, kv, -1, self._group), sinks))
        share = builder.op("Unsqueeze", builder.op("Transpose", share, perm=[1, 2, 0]), builder.integers(-1))
        weighed = builder.op("Mul", builder.reshape(attended, -1, self._group, kv, head_dim), share)
        return builder.reshape(weighed, 1, -1, kv * head_dim)

    def _capped(self, query: ir.Value, key: ir.Value, value: ir.Value, mask: ir.Value, cap: float) -> ir.Value:
        """Attention whose scores become cap * tanh(score / cap) before the mask.

        The operator Attention has a softcap too, which ONNX Runtime 1.26 computes after the mask, so that masked scores
        are -cap.
        """
        builder, kv, head_dim = self._builder, self._body.kv_heads, self._body.head_dim
        rows, values = (
            builder.op("Transpose", builder.reshape(x, -1, kv, head_dim), perm=[1, 0, 2]) for x in (query, value)
        )
        keys = builder.op("Transpose", builder.reshape(key, -1, kv, head_dim), perm=[1, 2, 0])
        scores = builder.op("Mul", builder.op("MatMul", rows, keys), builder.scalar(self._body.scale / cap))
        capped = builder.op("Mul", builder.op("Tanh", scores), builder.scalar(cap))
        seen = builder.op("Where", mask, capped, builder.scalar(-np.inf))
        mixed = builder.op("MatMul", builder.op("Softmax", seen, axis=-1), values)
        return builder.reshape(builder.op("Transpose", mixed, perm=[1, 0, 2]), 1, -1, kv * head_dim)

    def _projected(self, x: ir.Value, name: str) -> ir.Value:
        out = self._module.linear(x, name)
        return self._builder.op("Add", out, self._module.vector(f"{name}.bias")) if self._body.bias else out

    def _normed(self, x: ir.Value, heads: int, name: str | None) -> ir.Value:
        """[T, heads * head_dim] -> [1, T, heads * head_dim], with a norm of each head, or of all together, if there is
        one.
        """
        size = self._body.head_dim
        if name is None:
            return self._builder.reshape(x, 1, -1, heads * size)
        normed = (1, heads * size) if self._body.whole_norms else (heads, size)
        return head_norm(self._module, x, normed, self._module.vector(f"{name}.weight"))

    def _rotated(self, x: ir.Value, rows: TokenRows, heads: int) -> ir.Value:
        rotary = self._body.rotary
        return x if rotary is None else rotate(self._builder, x, rows.angles(rotary), heads=heads)

    def _fold(self, query: ir.Value) -> ir.Value:
        """[1, T, kv * group * head_dim] -> [1, T * group, kv * head_dim]."""
        kv, head_dim = self._body.kv_heads, self._body.head_dim
        if self._copies > 1:
            once = self._builder.reshape(query, -1, 1, kv * head_dim)
            query = self._builder.op("Concat", *[once] * self._copies, axis=1)
        elif kv > 1 and self._group > 1:
            split = self._builder.reshape(query, -1, kv, self._group, head_dim)
            query = self._builder.op("Transpose", split, perm=[0, 2, 1, 3])
        return self._builder.reshape(query, 1, -1, kv * head_dim)

    def _unfold(self, attended: ir.Value) -> ir.Value:
        """[1, T * group, kv * head_dim] -> [T, kv * group * head_dim]."""
        kv, head_dim, builder = self._body.kv_heads, self._body.head_dim, self._builder
        if self._copies > 1:
            split = builder.reshape(attended, -1, self._copies * kv * head_dim)
            first, end, axis = (builder.integers(number) for number in (0, kv * head_dim, 1))
            return builder.op("Slice", split, first, end, axis)
        if kv > 1 and self._group > 1:
            split = builder.reshape(attended, -1, self._group, kv, head_dim)
            attended = builder.op("Transpose", split, perm=[0, 2, 1, 3])
        return builder.reshape(attended, -1, kv * self._group * head_dim)


def head_norm(module: Module, x: ir.Value, heads: tuple[int, int], weight: ir.Value) -> ir.Value:
    """RMS norm of each head: [T, heads * head_dim] -> [1, T, heads * head_dim].

    heads : number of heads, and head_dim
    """
    split = module.builder.reshape(x, 1, -1, *heads)
    return module.builder.reshape(module.rms_norm(split, weight), 1, -1, heads[0] * heads[1])


class TokenRows:
    """Positions [T] and masks [T, S] per attention kind.

    The rotary angles and repeated masks that layers derive from them are added to the graph once and shared.
    """

    def __init__(
        self,
        builder: GraphBuilder,
        positions: ir.Value,
        masks: Mapping[AttentionKind, ir.Value],
        decoder: Decoder,
    ) -> None:
        self._builder = builder
        self._positions = positions
        self._masks = masks
        self._decoder = decoder
        self._angles: dict[int, tuple[ir.Value, ir.Value]] = {}
        self._folded: dict[tuple[AttentionKind, int], ir.Value] = {}

    def select(self, wanted: ir.Value) -> TokenRows:
        """The same for the rows `wanted` [R] alone."""
        masks = {kind: self._builder.op("Gather", mask, wanted, axis=0) for kind, mask in self._masks.items()}
        positions = self._builder.op("Gather", self._positions, wanted, axis=0)
        return TokenRows(self._builder, positions, masks, self._decoder)

    def angles(self, rotary: int) -> tuple[ir.Value, ir.Value]:
        """cos and sin of the angles of one of the decoder's rotary embeddings, each [1, T, head_dim / 2]."""
        if rotary not in self._angles:
            frequencies = self._decoder.frequencies()[rotary]
            self._angles[rotary] = _cos_sin(self._builder, frequencies, self._positions)
        return self._angles[rotary]

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


def _cos_sin(
    builder: GraphBuilder, frequencies: npt.NDArray[np.float32], positions: ir.Value
) -> tuple[ir.Value, ir.Value]:
    """cos and sin [1, T, head_dim / 2] of positions [T] times frequencies [head_dim / 2].

    They are computed from the positions, because a table for the whole context would take 270 MB.
    """
    column = builder.op("Unsqueeze", builder.op("Cast", positions, to=ir.DataType.FLOAT), builder.integers(0, 2))
    angles = builder.op("Mul", column, builder.constant(frequencies))
    return builder.op("Cos", angles), builder.op("Sin", angles)


def rotate(builder: GraphBuilder, x: ir.Value, angles: tuple[ir.Value, ir.Value], *, heads: int) -> ir.Value:
    """`x * cos + rotate_half(x) * sin` on [1, T, heads * head_dim], angles = (cos, sin) (apply_rotary_pos_emb)."""
    return builder.op("RotaryEmbedding", x, *angles, num_heads=heads, interleaved=0)
