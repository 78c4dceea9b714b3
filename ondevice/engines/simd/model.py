"""The target, the drafter and heads as dataclasses of layers, matrices and norms, from which forwards are planned.

`read_target`, `read_drafter` and `read_heads` build them from a bundle's configuration, which determines the tensors of
each layer, and from its data files. Notation: H is the width of the hidden state, T the number of rows of a forward;
a weight matrix has shape [rows, width] and is applied as x @ weight.T. A norm is an RMS norm, float32[width].
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ondevice.arrays import Float32Array
from ondevice.bundle_format.graph_io import AttentionKind
from ondevice.bundle_format.manifest import AS_TRAINED, Manifest
from ondevice.bundle_format.model_config import Decoder, DrafterEntry, HeadsEntry, LayerConfig, Target
from ondevice.bundle_format.tensor_table import (
    CENTROIDS,
    DRAFTER_CENTROIDS,
    DRAFTER_EMBEDDING,
    DRAFTER_ORDERING,
    EMBEDDING,
    HEAD,
    ORDERING,
    PLE_TABLE,
)
from ondevice.engines.simd.tensor_files import Matrix, TensorFiles, Tensors
from ondevice.engines.simd.unsupported import UnsupportedGraphError


@dataclass(frozen=True, eq=False)
class Attention:
    """Self-attention of a layer, without the norm of its input."""

    kind: AttentionKind
    query_heads: int
    kv_heads: int
    head_dim: int
    frequencies: Float32Array
    """Rotary frequencies, float32[head_dim / 2]: a pair of numbers is rotated by its frequency times the position."""
    query: Matrix
    query_norm: Float32Array
    output: Matrix
    new: NewKeyValue | None
    """Projections of keys and values; None if the layer reads another layer's cache."""
    source: int
    """Index of the target layer whose cache this layer reads."""


@dataclass(frozen=True, eq=False)
class NewKeyValue:
    """Projections and head norms of the keys and values that a layer writes to its own cache."""

    key: Matrix
    key_norm: Float32Array
    value: Matrix | None
    """None if the values are the output of the key projection, with `value_norm` applied."""
    value_norm: Float32Array


@dataclass(frozen=True, eq=False)
class PerLayer:
    """The block of a layer that adds its per-layer embedding: h += norm(projection(gelu(gate(h)) * slice))."""

    index: int
    """Index of the layer's slice in `PerLayerInputs`."""
    gate: Matrix
    projection: Matrix
    norm: Float32Array


@dataclass(frozen=True, eq=False)
class Experts:
    """The experts of a layer: feed-forward blocks of which every row uses the `top` with the best scores.

    The scores of a row h are router @ (h / RMS(h)). The weight of a chosen expert is the softmax over the scores of the
    chosen experts, times the expert's `scale`. The layer uses dense_norm(dense) + norm(sum of weight *
    expert(pre_norm(h))) instead of `dense`, the output of the dense block.
    """

    router: Float32Array
    """float32[experts, width], already multiplied by the weight of the router's norm."""
    scale: Float32Array
    """float32[experts]"""
    top: int
    """Number of experts that each row uses."""
    pre_norm: Float32Array
    gate_up: tuple[Matrix, ...]
    """One matrix [2 * inner, width] per expert: the rows of gate, then the rows of up."""
    down: tuple[Matrix, ...]
    """One matrix [width, inner] per expert."""
    norm: Float32Array
    """Norm of the weighted sum of the experts' outputs."""
    dense_norm: Float32Array
    """Norm of the dense block's output."""


@dataclass(frozen=True, eq=False)
class DecoderLayer:
    """One layer of the target or the drafter:

    h += post_attention_norm(attention(input_norm(h)))
    h += post_norm(down(gelu(gate(pre_norm(h))) * up(pre_norm(h)))), combined with `experts` if there are any
    h += per_layer(h), if there is one
    h *= scalar
    """

    input_norm: Float32Array
    attention: Attention
    post_attention_norm: Float32Array
    pre_norm: Float32Array
    gate: Matrix
    up: Matrix
    down: Matrix
    post_norm: Float32Array
    per_layer: PerLayer | None
    scalar: float
    experts: Experts | None = None


@dataclass(frozen=True, eq=False)
class PerLayerInputs:
    """Per-layer embeddings of all layers, float32[T, layers, size]:

    (norm(projection(embedded) * context_factor) + table[id] * row_factor) * factor
    """

    projection: Matrix
    norm: Float32Array
    table: Matrix
    layers: int
    size: int
    factors: tuple[float, float, float]
    """(context_factor, row_factor, factor)"""


@dataclass(frozen=True, eq=False)
class TargetModel:
    """The target: h = table[id] * embedding_factor, then the layers, the final norm, the head and the softcap."""

    config: Target
    table: Matrix
    """Token embedding, [vocabulary, H]."""
    per_layer: PerLayerInputs | None
    layers: tuple[DecoderLayer, ...]
    norm: Float32Array
    head: Matrix


