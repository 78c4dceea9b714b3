"""Reads decoder layers and their attention, which the target's graph and the drafter's have in common."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from ondevice import contract
from ondevice.contract import AttentionKind
from ondevice.engines.simd.graph.experts import ExpertsReader
from ondevice.engines.simd.graph.matching import Matcher, agree, require
from ondevice.engines.simd.graph.model import Attention, DecoderLayer, Floats, Matrix, NewKeyValue, PerLayer
from ondevice.engines.simd.unsupported import UnsupportedGraphError
from ondevice.manifest import Target

LARGEST_FREQUENCY = 1e6
"""Of a rotary embedding: real ones are at most 1, and products with positions must stay finite."""


@dataclass(frozen=True)
class CacheOwner:
    """The target's layer that a cache in a graph belongs to: keys and values [1, S, kv_heads * head_dim]."""

    kind: AttentionKind
    layer: int
    kv_heads: int
    head_dim: int

    @classmethod
    def of(cls, target: Target, index: int) -> CacheOwner:
        layer = target.layers[index]
        return cls(layer.kind, index, layer.kv_heads, layer.head_dim)


@dataclass(frozen=True)
class MatchedLayer:
    """A layer that was read from a graph, and the names of values that it is connected by."""

    layer: DecoderLayer
    source: str
    """Its input."""
    entry: str
    """The normed input of its attention, of which new keys and values are made too."""
    slices: str | None
    """The per-layer embeddings of all layers, of which it takes its slice."""


class LayerReader:
    """Reads decoder layers of width `width`, each from its output to its input."""

    def __init__(self, matcher: Matcher, width: int) -> None:
        self.match = matcher
        self._match = matcher
        self._width = width

    def linear(self, value: str, width: int, rows: int | None = None) -> tuple[str, Matrix]:
        """The input and the matrix [rows, width] of a linear layer; None allows any number of rows."""
        source, matrix = self._match.linear(value)
        require(matrix.width == width and rows in (None, matrix.rows), f"{value}: {matrix.rows} x {matrix.width}")
        require(matrix.rows % 32 == 0, f"{value}: {matrix.rows} rows, no multiple of 32")
        return source, matrix

    def norm(self, value: str, width: int | None = None) -> tuple[str, Floats]:
        """The input and the weight [width] of a norm; None means the width of the layers."""
        source, weight = self._match.norm(value)
        require(len(weight) == (width or self._width), f"{value}: a norm of {len(weight)}")
        return source, weight

    def read(self, value: str, attention: AttentionReader) -> MatchedLayer:
        """The layer whose output is `value`."""
        match = self._match
        hidden, scalar = match.times(value)
        per_layer, slices = None, None
        added = match.node(hidden, "Add", 2)
        if self._is_per_layer(added.inputs[1]):
            per_layer, slices = self._per_layer(*added.inputs)
            hidden = added.inputs[0]
        middle, mixed = match.node(hidden, "Add", 2).inputs
        normed, post_norm = self.norm(mixed)
        experts = None
        if match.op(normed) == "Add":
            normed, experts = ExpertsReader(match, self._width).read(normed, middle)
        source, gate, up, down = self._mlp(normed)
        pre, pre_norm = self.norm(source)
        require(pre == middle, f"{hidden}: the feed-forward block does not read what it is added to")
        before, attended = match.node(middle, "Add", 2).inputs
        output, post_attention_norm = self.norm(attended)
        entry, read = attention.read(output)
        source, input_norm = self.norm(entry)
        require(source == before, f"{middle}: attention does not read what it is added to")
        layer = DecoderLayer(
            input_norm, read, post_attention_norm, pre_norm, gate, up, down, post_norm, per_layer, scalar, experts
        )
        return MatchedLayer(layer, before, entry, slices)

    def _mlp(self, value: str) -> tuple[str, Matrix, Matrix, Matrix]:
        """x, gate, up and down of down(gelu(gate(x)) * up(x))."""
        match = self._match
        product, down = match.linear(value)
        require(down.rows == self._width, f"{value}: {down.rows} rows")
        left, right = match.node(product, "Mul", 2).inputs
        source, gate = self.linear(match.gelu(left), self._width, down.width)
        other, up = self.linear(right, self._width, down.width)
        require(source == other, f"{product}: gate and up read different values")
        return source, gate, up, down

    def _is_per_layer(self, value: str) -> bool:
        """Whether what is added to the hidden state is made of a slice of the per-layer embeddings."""
        match = self._match
        if match.op(value) != "RMSNormalization":
            return False
        projected, _ = match.norm(value)
        if match.op(projected) == "Add":  # a dense block and experts
            return False
        product, _ = match.linear(projected)
        return match.op(product) == "Mul" and match.op(match.node(product, "Mul", 2).inputs[1]) == "Gather"

    def _per_layer(self, hidden: str, update: str) -> tuple[PerLayer, str]:
        """The per-layer embedding that adds `update` to `hidden`, and the slices that it reads."""
        match = self._match
        projected, norm = self.norm(update)
        product, projection = match.linear(projected)
        require(projection.rows == self._width, f"{projected}: {projection.rows} rows")
        left, right = match.node(product, "Mul", 2).inputs
        source, gate = self.linear(match.gelu(left), self._width, projection.width)
        require(source == hidden, f"{update}: a per-layer input that does not read what it is added to")
        slices, index = match.node(right, "Gather", 2, axis=1).inputs
        number = int(match.tensor(index, np.int64, 0))
        return PerLayer(number, gate, projection, norm), slices


