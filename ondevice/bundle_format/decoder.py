"""A decoder as data: layers of blocks, which are a mixer of positions (attention, a short convolution or a gated delta
rule), feed-forward, or a per-layer embedding.

The exporter makes it from a checkpoint's configuration, `bundle.json` stores it, and everything else about a layer is
one fold over its blocks: names and shapes of the tensors (`tensor_table`), the ONNX nodes
(`ondevice_export.graph.layer`), and the steps of a forward (`engines.simd.plan.layer`). None of them knows a family of
models. `check_decoder` checks every number, because a bundle may be untrusted.

A layer with residual stream h [T, H] runs its blocks in order, h += norm_out(body(norm_in(h))), then multiplies h by
its scalar. A norm is an RMS norm with a weight; a block may lack either one.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from ondevice.bundle_format.checks import check_number, check_positive, require
from ondevice.bundle_format.graph_io import KINDS, AttentionKind

Activation = Literal["gelu_tanh", "silu", "clamped_swiglu"]
"""The function of a gate. `clamped_swiglu` is one of gate g and up u together, in place of activation(g) * u:
g' * sigmoid(1.702 * g') * (clamp(u, -7, 7) + 1), where g' = min(g, 7) (`GptOssExperts`).
"""
Scoring = Literal["softmax", "softmax_of_all", "sigmoid"]
"""How scores of experts become weights: by the softmax of a token's experts, by that of all experts, so that the
weights of a token's do not add up to 1, or as sigmoids divided by their sum + 1e-6.
"""

MAX_LAYERS = 1000
"""Most layers of a model; the largest Gemma 4 has 60."""

MAX_EXPERTS = 1024
"""Most experts of a layer; Gemma 4 26B-A4B has 128."""

MAX_TAPS = 16
"""Most positions that a short convolution sums over; LFM2 has 3."""

MAX_STATE = 1 << 16
"""Most numbers of a head's state, which threads copy; those of Qwen3.5 have 16,384."""

MAX_FREQUENCY = 1e6
"""Largest rotary frequency, so that its product with a position stays finite."""


@dataclass(frozen=True)
class Attention:
    """softmax(scale * q @ k.T + mask) @ v, projected to [T, H]; q, k and v are projections of the block's input.

    Every head of q, k and v may have an RMS norm over its `head_dim` numbers, or all heads of q, and all of k, one
    together (`Olmo2Attention`); q and k are then rotated. A layer with a `kv_source` has no keys and values of its own,
    and neither norms of them. The softmax of a head with a sink, a number, has it as one more score, of a position
    without a value (`GptOssAttention`).
    """

    heads: int
    """Number of query heads."""
    kv_heads: int
    head_dim: int
    scale: float
    """Factor of the attention scores."""
    rotary: int | None
    """Index of the rotary embedding in `Decoder.rotary`; None if q and k are not rotated."""
    window: int | None
    """Number of positions that a row sees, its own and the last ones before it; None for all."""
    kv_source: int | None = None
    """Index of the target's layer whose keys and values this layer reads; None if it has its own."""
    q_norm: bool = False
    """Whether queries are normed, with a weight."""
    k_norm: bool = False
    """Whether keys are normed, with a weight."""
    whole_norms: bool = False
    """Whether norms of queries and keys are over all heads of a row, with a weight for each of their numbers."""
    v_norm: bool = False
    """Whether values are normed, without a weight."""
    k_eq_v: bool = False
    """Whether the values are the output of the key projection; the layer then has no value projection."""
    bias: bool = False
    """Whether the projections of q, k and v have a bias."""
    output_bias: bool = False
    """Whether the projection of the output has a bias."""
    sinks: bool = False
    """Whether every query head has a sink."""
    softcap: float | None = None
    """Scores become softcap * tanh(score / softcap) before the mask (`Gemma2Attention`); None leaves them unchanged."""
    gated: bool = False
    """Whether the heads' outputs are multiplied by sigmoid(gate), a projection of the block's input."""
    type: Literal["attention"] = "attention"

    @property
    def kind(self) -> AttentionKind:
        """Sliding attention has a window."""
        return "full" if self.window is None else "sliding"

    @property
    def query_width(self) -> int:
        """Numbers in a row of queries."""
        return self.heads * self.head_dim

    @property
    def kv_width(self) -> int:
        """Numbers in a row of keys, and in a row of values."""
        return self.kv_heads * self.head_dim


