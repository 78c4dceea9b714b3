"""The target, the drafter and heads as dataclasses of matrices and norms, from which forwards are planned.

`read_target`, `read_drafter` and `read_heads` build them from a bundle's configuration, which determines the tensors of
each layer, and from its data files. Notation: H is the width of the hidden state, T the number of rows of a forward;
a weight matrix has shape [rows, width] and is applied as x @ weight.T. A norm is an RMS norm, float32[width].
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ondevice.arrays import Float32Array
from ondevice.bundle_format.decoder import Attention, GatedDelta, Layer, Scoring
from ondevice.bundle_format.manifest import AS_TRAINED, Manifest
from ondevice.bundle_format.model_config import DrafterEntry, HeadsEntry, Target
from ondevice.bundle_format.model_config import ShortlistEntry as Clusters
from ondevice.bundle_format.tensor_table import (
    CENTROIDS,
    DRAFTER_CENTROIDS,
    DRAFTER_EMBEDDING,
    DRAFTER_ORDERING,
    DRAFTER_TOKENS,
    EMBEDDING,
    FINAL_NORM,
    HEAD,
    MTP,
    MTP_EMBEDDING,
    MTP_HIDDEN,
    NORMS,
    ORDERING,
    PLE_TABLE,
    is_plain,
    layer_shapes,
)
from ondevice.engines.simd.tensor_files import Matrix, TensorFiles, Tensors, UnsupportedGraphError


@dataclass(frozen=True, eq=False)
class Experts:
    """The experts of a layer: feed-forward blocks of which every row uses the `top` with the best scores.

    The scores of a row h are router @ (h / RMS(h)) + router_bias. The weight of a chosen expert is the softmax over the
    scores of the chosen experts, or of all, or the sigmoid of its score divided by the sum of theirs; times the
    expert's `scale`. Experts alone compute sum of weight * expert(pre_norm(h)). Beside `dense`, the output of the dense
    block, it is dense_norm(dense) + norm(that sum), or where the block is shared dense + that sum, or
    sigmoid(shared_gate @ (h / RMS(h))) * dense + that sum.
    """

    router: Float32Array
    """float32[experts, width], already multiplied by the weight of the norm before the router."""
    scale: Float32Array
    """float32[experts], all 1 for experts alone and beside one that is shared."""
    top: int
    pre_norm: Float32Array
    gate_up: tuple[Matrix, ...]
    """One matrix [2 * inner, width] per expert: the rows of gate, then the rows of up."""
    down: tuple[Matrix, ...]
    """One matrix [width, inner] per expert."""
    norm: Float32Array | None
    """Norm of the weighted sum of the experts' outputs; None for experts alone and beside one that is shared."""
    dense_norm: Float32Array | None
    """Norm of the dense block's output; None without one, or if it is shared."""
    router_bias: Float32Array | None = None
    """float32[experts]; None without biases, as are the next two."""
    gate_up_bias: Float32Array | None = None
    """float32[experts, 2 * inner]"""
    down_bias: Float32Array | None = None
    """float32[experts, width]"""
    scoring: Scoring = "softmax"
    selection_bias: Float32Array | None = None
    """float32[experts], added where experts are chosen: see `ExpertsConfig`; None for none."""
    shared: bool = False
    """Whether the dense block is an expert of every row."""
    shared_gate: Float32Array | None = None
    """float32[width], already multiplied by `pre_norm`; None without."""


@dataclass(frozen=True, eq=False)
class DecoderLayer:
    """One layer of the target or the drafter. Its tensors have their names in the tensor table, without the layer's
    prefix and `.weight`.
    """

    config: Layer
    source: int
    """Index of the target layer whose cache the layer reads."""
    matrices: dict[str, Matrix]
    """All matrices but the experts'."""
    floats: dict[str, Float32Array]
    """Norms, biases, sinks, taps of a convolution, and `layer_scalar` float32[1]."""
    experts: Experts | None

    def by_purpose(self) -> dict[str, list[Matrix]]:
        """All matrices by purpose."""

        def named(start: str) -> list[Matrix]:
            return [matrix for name, matrix in self.matrices.items() if name.startswith(start)]

        experts = [] if self.experts is None else [*self.experts.gate_up, *self.experts.down]
        return {
            "attention": named("self_attn."),
            "convolution": named("conv."),
            "delta": named("delta."),
            "mlp": named("mlp."),
            "experts": experts,
            "per_layer": named("per_layer_"),
        }


@dataclass(frozen=True, eq=False)
class PerLayerInputs:
    """The weights of `PerLayerEmbeddings`."""

    projection: Matrix
    norm: Float32Array
    table: Matrix