@dataclass(frozen=True, eq=False)
class Centroids:
    """A drafter's head that scores only the tokens of the `top` clusters with the best centroid scores."""

    weights: Float32Array
    """Centroids, float32[clusters, width]."""
    top: int
    per_cluster: int
    """Number of tokens in each cluster."""
    table: Matrix
    """Rows of the head, cluster by cluster, [clusters, per_cluster * width]."""
    ids: NDArray[np.int64]
    """Token ids of these rows, int64[clusters, per_cluster]."""


@dataclass(frozen=True, eq=False)
class DrafterModel:
    """One step of the MTP drafter.

    h = pre_projection(concat(table[id] * embedding_factor, hidden)), then the layers, which read the target's caches,
    and the norm. The head computes the logits of the result; post_projection of it is `hidden` of the next step.
    """

    table: Matrix
    """The target's token embedding."""
    embedding_factor: float
    pre_projection: Matrix
    layers: tuple[DecoderLayer, ...]
    norm: Float32Array
    head: Centroids | Matrix
    post_projection: Matrix
    eps: float
    """Epsilon of the norms."""


@dataclass(frozen=True, eq=False)
class Shortlist:
    """Clusters of the vocabulary: heads score only the tokens of the `top` clusters with the best centroid scores.

    A token's score is computed with its row of the target's token embedding.
    """

    centroids: Matrix
    """[clusters, H]"""
    top: int
    per_cluster: int
    """Number of tokens in each cluster."""
    ids: NDArray[np.int64]
    """Token ids, int64[clusters, per_cluster]."""


@dataclass(frozen=True, eq=False)
class HeadsModel:
    """Heads of one kind, which compute the logits of k tokens from a hidden state h [H].

    x = entry_norm(h); u[j] = norm(x + f(outer(g(inner(x)))[j])) for j < k, where f is SiLU or the identity, and g is
    ReLU. The target's head computes the logits of u [k, H]. A norm that is None is left out.
    """

    offsets: int
    """Number of tokens proposed, k."""
    entry_norm: Float32Array | None
    inner: Matrix | None
    """[F, H]; None if `outer` reads x itself."""
    outer: Matrix
    """[k * H, F], or [k * H, H] without `inner`."""
    gated: bool
    """Whether f is SiLU."""
    norm: Float32Array | None
    shortlist: Shortlist | None
    """None if the whole vocabulary is scored."""


def read_target(files: TensorFiles, manifest: Manifest) -> TargetModel:
    """Read the target.

    Raises:
        UnsupportedGraphError: there is no kernel for the format or size of some weights.
        BundleCorruptError: a tensor holds a NaN, an infinity, or an index out of range.
    """
    config = manifest.target
    plain = manifest.quantization.weights == AS_TRAINED
    tensors = files.tensors(config.graph)
    table = tensors.table(EMBEDDING, plain=plain)
    per_layer = _per_layer_inputs(tensors, config, plain) if config.ple_size else None
    layers = tuple(_target_layer(tensors, config, index, plain) for index in range(len(config.layers)))
    head = tensors.matrix(EMBEDDING if config.tied else HEAD, plain=plain, any_rows=True)
    return TargetModel(config, table, per_layer, layers, tensors.floats("norm.weight"), head)