class AttentionReader:
    """Reads the attention of layers, from the projection of its output to its input."""

    def __init__(
        self,
        layers: LayerReader,
        width: int,
        caches: Mapping[tuple[str, str], CacheOwner],
        positions: str = contract.POSITIONS,
        wanted: bool = False,
    ) -> None:
        """
        Args:
            layers: reader of the layers around it.
            width: of the hidden state.
            caches: owners by the names of the values with their keys and values.
            positions: name of the input with the rows' positions.
            wanted: whether these layers are computed for the wanted rows alone.
        """
        self._layers = layers
        self._match = layers.match
        self._width = width
        self._caches = caches
        self._positions = positions
        self._wanted = wanted

    def read(self, value: str) -> tuple[str, Attention]:
        """The input of the attention whose output is `value`, and the attention."""
        match = self._match
        unfolded, output = match.linear(value)
        require(output.rows == self._width, f"{value}: {output.rows} rows")
        folded, shape = match.reshaped(unfolded)
        split = match.op(folded) == "Transpose"
        inner = match.node(folded, "Transpose", 1, perm=(0, 2, 1, 3)).inputs[0] if split else folded
        attended, parts = match.reshaped(inner) if split else (inner, ())
        node = match.node(attended, "Attention", 4, scale=1.0)
        kv = match.integer(node, "q_num_heads")
        require(match.integer(node, "kv_num_heads") == kv, f"{attended}: heads")
        folded_query, key, value_cache, mask = node.inputs
        cache = self._caches.get((key, value_cache))
        if cache is None:
            raise UnsupportedGraphError(f"{attended}: a cache that is not one layer's")
        agree(kv == cache.kv_heads, f"layer {cache.layer} has {kv} KV heads instead of {cache.kv_heads}")
        head_dim = cache.head_dim
        group, rest = divmod(output.width, kv * head_dim)
        require(group > 0 and not rest, f"{value}: width {output.width}")
        require(shape == (-1, output.width), f"{unfolded}: shape {shape}")
        require(not split or parts == (-1, group, kv, head_dim), f"{inner}: shape {parts}")
        require(split == (kv > 1 and group > 1), f"{folded}: heads in an unknown order")
        self._check_mask(mask, contract.mask(cache.kind), group)
        rotated = self._unfold_query(folded_query, kv, group, head_dim, split)
        heads = kv * group
        frequencies, normed = self.rotation(rotated, heads, head_dim)
        projected, query_norm = self.head_norm(normed, heads, head_dim)
        source, query = self._layers.linear(projected, self._width, heads * head_dim)
        shape_of = (cache.kind, heads, kv, head_dim)
        return source, Attention(*shape_of, frequencies, query, query_norm, output, None, cache.layer)

    def read_new(self, key: str, value: str, entry: str, attention: Attention) -> NewKeyValue:
        """How `key` and `value` [1, T, kv_heads * head_dim], which a layer adds to its cache, are made of `entry`."""
        heads, head_dim = attention.kv_heads, attention.head_dim
        frequencies, normed = self.rotation(key, heads, head_dim)
        same = np.array_equal(frequencies, attention.frequencies)
        require(same, f"{key}: keys and queries have different rotary frequencies")
        projected, key_norm = self.head_norm(normed, heads, head_dim)
        raw_value, value_norm = self.head_norm(value, heads, head_dim)
        source, key_matrix = self._layers.linear(projected, self._width, heads * head_dim)
        value_matrix = None
        if raw_value != projected:
            other, value_matrix = self._layers.linear(raw_value, self._width, heads * head_dim)
            require(other == entry, f"{value}: values of another layer's input")
        require(source == entry, f"{key}: keys of another layer's input")
        return NewKeyValue(key_matrix, key_norm, value_matrix, value_norm)

    def rotation(self, value: str, heads: int, head_dim: int) -> tuple[Floats, str]:
        """The frequencies float32[head_dim / 2] of a rotary embedding, and its input."""
        match = self._match
        node = match.node(value, "RotaryEmbedding", 3, interleaved=0)
        require(node.attributes.get("num_heads") == heads, f"{value}: rotates {node.attributes.get('num_heads')} heads")
        source, cosines, sines = node.inputs
        angles = match.node(cosines, "Cos", 1).inputs[0]
        require(match.node(sines, "Sin", 1).inputs[0] == angles, f"{value}: cos and sin of different angles")
        column, frequencies = match.node(angles, "Mul", 2).inputs
        spread = match.node(column, "Unsqueeze", 2)
        require(match.integers(spread.inputs[1]) == (0, 2), f"{angles}: positions in an unknown form")
        cast = match.node(spread.inputs[0], "Cast", 1, to=1)
        self._expect_rows_of(cast.inputs[0], self._positions)
        found = match.floats(frequencies, 1)
        require(len(found) * 2 == head_dim and head_dim % 32 == 0, f"{value}: a head of {head_dim}")
        require(bool((np.abs(found) < LARGEST_FREQUENCY).all()), f"{value}: a frequency that is none")
        return found, source

    def head_norm(self, value: str, heads: int, head_dim: int) -> tuple[str, Floats]:
        """The input [T, heads * head_dim] of a norm over each head, and its weight [head_dim]."""
        match = self._match
        normed = match.reshape(value, 1, -1, heads * head_dim)
        split, weight = self._layers.norm(normed, head_dim)
        return match.reshape(split, 1, -1, heads, head_dim), weight

    def _unfold_query(self, value: str, kv: int, group: int, head_dim: int, split: bool) -> str:
        """The queries [1, T, heads * head_dim] whose heads were folded into rows: [1, T * group, kv * head_dim]."""
        match = self._match
        query = match.reshape(value, 1, -1, kv * head_dim)
        if not split:
            return query
        query = match.node(query, "Transpose", 1, perm=(0, 2, 1, 3)).inputs[0]
        return match.reshape(query, -1, kv, group, head_dim)

    def _check_mask(self, value: str, mask: str, group: int) -> None:
        """`value` must be the input `mask` with each row `group` times."""
        match = self._match
        if group == 1:
            self._expect_rows_of(value, mask)
            return
        repeated, shape = match.node(value, "Reshape", 2).inputs
        column, counts = match.node(repeated, "Expand", 2).inputs
        source, axes = match.node(column, "Unsqueeze", 2).inputs
        minus_one, width = match.node(shape, "Concat", 2, axis=0).inputs
        measured = match.node(width, "Shape", 1, start=1).inputs[0]
        known = (match.integers(counts), match.integers(axes), match.integers(minus_one))
        require(known == ((1, group, 1), (1,), (-1,)), f"{value}: a mask in an unknown form")
        require(source == measured, f"{value}: a mask with the shape of another")
        self._expect_rows_of(source, mask)

    def _expect_rows_of(self, value: str, name: str) -> None:
        """`value` must be the input `name`, or its wanted rows."""
        if self._wanted:
            value = self._match.selected(value)
        self._match.expect_input(value, name)
