"""The configuration of a model: read from a checkpoint by the exporter, stored in `bundle.json`, run by the engines.

The exporter builds the graphs from it, the simd engine plans its forwards from it, and both derive the names and shapes
of the tensors from it (see `tensor_table`). The layers are those of `decoder`. The `check_` functions check every
number, because a bundle may be untrusted.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from ondevice.bundle_format.checks import check_number, check_positive, require
from ondevice.bundle_format.decoder import (
    Attention,
    Decoder,
    GatedDelta,
    LayerEmbedding,
    Mixer,
    ShortConvolution,
    check_attention,
    check_decoder,
)
from ondevice.bundle_format.graph_io import KINDS, AttentionKind

HeadsKind = Literal["medusa", "blockwise", "exit"]

MAX_TOKENS = 1 << 24
"""Longest context in tokens. Rotary angles are computed from positions in float32, which represents integers exactly
only up to this value."""

MAX_OFFSETS = 16
"""Most tokens that heads propose, which is also the longest draft that the draft-length controller asks for."""


@dataclass(frozen=True)
class PerLayerEmbeddings:
    """Embeddings of a token for every layer, float32[T, layers, width], of embedded tokens x [T, H]:

    (norm(projection(x) * context_factor) + table[id] * table_factor) * factor
    """

    width: int
    """Numbers of a layer's slice."""
    vocab_size: int
    """Number of entries of the table."""
    context_factor: float
    table_factor: float
    factor: float


@dataclass(frozen=True, kw_only=True)
class Target(Decoder):
    """The target: h = embedding[id] * embedding_factor, then the layers, the final norm, the head and the softcap."""

    vocab_size: int
    context_length: int
    embedding_factor: float
    """Factor of the token embedding; the drafter uses the same one."""
    softcap: float | None
    """Logits become softcap * tanh(logits / softcap); None leaves them unchanged."""
    tied: bool
    """Whether the head shares the matrix of the token embedding."""
    per_layer: PerLayerEmbeddings | None = None
    """None if the layers have no embeddings of their own."""
    mtp: Attention | None = None
    """The attention of an MTP layer whose keys and values every forward writes, for a drafter that reads them; None for
    other drafters. Of a row with the embedded token e and the residual stream h of the row before it, after the last
    layer, they are projections of norm(x), where (`Qwen3_5MultiTokenPredictor` in vLLM)

        x = embedding_projection(norm(e)) + hidden_projection(norm(h))

    The first row has none before it: its h is 0, and no other row attends to it. `hidden_projection(norm(h))` of the
    last rows has a cache too."""

    @cached_property
    def window(self) -> int | None:
        own = super().window
        return 2 if own is None and self.mtp is not None else own

    @property
    def kinds(self) -> tuple[AttentionKind, ...]:
        found = {own.kind for own in self.cached.values()}
        return tuple(kind for kind in KINDS if kind in found)

    @property
    def convolves(self) -> bool:
        return super().convolves or self.mtp is not None

    @property
    def mtp_cache(self) -> int:
        """The number of the cache with the keys and values of the MTP layer."""
        return len(self.layers) + 1

    @cached_property
    def cached(self) -> Mapping[int, Mixer]:
        """The caches by their numbers, as what reads and writes each of them. A layer's own has its index. Two for an
        MTP layer follow: one for the projected hidden states, which are read as a convolution reads its products, and
        one for keys and values.
        """
        own = {index: self.layers[index].mixer for index in self.kv_layers()}
        if self.mtp is None:
            return own
        states = ShortConvolution(self.hidden_size, self.window or 0)
        return {**own, len(self.layers): states, self.mtp_cache: self.mtp}

    def kv_source(self, index: int) -> int:
        """Index of the layer whose keys and values a layer reads: its own or an earlier one."""
        source = self.layers[index].mixer.kv_source
        return index if source is None else source

    def kv_layers(self) -> list[int]:
        """Indices of the layers that have their own cache, ascending."""
        return [index for index, layer in enumerate(self.layers) if layer.mixer.kv_source is None]

    @cached_property
    def states(self) -> Mapping[int, tuple[int, int, int]]:
        """The shapes of the states of the layers that have some: [value_heads, key_dim, value_dim]."""
        found = {index: layer.mixer for index, layer in enumerate(self.layers)}
        return {
            index: (own.value_heads, own.key_dim, own.value_dim)
            for index, own in found.items()
            if isinstance(own, GatedDelta)
        }

    def last_kv_layer(self, kind: AttentionKind) -> int | None:
        """Index of the last layer with attention of this kind that has its own cache; None if there is none.

        The drafter reads its cache (`store_full_length_kv` in transformers).
        """
        owned = ((index, self.layers[index].mixer) for index in reversed(self.kv_layers()))
        return next((index for index, own in owned if isinstance(own, Attention) and own.kind == kind), None)

    @property
    def first_shared_layer(self) -> int:
        """Index after the last layer that has its own cache. From there on only the wanted rows are computed, unless
        an MTP layer reads the hidden states of all."""
        return len(self.layers) if self.mtp is not None else self.kv_layers()[-1] + 1