@dataclass(frozen=True, eq=False)
class MtpInputs:
    """The weights that make the inputs, keys and values of an MTP layer (`Target.mtp`)."""

    embedding_norm: Float32Array
    embedding: Matrix
    """[H, H], which multiplies the normed embedding of a row's token."""
    hidden_norm: Float32Array
    hidden: Matrix
    """[H, H], which multiplies the normed hidden state of the row before."""
    norm: Float32Array
    """The norm before keys and values, and before the queries of the drafter's layer."""
    keys: Matrix
    """The projection of keys."""
    values: Matrix
    key_norm: Float32Array | None
    """Norm of each head of keys; None for none."""


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
    mtp: MtpInputs | None = None


@dataclass(frozen=True, eq=False)
class Shortlist:
    """Clusters of the vocabulary: only the tokens of the `top` clusters with the best centroid scores are scored."""

    centroids: Matrix | Float32Array
    """[clusters, H]; float32 for the drafter."""
    top: int
    ids: NDArray[np.int64]
    """Token ids, int64[clusters, tokens of a cluster]."""


@dataclass(frozen=True, eq=False)
class DrafterModel:
    """One step of the MTP drafter.

    h = pre_projection(concat(embedded token, hidden)), where the target embeds the token; then the layers, which read
    the target's caches, and the norm. post_projection of the result is `hidden` of the next step. The head computes the
    logits of the result, or of that `hidden` if its rows are the target's.

    With an MTP layer, h is made by the target's `MtpInputs`, which also write the keys and values of the step. The
    result before the norm is `hidden` of the next step, and the head computes the logits of the normed one.
    """

    config: DrafterEntry
    pre_projection: Matrix | None
    """None with an MTP layer, as is `post_projection`."""
    layers: tuple[DecoderLayer, ...]
    norm: Float32Array
    shortlist: Shortlist | None
    """None if the same tokens are scored in every step."""
    tokens: NDArray[np.int64] | None
    """The ids of the head's tokens, whose rows are the target's; None if it scores all."""
    head: Matrix
    """[tokens, width]; with a shortlist its rows cluster by cluster, [clusters, tokens of a cluster * width]."""
    post_projection: Matrix | None


@dataclass(frozen=True, eq=False)
class HeadsModel:
    """Heads of one kind, which compute the logits of k tokens from a hidden state h [H].

    x = entry_norm(h); u[j] = norm(x + f(outer(g(inner(x)))[j])) for j < k, where f is SiLU, or the identity with
    `inner`, and g is ReLU. The target's head computes the logits of u [k, H]. A part that is None is left out.
    """

    config: HeadsEntry
    entry_norm: Float32Array | None
    inner: Matrix | None
    """[F, H]"""
    outer: Matrix
    """[k * H, F], or [k * H, H] without `inner`."""
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
    tensors = files.tensors(config.graph, plain=manifest.quantization.weights == AS_TRAINED)
    table, per_layer = tensors.table(EMBEDDING), None
    if config.per_layer is not None:
        projection = tensors.matrix("per_layer_model_projection.weight")
        norm = tensors.floats("per_layer_projection_norm.weight")
        per_layer = PerLayerInputs(projection, norm, tensors.table(PLE_TABLE))
    layers = tuple(
        _layer(tensors, f"layers.{index}.", layer, config.hidden_size, config.kv_source(index))
        for index, layer in enumerate(config.layers)
    )
    head = tensors.matrix(EMBEDDING if config.tied else HEAD, any_rows=True)
    mtp = None if config.mtp is None else _mtp_inputs(tensors, config.mtp)
    return TargetModel(config, table, per_layer, layers, tensors.floats(FINAL_NORM), head, mtp)


def _mtp_inputs(tensors: Tensors, own: Attention) -> MtpInputs:
    _check_heads(own)
    return MtpInputs(
        embedding_norm=tensors.floats(f"{MTP}embedding_norm.weight"),
        embedding=tensors.matrix(MTP_EMBEDDING),
        hidden_norm=tensors.floats(f"{MTP}hidden_norm.weight"),
        hidden=tensors.matrix(MTP_HIDDEN),
        norm=tensors.floats(f"{MTP}{NORMS['attention'][0]}.weight"),
        keys=tensors.matrix(f"{MTP}self_attn.k_proj.weight"),
        values=tensors.matrix(f"{MTP}self_attn.v_proj.weight"),
        key_norm=tensors.floats(f"{MTP}self_attn.k_norm.weight") if own.k_norm else None,
    )