@dataclass(frozen=True)
class ShortConvolution:
    """projection(C * y), where B, C and x are the thirds of a projection of the block's input to [T, 3 * channels].

    y[t] is the sum over j < window of taps[:, window - 1 - j] * (B * x)[t - j], for every channel alone
    (`Lfm2ShortConv`). So a row reads the products B * x of the last `window` positions, which are its cache: a row of
    `channels` numbers in two halves, where that of attention is a row of keys and one of values.
    """

    channels: int
    window: int
    """Number of positions that are summed, a row's own and the last ones before it."""
    type: Literal["short_convolution"] = "short_convolution"

    kv_source: ClassVar[None] = None
    """A convolution has a cache of its own."""
    kind: ClassVar[AttentionKind] = "sliding"
    """Its cache holds the positions that sliding attention with the same window would see."""

    @property
    def kv_width(self) -> int:
        """Numbers in each half of a row of its cache."""
        return self.channels // 2


@dataclass(frozen=True)
class GatedDelta:
    """projection(norm(o) * silu(z)) of the outputs o of value heads whose memory is a state S [key_dim, value_dim].

    z, b, a and a row of `channels` numbers are projections of the block's input. The row is summed with the ones before
    it as in a short convolution, without a factor B, and silu of the sum is q, k and v: queries and keys of `key_heads`
    and values of `value_heads`. Of every value head, with the q and k of its key head, both divided by their length,
    and q by sqrt(key_dim) too:

        S = exp(decay * softplus(a + dt_bias)) * S
        S = S + k outer (sigmoid(b) * (v - k @ S))
        o = q @ S

    The norm is over a head (`Qwen3_5GatedDeltaNet`).
    """

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    window: int
    """Number of positions that the convolution sums, a row's own and the last ones before it."""
    tiled: bool = False
    """Whether value head i has key head i % key_heads, as in GGUF files; else those of a key head are neighbours."""
    type: Literal["gated_delta"] = "gated_delta"

    kv_source: ClassVar[None] = None
    """It has states and a cache of its own."""
    kind: ClassVar[AttentionKind] = "sliding"
    """The cache of its convolution holds the positions that sliding attention with the same window would see."""

    @property
    def key_width(self) -> int:
        """Numbers in a row of keys, and in a row of queries."""
        return self.key_heads * self.key_dim

    @property
    def value_width(self) -> int:
        """Numbers in a row of values."""
        return self.value_heads * self.value_dim

    @property
    def channels(self) -> int:
        """Channels of the convolution."""
        return 2 * self.key_width + self.value_width

    @property
    def kv_width(self) -> int:
        """Numbers in each half of a row of its cache."""
        return self.channels // 2


@dataclass(frozen=True)
class ExpertsConfig:
    """The experts of a layer: feed-forward blocks of which each token uses the few with the best scores."""

    count: int
    top: int
    """Number of experts that each token uses."""
    intermediate_size: int
    """Inner width of one expert."""
    bias: bool = False
    """Whether the router's and the experts' projections have a bias."""
    scoring: Scoring = "softmax"
    selection_bias: bool = False
    """Whether each expert has a number that is added where experts are chosen, and only there: to the sigmoid of its
    score, or to the softmax of it over all scores (`Ernie4_5_MoeTopKRouter`)."""


@dataclass(frozen=True)
class FeedForward:
    """A dense block, experts, or both.

    A dense block, and every expert, is down(activation(gate(x)) * up(x)). The experts' output is the sum over a token's
    experts of weight * expert(x), where the weights are the softmax of the scores of these experts, or of all
    (`OlmoeSparseMoeBlock`), or their sigmoids divided by the sum of these (`Lfm2MoeSparseMoeBlock`). Experts alone and
    their router read the block's input (`Qwen3MoeSparseMoeBlock`). So do experts beside a dense block that is shared,
    an expert of every token, and the block's output is dense(x) plus theirs (`Ernie4_5_MoeSparseMoeBlock`), or
    sigmoid(gate @ x) * dense(x), where gate @ x is one number, plus theirs (`Qwen3_5MoeSparseMoeBlock`). Experts beside
    another dense block read the residual stream through a norm of their own, and the router through another; each
    weight is multiplied by a factor of its expert, and the block's output is the sum of the dense output and the
    experts', each normed (`Gemma4TextDecoderLayer`).
    """

    width: int
    """Rows of gate and up of the dense block; 0 if there is none."""
    activation: Activation
    experts: ExpertsConfig | None = None
    """None if the layer has the dense block only."""
    shared: bool = False
    """Whether the dense block is an expert of every token."""
    shared_gate: bool = True
    """Whether a dense block that is shared has a gate."""
    type: Literal["feed_forward"] = "feed_forward"

    @property
    def normed(self) -> bool:
        """Whether experts and the dense block have norms of their own."""
        return self.width > 0 and self.experts is not None and not self.shared