@dataclass(frozen=True)
class ShortlistEntry:
    """A vocabulary in clusters of equal size; only the tokens of the best clusters are scored."""

    clusters: int
    top: int
    """Number of clusters whose tokens are scored: those with the best centroid scores."""

    def candidates(self, vocab_size: int) -> int:
        """Number of tokens that are scored."""
        return vocab_size // self.clusters * self.top


@dataclass(frozen=True, kw_only=True)
class DrafterEntry(Decoder):
    """The MTP drafter. Its layers write no caches: each reads that of a target layer, its `kv_source`, or, in a drafter
    of one layer, that of the target's MTP layer (`Target.mtp`), where a step begins with the x of its token.
    """

    candidates: int
    """Number of tokens scored per step: those of the best clusters, those of a list, or the whole vocabulary."""
    shortlist: ShortlistEntry | None
    """The clusters of the centroid head; None if the same tokens are scored in every step."""
    target_head: bool = False
    """Whether the head is the target's rows of a list of tokens, or of all. They score the hidden state of the next
    step, or of a drafter with an MTP layer its norm."""
    num_assistant_tokens: int = 6
    """Draft length that the model's authors recommend."""
    acceptance: float | None = None
    """Share of a draft's first tokens that the target accepted where that was measured: what `auto` expects; None where
    it is not known."""

    def kv_layers(self) -> list[int]:
        """Numbers of the target's caches that its layers read, ascending."""
        return sorted({self.kv_source(index) for index in range(len(self.layers))})

    def kv_source(self, index: int) -> int:
        """Number of the target's cache that a layer reads."""
        source = self.layers[index].mixer.kv_source
        assert source is not None  # checked by `check_drafter`
        return source


@dataclass(frozen=True)
class HeadsEntry:
    """Heads of one kind, which propose tokens from a hidden state of the target. Inputs and outputs: `graph_io`."""

    kind: HeadsKind
    graph: str
    """File name of the ONNX graph."""
    offsets: int
    """Number of tokens proposed. Medusa and blockwise heads propose the tokens after the next one; an exit head
    proposes the next one, so it has one offset."""
    candidates: int
    """Number of tokens scored for each proposal: those of the best clusters, or the whole vocabulary."""
    layer: int | None = None
    """Exit heads: index of the layer after which they read the residual stream. None for other kinds."""
    width: int = 0
    """Blockwise heads: width of the inner layer that all offsets share. 0 for other kinds."""
    shortlist: ShortlistEntry | None = None
    """None if the whole vocabulary is scored."""


def check_target(target: Target) -> None:
    """Check every number of the target's configuration.

    Raises:
        InvalidFieldError: a number is out of range, or contradicts another.
    """
    check_number("vocab_size", target.vocab_size)
    check_number("context_length", target.context_length, MAX_TOKENS, least=2)  # a prompt and a reply
    check_decoder("the target", target)
    check_positive("embedding_factor", target.embedding_factor, 1e6)
    if target.window is not None and "sliding" in target.attention_kinds:
        check_number("the window of its sliding layers", target.window, target.context_length)
    if target.softcap is not None:
        check_positive("softcap", target.softcap, 1e6)
    if (mtp := target.mtp) is not None:
        check_attention("the MTP layer", mtp, target)
        require(mtp.window is None and mtp.kv_source is None, "the MTP layer has no full attention of its own")
        plain = not (mtp.v_norm or mtp.k_eq_v or mtp.bias)
        require(plain, "the values of the MTP layer are not a projection without a bias")
        require(target.hidden_size % 2 == 0, f"hidden states of {target.hidden_size} numbers have no two halves")
    if (own := target.per_layer) is not None:
        check_number("width of the per-layer embeddings", own.width)
        check_number("vocab_size of the per-layer embeddings", own.vocab_size, least=target.vocab_size)
        for factor in (own.context_factor, own.table_factor, own.factor):
            check_positive("a factor of the per-layer embeddings", factor, 1e6)
    for index, layer in enumerate(target.layers):
        widths = [block.body.width for block in layer.blocks if isinstance(block.body, LayerEmbedding)]
        expected = [] if own is None else [own.width]
        require(widths == expected, f"layer {index} has slices of {widths}, the per-layer embeddings {expected}")
        source = layer.mixer.kv_source
        if source is not None:
            require(0 <= source < index, f"layer {index} reads the cache of layer {source}")
            _check_cache(f"layer {index}", layer.mixer, source, target)


