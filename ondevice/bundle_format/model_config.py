"""The configuration of a model: read from a checkpoint by the exporter, stored in `bundle.json`, run by the engines.

The exporter builds the graphs from it, the simd engine plans its forwards from it, and both derive the names and shapes
of the tensors from it (see `tensor_table`). Values that follow from others, such as the factor of the token embedding,
are computed here and nowhere else. The `check_` functions check every number, because a bundle may be untrusted.
"""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from ondevice.bundle_format.graph_io import KINDS, AttentionKind

HeadsKind = Literal["medusa", "blockwise", "exit"]

MOST_TOKENS = 1 << 24
"""Longest context in tokens. Rotary angles are computed from positions in float32, which represents integers exactly
only up to this value."""

MOST_SIZE = (1 << 31) - 1
"""Largest value of every other count in a model."""

MOST_LAYERS = 1000
"""Most layers of a model; the largest Gemma 4 has 60."""

MOST_EXPERTS = 1024
"""Most experts of a layer; 26B-A4B has 128."""

MOST_OFFSETS = 16
"""Most tokens that heads propose, which is also the longest draft that the draft-length controller asks for."""


class InvalidFieldError(ValueError):
    """A field of a configuration has a value that no model can have."""


@dataclass(frozen=True)
class Rope:
    """Rotary position embedding of the layers of one kind of attention."""

    theta: float
    """Base of the frequencies."""
    rotated: float
    """Share of the head's frequencies that are not zero, 0 to 1 (type `proportional`)."""
    factor: float
    """Divisor of all frequencies."""

    def frequencies(self, head_dim: int) -> NDArray[np.float32]:
        """Angle per position of each pair of numbers, float32[head_dim / 2]; zero beyond the rotated share.

        Source: `_compute_proportional_rope_parameters` in transformers. Computed in float64 and rounded at the end,
        because numpy's float32 power differs by 1 or 2 units of the last place between CPUs with and without AVX-512.
        """
        rotated = int(self.rotated * head_dim // 2)
        exponents = np.arange(0, 2 * rotated, 2) / head_dim
        frequencies = np.zeros(head_dim // 2, np.float32)
        frequencies[:rotated] = 1.0 / np.float64(self.theta) ** exponents / self.factor
        return frequencies


@dataclass(frozen=True)
class ExpertsConfig:
    """The experts of a layer: feed-forward blocks of which each token uses a few, in addition to the dense block."""

    count: int
    top: int
    """Number of experts that each token uses."""
    intermediate_size: int
    """Inner width of one expert."""


@dataclass(frozen=True)
class LayerConfig:
    """The sizes of a decoder layer that the target's and the drafter's layers both have."""

    kind: AttentionKind
    kv_heads: int
    head_dim: int
    intermediate_size: int
    """Inner width of the dense feed-forward block."""

    @property
    def kv_width(self) -> int:
        """Numbers in a row of keys, and in a row of values."""
        return self.kv_heads * self.head_dim


@dataclass(frozen=True)
class Layer(LayerConfig):
    """A decoder layer of the target."""

    kv_source: int
    """Index of the layer whose cache this layer reads; its own index if it has a cache."""
    k_eq_v: bool = False
    """Whether the values are the output of the key projection; the layer then has no value projection."""
    experts: ExpertsConfig | None = None
    """None if the layer has the dense feed-forward block only."""


@dataclass(frozen=True, kw_only=True)
class Decoder:
    """The fields that the target's and the drafter's configuration have in common."""

    graph: str
    """File name of the ONNX graph."""
    hidden_size: int
    query_heads: int
    norm_eps: float
    rope: dict[AttentionKind, Rope]


@dataclass(frozen=True, kw_only=True)
class Target(Decoder):
    """The target: h = embedding[id] * embedding_factor, then the layers, the final norm, the head and the softcap."""

    vocab_size: int
    context_length: int
    sliding_window: int
    softcap: float | None
    """Logits become softcap * tanh(logits / softcap); None leaves them unchanged."""
    tied: bool
    """Whether the head shares the matrix of the token embedding."""
    ple_size: int
    """Width of one layer's slice of the per-layer embeddings (PLE); 0 if the model has none."""
    ple_vocab_size: int
    """Number of entries in the table of per-layer embeddings; 0 if the model has none."""
    layers: tuple[Layer, ...]

    def kv_layers(self) -> list[int]:
        """Indices of the layers that have their own cache, ascending."""
        return [index for index, layer in enumerate(self.layers) if layer.kv_source == index]

    def last_kv_layer(self, kind: AttentionKind) -> int | None:
        """Index of the last layer of this kind that has its own cache; None if there is none.

        Later layers and the drafter read its cache (`store_full_length_kv` in transformers).
        """
        return next((index for index in reversed(self.kv_layers()) if self.layers[index].kind == kind), None)

    @property
    def first_shared_layer(self) -> int:
        """Index after the last layer that has its own cache. From there on only the wanted rows are computed."""
        return self.kv_layers()[-1] + 1

    @property
    def embedding_factor(self) -> float:
        """Factor of the token embedding (`Gemma4TextScaledWordEmbedding`); the drafter uses the same one."""
        return math.sqrt(self.hidden_size)

    @property
    def ple_factors(self) -> tuple[float, float, float]:
        """Factors c, r and f of the per-layer embeddings, (norm(projection(embedded) * c) + table[id] * r) * f."""
        return self.hidden_size**-0.5, math.sqrt(self.ple_size), 2.0**-0.5


@dataclass(frozen=True)
class Shortlist:
    """A vocabulary in clusters of equal size; only the tokens of the best clusters are scored."""

    clusters: int
    top: int
    """Number of clusters whose tokens are scored: those with the best centroid scores."""

    def candidates(self, vocab_size: int) -> int:
        """Number of tokens that are scored."""
        return vocab_size // self.clusters * self.top


@dataclass(frozen=True, kw_only=True)
class DrafterEntry(Decoder):
    """The MTP drafter. Its layers have no caches of their own and read two of the target's."""

    full_layer: int
    """Index of the target layer whose cache the drafter's full-attention layers read."""
    sliding_layer: int
    """Index of the target layer whose cache the drafter's sliding-attention layers read."""
    candidates: int
    """Number of tokens scored per step: those of the best clusters, or the whole vocabulary."""
    shortlist: Shortlist | None
    """The clusters of the centroid head; None if the whole vocabulary is scored."""
    layers: tuple[LayerConfig, ...]
    num_assistant_tokens: int = 6
    """Draft length that the model's authors recommend."""

    def kv_layer(self, kind: AttentionKind) -> int:
        """Index of the target layer whose cache the drafter's layers of this kind read."""
        return self.full_layer if kind == "full" else self.sliding_layer


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
    shortlist: Shortlist | None = None
    """None if the whole vocabulary is scored."""


def check_target(target: Target) -> None:
    """Check every number of the target's configuration.

    Raises:
        InvalidFieldError: a number is out of range, or contradicts another.
    """
    check_number("vocab_size", target.vocab_size)
    check_number("context_length", target.context_length, MOST_TOKENS)
    check_number("sliding_window", target.sliding_window, target.context_length)
    _check_decoder("the target", target)
    if target.softcap is not None:
        check_positive("softcap", target.softcap, 1e6)
    check_number("ple_size", target.ple_size, least=0)
    check_number("ple_vocab_size", target.ple_vocab_size, least=0)
    fits = target.ple_vocab_size >= target.vocab_size if target.ple_size else target.ple_vocab_size == 0
    require(fits, f"a table of {target.ple_vocab_size} per-layer embeddings for {target.vocab_size} tokens")
    for index, layer in enumerate(target.layers):
        require(0 <= layer.kv_source <= index, f"layer {index} reads the cache of layer {layer.kv_source}")
        owner = target.layers[layer.kv_source]
        same = (owner.kind, owner.kv_heads, owner.head_dim) == (layer.kind, layer.kv_heads, layer.head_dim)
        require(
            same and owner.kv_source == layer.kv_source, f"layer {index} cannot read layer {layer.kv_source}'s cache"
        )
        if layer.experts is not None:
            check_number(f"experts of layer {index}", layer.experts.count, MOST_EXPERTS)
            check_number(f"experts of layer {index} that a token takes", layer.experts.top, layer.experts.count)
            check_number(f"intermediate_size of the experts of layer {index}", layer.experts.intermediate_size)


def check_drafter(drafter: DrafterEntry, target: Target) -> None:
    """Check every number of the drafter's configuration, and that its layers can read the target's caches.

    Raises:
        InvalidFieldError: a number is out of range, or contradicts another or the target's.
    """
    _check_decoder("the drafter", drafter)
    check_number("num_assistant_tokens", drafter.num_assistant_tokens)
    _check_candidates("the drafter", drafter.candidates, drafter.shortlist, target.vocab_size)
    for kind in KINDS:
        owner = drafter.kv_layer(kind)
        require(owner == target.last_kv_layer(kind), f"the drafter's {kind} layer is not the last with a cache")
    for index, layer in enumerate(drafter.layers):
        shared = target.layers[drafter.kv_layer(layer.kind)]
        require(
            (layer.kv_heads, layer.head_dim) == (shared.kv_heads, shared.head_dim),
            f"layer {index} of the drafter cannot read layer {drafter.kv_layer(layer.kind)}'s cache",
        )


def check_heads(heads: HeadsEntry, target: Target) -> None:
    """Check every number of the configuration of heads.

    Raises:
        InvalidFieldError: a number is out of range, or contradicts another or the target's.
    """
    name = f"the {heads.kind} heads"
    check_number(f"offsets of {name}", heads.offsets, 1 if heads.kind == "exit" else MOST_OFFSETS)
    _check_candidates(name, heads.candidates, heads.shortlist, target.vocab_size)
    if heads.kind == "exit":
        check_number("layer of the exit heads", heads.layer, len(target.layers) - 1, least=0)
    else:
        require(heads.layer is None, f"{name} have a layer")
    if heads.kind == "blockwise":
        check_number(f"width of {name}", heads.width)
    else:
        require(heads.width == 0, f"{name} have a width")


def check_number(name: str, value: Any, most: int = MOST_SIZE, least: int = 1) -> None:
    """Raise InvalidFieldError unless `value` is an integer from `least` to `most`; `name` is for the message."""
    number = isinstance(value, int) and not isinstance(value, bool)
    require(number and least <= value <= most, f"{name} is {value!r:.99}, not a whole number from {least} to {most}")


def check_positive(name: str, value: float, most: float, least: float = 0.0) -> None:
    """Raise InvalidFieldError unless `value` is over 0 and from `least` to `most`; `name` is for the message."""
    number = math.isfinite(value) and 0 < value <= most and value >= least
    require(number, f"{name} is {value!r:.99}, not a number from {least:g} to {most:g}")


def require(condition: bool, reason: str) -> None:
    """Raise InvalidFieldError with the message `reason` unless `condition` holds."""
    if not condition:
        raise InvalidFieldError(reason)


def _check_decoder(name: str, decoder: Target | DrafterEntry) -> None:
    check_number(f"hidden_size of {name}", decoder.hidden_size)
    check_number(f"query_heads of {name}", decoder.query_heads)
    check_positive(f"norm_eps of {name}", decoder.norm_eps, 1.0)
    require(set(decoder.rope) == set(KINDS), f"{name} has rotary embeddings for {', '.join(decoder.rope)}")
    for kind, rope in decoder.rope.items():
        # frequencies are then at most 1e6, and their products with positions stay finite
        check_positive(f"theta of {name}'s {kind} layers", rope.theta, sys.float_info.max, 1.0)
        check_positive(f"rotated of {name}'s {kind} layers", rope.rotated, 1.0)
        check_positive(f"factor of {name}'s {kind} layers", rope.factor, sys.float_info.max, 1e-6)
    require(bool(decoder.layers), f"{name} has no layers")
    require(len(decoder.layers) <= MOST_LAYERS, f"{name} has {len(decoder.layers)} layers")
    for index, layer in enumerate(decoder.layers):
        for field in ("kv_heads", "head_dim", "intermediate_size"):
            check_number(f"{field} of layer {index} of {name}", getattr(layer, field))
        require(
            decoder.query_heads % layer.kv_heads == 0,
            f"{decoder.query_heads} query heads of {name} cannot share {layer.kv_heads} KV heads",
        )


def _check_candidates(name: str, candidates: int, shortlist: Shortlist | None, vocab_size: int) -> None:
    check_number(f"candidates of {name}", candidates, vocab_size)
    if shortlist is None:
        require(candidates == vocab_size, f"candidates of {name} is {candidates}, the vocabulary has {vocab_size}")
        return
    check_number(f"clusters of {name}", shortlist.clusters, vocab_size)
    check_number(f"top of {name}", shortlist.top, shortlist.clusters)
    fits = vocab_size % shortlist.clusters == 0 and shortlist.candidates(vocab_size) == candidates
    require(fits, f"candidates of {name} is {candidates}, which do not fit {shortlist.clusters} clusters")