def read_drafter(files: TensorFiles, config: DrafterEntry, target: TargetModel) -> DrafterModel:
    """Read the drafter; raises as `read_target` does."""
    tensors, size = files.tensors(config.graph), target.config.vocab_size
    shortlist = tokens = None
    if config.target_head and config.candidates == size:
        head = target.head
    elif config.target_head:
        tokens = tensors.integers(DRAFTER_TOKENS, size)
        head = target.head.picked(tokens)
    elif config.shortlist is not None:
        centroids = tensors.floats(DRAFTER_CENTROIDS)
        shortlist = _shortlist(centroids, tensors, DRAFTER_ORDERING, config.shortlist, target.config)
        head = tensors.table(DRAFTER_EMBEDDING, size // config.shortlist.clusters)
    else:
        head = tensors.matrix(DRAFTER_EMBEDDING, any_rows=True)
    projects = target.mtp is None
    return DrafterModel(
        config,
        tensors.matrix("pre_projection.weight") if projects else None,
        tuple(
            _layer(tensors, f"model.layers.{index}.", layer, config.hidden_size, config.kv_source(index))
            for index, layer in enumerate(config.layers)
        ),
        tensors.floats("model.norm.weight"),
        shortlist,
        tokens,
        head,
        tensors.matrix("post_projection.weight") if projects else None,
    )


def read_heads(files: TensorFiles, config: HeadsEntry, target: Target) -> HeadsModel:
    """Read heads of one kind; raises as `read_target` does."""
    tensors, shortlist = files.tensors(config.graph), None
    if config.shortlist is not None:
        shortlist = _shortlist(tensors.matrix(CENTROIDS, any_rows=True), tensors, ORDERING, config.shortlist, target)
    if config.kind == "medusa":
        return HeadsModel(config, None, None, tensors.matrix("medusa.blocks.weight"), None, shortlist)
    if config.kind == "exit":
        entry_norm = tensors.floats("exit.norm.weight")
        return HeadsModel(config, entry_norm, None, tensors.matrix("exit.block.weight"), None, shortlist)
    inner, outer = (tensors.matrix(f"blockwise.{name}.weight") for name in ("inner", "outer"))
    return HeadsModel(config, None, inner, outer, tensors.floats("blockwise.norm.weight"), shortlist)


def _shortlist(
    centroids: Matrix | Float32Array, tensors: Tensors, ordering: str, config: Clusters, target: Target
) -> Shortlist:
    ids = tensors.integers(ordering, target.vocab_size).reshape(config.clusters, -1)
    return Shortlist(centroids, config.top, ids)


def _check_heads(own: Attention) -> None:
    """Raise UnsupportedGraphError if kernels cannot compute with heads of this size."""
    if own.head_dim % 32:
        raise UnsupportedGraphError(f"a head of {own.head_dim} numbers is not a multiple of 32")


def _layer(tensors: Tensors, prefix: str, config: Layer, hidden: int, source: int) -> DecoderLayer:
    """Read a layer of a model of width `hidden`, whose tensors begin with a prefix."""
    if isinstance(own := config.mixer, Attention):
        _check_heads(own)
    if isinstance(own, GatedDelta) and (own.key_dim % 32 or own.value_dim % 32):
        raise UnsupportedGraphError(f"states of {own.key_dim} x {own.value_dim} numbers are not multiples of 32")
    matrices, floats = dict[str, Matrix](), dict[str, Float32Array]()
    for name, shape in layer_shapes(config, hidden).items():
        if is_plain(name, shape):
            floats[name.removesuffix(".weight")] = tensors.floats(prefix + name)
        elif len(shape) == 2:
            matrices[name.removesuffix(".weight")] = tensors.matrix(prefix + name)
    experts, found = None, config.feed_forward.experts
    if found is not None:
        normed, shared_gate = config.feed_forward.normed, floats.get("mlp.shared_gate")
        pre_norm = floats["pre_feedforward_layernorm_2" if normed else "pre_feedforward_layernorm"]
        with np.errstate(over="ignore"):  # an infinite score makes the logits NaN, and that is an error
            router = floats["router.proj"] * (floats["router.scale"] if normed else pre_norm)
            shared_gate = None if shared_gate is None else shared_gate * pre_norm
        experts = Experts(
            router=router,
            scale=floats.get("router.per_expert_scale", np.ones(found.count, np.float32)),
            top=found.top,
            pre_norm=pre_norm,
            gate_up=tensors.matrices(f"{prefix}experts.gate_up_proj"),
            down=tensors.matrices(f"{prefix}experts.down_proj"),
            norm=floats.get("post_feedforward_layernorm_2"),
            dense_norm=floats.get("post_feedforward_layernorm_1"),
            router_bias=floats.get("router.proj.bias"),
            gate_up_bias=floats.get("experts.gate_up_proj_bias"),
            down_bias=floats.get("experts.down_proj_bias"),
            scoring=found.scoring,
            selection_bias=floats.get("router.selection_bias"),
            shared=config.feed_forward.shared,
            shared_gate=shared_gate,
        )
    return DecoderLayer(config, source, matrices, floats, experts)