def check_drafter(drafter: DrafterEntry, target: Target) -> None:
    """Check every number of the drafter's configuration, and that its layers can read the target's caches.

    Raises:
        InvalidFieldError: a number is out of range, or contradicts another or the target's.
    """
    check_decoder("the drafter", drafter)
    check_number("num_assistant_tokens", drafter.num_assistant_tokens)
    if drafter.acceptance is not None:
        check_positive("acceptance of the drafter", drafter.acceptance, 1.0)
    if drafter.target_head:
        check_number("candidates of the drafter", drafter.candidates, target.vocab_size)
        require(drafter.shortlist is None, "the drafter has a list of tokens and clusters")
    else:
        _check_candidates("the drafter", drafter.candidates, drafter.shortlist, target.vocab_size)
    caches = [target.mtp_cache] if target.mtp is not None else target.kv_layers()
    if target.mtp is not None:
        forms = [(each.hidden_size, each.norm_eps) for each in (target, drafter)]
        require(len(drafter.layers) == 1 and drafter.target_head, "a drafter with an MTP layer has another form")
        require(forms[0] == forms[1], f"the drafter has the hidden size and epsilon {forms[1]}, the target {forms[0]}")
    for index, layer in enumerate(drafter.layers):
        place, source = f"layer {index} of the drafter", layer.mixer.kv_source
        experts = layer.feed_forward.experts is not None and target.mtp is None
        require(len(layer.blocks) == 2 and not experts, f"{place} has blocks of a target")
        require(source in caches, f"{place} reads the cache {source}, which the target does not have for it")
        assert source is not None
        _check_cache(place, layer.mixer, source, target)


def check_heads(heads: HeadsEntry, target: Target) -> None:
    """Check every number of the configuration of heads.

    Raises:
        InvalidFieldError: a number is out of range, or contradicts another or the target's.
    """
    name = f"the {heads.kind} heads"
    check_number(f"offsets of {name}", heads.offsets, 1 if heads.kind == "exit" else MAX_OFFSETS)
    _check_candidates(name, heads.candidates, heads.shortlist, target.vocab_size)
    if heads.kind == "exit":
        check_number("layer of the exit heads", heads.layer, len(target.layers) - 1, least=0)
    else:
        require(heads.layer is None, f"{name} have a layer")
    if heads.kind == "blockwise":
        check_number(f"width of {name}", heads.width)
    else:
        require(heads.width == 0, f"{name} have a width")


def _check_cache(place: str, reader: Mixer, source: int, target: Target) -> None:
    """Check that attention can read the cache of the target's layer `source`."""
    owner = target.cached.get(source)
    forms = [(own.window, own.kv_heads, own.head_dim) for own in (owner, reader) if isinstance(own, Attention)]
    require(len(forms) == 2 and forms[0] == forms[1], f"{place} cannot read layer {source}'s cache")


def _check_candidates(name: str, candidates: int, shortlist: ShortlistEntry | None, vocab_size: int) -> None:
    check_number(f"candidates of {name}", candidates, vocab_size)
    if shortlist is None:
        require(candidates == vocab_size, f"candidates of {name} is {candidates}, the vocabulary has {vocab_size}")
        return
    check_number(f"clusters of {name}", shortlist.clusters, vocab_size)
    check_number(f"top of {name}", shortlist.top, shortlist.clusters)
    fits = vocab_size % shortlist.clusters == 0 and shortlist.candidates(vocab_size) == candidates
    require(fits, f"candidates of {name} is {candidates}, which do not fit {shortlist.clusters} clusters")