@dataclass(frozen=True)
class LayerEmbedding:
    """projection(activation(gate(x)) * slice), with the layer's slice of the token's per-layer embedding."""

    width: int
    """Numbers of a slice."""
    activation: Activation
    type: Literal["layer_embedding"] = "layer_embedding"


Mixer = Attention | ShortConvolution | GatedDelta
"""The block in which a row reads other positions, from a cache or a state."""

Body = Mixer | FeedForward | LayerEmbedding


@dataclass(frozen=True)
class Block:
    """h += norm_out(body(norm_in(h)))."""

    body: Body
    norm_in: bool
    norm_out: bool


@dataclass(frozen=True)
class Layer:
    """A decoder layer: its blocks are a mixer, feed-forward, and a per-layer embedding if the model has these."""

    blocks: tuple[Block, ...]
    scalar: bool = False
    """Whether the residual stream is multiplied by a number at the end."""

    @property
    def mixer(self) -> Mixer:
        """The layer's first block: attention, a convolution or a gated delta rule."""
        return next(block.body for block in self.blocks if isinstance(block.body, Mixer))

    @property
    def feed_forward(self) -> FeedForward:
        """The layer's feed-forward part, of which every layer has one."""
        return next(block.body for block in self.blocks if isinstance(block.body, FeedForward))


@dataclass(frozen=True, kw_only=True)
class Decoder:
    """The fields that the target's and the drafter's configuration have in common."""

    graph: str
    """File name of the ONNX graph."""
    hidden_size: int
    norm_eps: float
    rotary: tuple[tuple[float, ...], ...]
    """The rotary embeddings of the layers, each once: the angle per position, in radians, of every pair of numbers
    (i, i + head_dim / 2) of a head. A pair with 0 is not turned."""
    layers: tuple[Layer, ...]

    @property
    def attention(self) -> tuple[Attention, ...]:
        """The attention of the layers that have it, in their order."""
        return tuple(own for layer in self.layers if isinstance(own := layer.mixer, Attention))

    @property
    def kinds(self) -> tuple[AttentionKind, ...]:
        """The kinds of caches that its layers have or read."""
        found = {layer.mixer.kind for layer in self.layers}
        return tuple(kind for kind in KINDS if kind in found)

    @property
    def attention_kinds(self) -> tuple[AttentionKind, ...]:
        """The kinds of attention that its layers have."""
        found = {own.kind for own in self.attention}
        return tuple(kind for kind in KINDS if kind in found)

    @property
    def convolves(self) -> bool:
        """Whether some of its layers have a convolution."""
        return len(self.attention) < len(self.layers)

    @cached_property
    def window(self) -> int | None:
        """The window of its layers with sliding attention or a convolution; None if it has none."""
        return next((own.window for layer in self.layers if (own := layer.mixer).window is not None), None)

    def frequencies(self) -> list[NDArray[np.float32]]:
        """Its rotary embeddings as arrays, float32[head_dim / 2] each."""
        return [np.array(each, np.float32) for each in self.rotary]


def rotary_numbers(frequencies: NDArray[np.float32]) -> tuple[float, ...]:
    """Rotary frequencies for `Decoder.rotary`: the shortest decimals that become the same float32 numbers."""
    return tuple(float(str(each)) for each in frequencies)