def read_drafter(files: TensorFiles, config: DrafterEntry, target: TargetModel) -> DrafterModel:
    """Read the drafter, which embeds tokens with the target's token embedding; raises as `read_target` does."""
    tensors = files.tensors(config.graph)
    layers = []
    for index, layer in enumerate(config.layers):
        reader = _LayerReader(tensors, f"model.layers.{index}.", config, layer)
        layers.append(reader.layer(reader.attention(config.kv_layer(layer.kind), None)))
    head: Centroids | None = None
    if config.shortlist is not None:
        size, clusters = target.config.vocab_size, config.shortlist.clusters
        ids = tensors.integers(DRAFTER_ORDERING, size).reshape(clusters, -1)
        rows = tensors.table(DRAFTER_EMBEDDING, size // clusters)
        head = Centroids(tensors.floats(DRAFTER_CENTROIDS), config.shortlist.top, size // clusters, rows, ids)
    return DrafterModel(
        target.table,
        target.config.embedding_factor,
        tensors.matrix("pre_projection.weight"),
        tuple(layers),
        tensors.floats("model.norm.weight"),
        head or tensors.matrix(DRAFTER_EMBEDDING, any_rows=True),
        tensors.matrix("post_projection.weight"),
        config.norm_eps,
    )


def read_heads(files: TensorFiles, config: HeadsEntry, target: Target) -> HeadsModel:
    """Read heads of one kind; raises as `read_target` does."""
    tensors, shortlist = files.tensors(config.graph), None
    if config.shortlist is not None:
        clusters = config.shortlist.clusters
        ids = tensors.integers(ORDERING, target.vocab_size).reshape(clusters, -1)
        centroids = tensors.matrix(CENTROIDS, any_rows=True)
        shortlist = Shortlist(centroids, config.shortlist.top, target.vocab_size // clusters, ids)
    if config.kind == "medusa":
        outer = tensors.matrix("medusa.blocks.weight")
        return HeadsModel(config.offsets, None, None, outer, True, None, shortlist)
    if config.kind == "exit":
        entry_norm, block = tensors.floats("exit.norm.weight"), tensors.matrix("exit.block.weight")
        return HeadsModel(config.offsets, entry_norm, None, block, True, None, shortlist)
    inner, outer = (tensors.matrix(f"blockwise.{name}.weight") for name in ("inner", "outer"))
    return HeadsModel(config.offsets, None, inner, outer, False, tensors.floats("blockwise.norm.weight"), shortlist)


def _per_layer_inputs(tensors: Tensors, config: Target, plain: bool) -> PerLayerInputs:
    return PerLayerInputs(
        tensors.matrix("per_layer_model_projection.weight", plain=plain),
        tensors.floats("per_layer_projection_norm.weight"),
        tensors.table(PLE_TABLE, plain=plain),
        len(config.layers),
        config.ple_size,
        config.ple_factors,
    )


def _target_layer(tensors: Tensors, config: Target, index: int, plain: bool) -> DecoderLayer:
    layer = config.layers[index]
    reader = _LayerReader(tensors, f"layers.{index}.", config, layer, plain)
    new = reader.new_key_value(layer.k_eq_v) if layer.kv_source == index else None
    per_layer = None
    if config.ple_size:
        gate, projection = reader.matrix("per_layer_input_gate.weight"), reader.matrix("per_layer_projection.weight")
        per_layer = PerLayer(index, gate, projection, reader.floats("post_per_layer_input_norm.weight"))
    experts = None if layer.experts is None else reader.experts(layer.experts.top)
    return reader.layer(reader.attention(layer.kv_source, new), per_layer, experts)


class _LayerReader:
    """Reads the tensors of one decoder layer, whose names all begin with a prefix."""

    def __init__(
        self, tensors: Tensors, prefix: str, decoder: Decoder, layer: LayerConfig, plain: bool = False
    ) -> None:
        if layer.head_dim % 32:
            raise UnsupportedGraphError(f"a head of {layer.head_dim} numbers is no multiple of 32")
        self._tensors = tensors
        self._prefix = prefix
        self._decoder = decoder
        self._layer = layer
        self._plain = plain

    def floats(self, name: str) -> Float32Array:
        return self._tensors.floats(self._prefix + name)

    def matrix(self, name: str) -> Matrix:
        return self._tensors.matrix(self._prefix + name, plain=self._plain)

    def layer(
        self, attention: Attention, per_layer: PerLayer | None = None, experts: Experts | None = None
    ) -> DecoderLayer:
        gate, up, down = (self.matrix(f"mlp.{name}_proj.weight") for name in ("gate", "up", "down"))
        return DecoderLayer(
            self.floats("input_layernorm.weight"),
            attention,
            self.floats("post_attention_layernorm.weight"),
            self.floats("pre_feedforward_layernorm.weight"),
            gate,
            up,
            down,
            self.floats("post_feedforward_layernorm.weight"),
            per_layer,
            float(self.floats("layer_scalar")[0]),
            experts,
        )

    def attention(self, source: int, new: NewKeyValue | None) -> Attention:
        """Self-attention over the cache of the target layer `source`."""
        layer = self._layer
        return Attention(
            layer.kind,
            self._decoder.query_heads,
            layer.kv_heads,
            layer.head_dim,
            self._decoder.rope[layer.kind].frequencies(layer.head_dim),
            self.matrix("self_attn.q_proj.weight"),
            self.floats("self_attn.q_norm.weight"),
            self.matrix("self_attn.o_proj.weight"),
            new,
            source,
        )

    def new_key_value(self, k_eq_v: bool) -> NewKeyValue:
        value = None if k_eq_v else self.matrix("self_attn.v_proj.weight")
        ones = np.ones(self._layer.head_dim, np.float32)
        return NewKeyValue(self.matrix("self_attn.k_proj.weight"), self.floats("self_attn.k_norm.weight"), value, ones)

    def experts(self, top: int) -> Experts:
        return Experts(
            self.floats("router.proj.weight") * self.floats("router.scale"),
            self.floats("router.per_expert_scale"),
            top,
            self.floats("pre_feedforward_layernorm_2.weight"),
            self._tensors.matrices(f"{self._prefix}experts.gate_up_proj"),
            self._tensors.matrices(f"{self._prefix}experts.down_proj"),
            self.floats("post_feedforward_layernorm_2.weight"),
            self.floats("post_feedforward_layernorm_1.weight"),
        )