def check_decoder(name: str, decoder: Decoder) -> None:
    """Check every number of a decoder; `name` is for messages.

    Raises:
        InvalidFieldError: a number is out of range, or contradicts another.
    """
    check_number(f"hidden_size of {name}", decoder.hidden_size)
    check_positive(f"norm_eps of {name}", decoder.norm_eps, 1.0)
    require(bool(decoder.layers), f"{name} has no layers")
    require(len(decoder.layers) <= MAX_LAYERS, f"{name} has {len(decoder.layers)} layers")
    require(len(decoder.rotary) <= len(decoder.layers), f"{name} has {len(decoder.rotary)} rotary embeddings")
    for frequency in itertools.chain.from_iterable(decoder.rotary):
        require(0 <= frequency <= MAX_FREQUENCY, f"a rotary frequency of {name} is {frequency!r:.99}")
    for index, layer in enumerate(decoder.layers):
        place = f"layer {index} of {name}"
        types = [block.body.type for block in layer.blocks]
        known = types[:1] in (["attention"], ["short_convolution"], ["gated_delta"]) and types[1:2] == ["feed_forward"]
        require(known, f"{place} has the blocks {', '.join(types)!s:.99}")
        require(types[2:] in ([], ["layer_embedding"]), f"{place} has the blocks {', '.join(types)!s:.99}")
        if isinstance(own := layer.mixer, Attention):
            check_attention(place, own, decoder)
        elif isinstance(own, ShortConvolution):
            _check_convolution(place, own.channels, own.window)
        else:
            _check_delta(place, own)
        if own.window is not None:
            check_number(f"window of {place}", own.window)
            require(own.window == decoder.window, f"the window of {place} is {own.window}, not {decoder.window}")
        experts = layer.feed_forward.experts
        for body in (block.body for block in layer.blocks):
            if not isinstance(body, Mixer):
                least = 0 if body is layer.feed_forward and experts is not None else 1
                check_number(f"width of the {body.type} of {place}", body.width, least=least)
                known = isinstance(body, FeedForward) or body.activation != "clamped_swiglu"
                require(known, f"the {body.type} of {place} has the activation {body.activation}")
        both = experts is not None and layer.feed_forward.width > 0
        require(both or not layer.feed_forward.shared, f"{place} has a shared expert without others")
        if experts is not None:
            check_number(f"experts of {place}", experts.count, MAX_EXPERTS)
            check_number(f"experts of {place} that a token takes", experts.top, experts.count)
            check_number(f"intermediate_size of the experts of {place}", experts.intermediate_size)
            biased = experts.selection_bias and experts.scoring == "softmax_of_all"
            require(not biased, f"the experts of {place} have a bias beside a softmax of all scores")
    require(bool(decoder.attention), f"{name} has no layer with attention")
    mixed = decoder.convolves and "sliding" in decoder.attention_kinds
    require(not mixed, f"{name} has convolutions beside sliding attention, which is not supported")
    turned = {own.rotary for own in decoder.attention}  # the size of any other rotary embedding is unchecked
    require(turned.issuperset(range(len(decoder.rotary))), f"no layer of {name} has some of its rotary embeddings")


def check_attention(place: str, own: Attention, decoder: Decoder) -> None:
    """Check every number of an attention block but its window; `place` is for messages."""
    for field in ("heads", "kv_heads", "head_dim"):
        check_number(f"{field} of {place}", getattr(own, field))
    require(own.heads % own.kv_heads == 0, f"{own.heads} query heads of {place} cannot share {own.kv_heads} KV heads")
    check_positive(f"scale of {place}", own.scale, 1e6)
    if own.softcap is not None:
        check_positive(f"softcap of {place}", own.softcap, 1e3)  # the kernel's tanh has an error of 1e-7
    if own.rotary is not None:
        check_number(f"rotary of {place}", own.rotary, len(decoder.rotary) - 1, least=0)
        pairs = len(decoder.rotary[own.rotary])
        require(2 * pairs == own.head_dim, f"{place} rotates {pairs} pairs of heads of {own.head_dim} numbers")
    if own.kv_source is not None:
        require(not (own.k_norm or own.v_norm or own.k_eq_v), f"{place} norms keys and values that it does not have")
    require(own.softcap is None or not own.sinks, f"{place} has sinks beside a softcap, which is not supported")
    require(own.q_norm or own.k_norm or not own.whole_norms, f"{place} has no norms of queries and keys")
    require(not (own.bias and own.k_eq_v), f"{place} has a bias of values that are its keys")


def _check_delta(place: str, own: GatedDelta) -> None:
    for field in ("key_heads", "value_heads", "key_dim", "value_dim"):
        check_number(f"{field} of {place}", getattr(own, field))
    require(own.value_heads % own.key_heads == 0, f"value heads of {place} cannot share its key heads")
    require(own.key_dim * own.value_dim <= MAX_STATE, f"{place} has states of {own.key_dim} x {own.value_dim}")
    _check_convolution(place, own.channels, own.window)


def _check_convolution(place: str, channels: int, window: int) -> None:
    check_number(f"channels of {place}", channels)
    require(channels % 2 == 0, f"{channels} channels of {place} have no two halves")
    check_number(f"window of {place}", window, MAX_TAPS)
