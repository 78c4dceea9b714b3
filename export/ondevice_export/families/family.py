"""A family of models: what its checkpoints' `config.json` leaves unsaid, and the reader that all families share.

`decoder` turns a configuration into the decoder of a bundle; `Family.layer` is the part that differs most, one
decoder layer as data. `attention` and `feed_forward` make the blocks from fields that are spelled alike everywhere.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ondevice.bundle_format.decoder import (
    MAX_EXPERTS,
    Activation,
    Attention,
    Block,
    ExpertsConfig,
    FeedForward,
    Layer,
    Mixer,
    Scoring,
    rotary_numbers,
)
from ondevice.bundle_format.model_config import PerLayerEmbeddings, Target
from ondevice.errors import CheckpointError
from ondevice_export.checkpoint.config import CONVOLUTION, DELTA, SLIDING, newer_spelling
from ondevice_export.checkpoint.json_fields import JsonFields
from ondevice_export.checkpoint.rope import rotary, usable_context
from ondevice_export.checkpoint.stacks import Taken

TARGET_GRAPH = "target.onnx"

MAX_HEAD_DIM = 1 << 14
"""Most numbers of a head: its frequencies are made before a tensor's shape contradicts a damaged configuration."""

MAX_HEADS = 1 << 14
"""Most heads of queries: rows of a joined matrix are listed head by head before its shape contradicts the same."""

RowsOf = tuple[str, Sequence[Taken]]
"""A tensor of a checkpoint, and those of its rows that are a tensor of their own."""

_OF_LAYER = ("head_dim", "num_key_value_heads")
"""Fields in which layers may differ."""

_ACTIVATIONS: dict[Any, Activation] = {"gelu_pytorch_tanh": "gelu_tanh", "silu": "silu", "swish": "silu"}


class Config(JsonFields):
    """The text model's configuration in the newer spelling (`newer_spelling`), while a decoder is made from it.

    Attributes:
        ropes: the distinct rotary embeddings of the layers made so far.
        head_dim: numbers of a head, where no layer says otherwise.
        context: the longest text of a bundle.
        limit: the most that it can be where a user asks for it.
    """

    def __init__(self, data: Mapping[str, Any], origin: str, context: int | None = None) -> None:
        """
        context : the longest text that a user asks for; a model may end before
        """
        super().__init__(data, origin)
        self.ropes: list[tuple[float, ...]] = []
        hidden, heads = self.integer("hidden_size"), self.integer("num_attention_heads", maximum=MAX_HEADS)
        self.head_dim = self.integer("head_dim", max(1, hidden // heads))
        most, kinds = self.integer("max_position_embeddings"), set(data["layer_types"]) - {CONVOLUTION, DELTA}
        if not kinds:
            raise CheckpointError(f"{origin}: no layer has attention, which is not supported")
        self.context, self.limit = (
            min(usable_context(self.rope(kind), most, asked) for kind in kinds) for asked in (context, most)
        )

    def kind(self, index: int) -> str:
        """`full_attention`, `sliding_attention`, `conv` or `linear_attention`."""
        return str(self.data["layer_types"][index])

    @property
    def activation(self) -> Activation:
        name = self.data["hidden_activation"]
        if not isinstance(name, str) or name not in _ACTIVATIONS:
            raise CheckpointError(
                f"{self.origin}: activation {name!r:.99} is not supported, only {', '.join(_ACTIVATIONS)}"
            )
        return _ACTIVATIONS[name]

    @property
    def token_ids(self) -> dict[str, Any]:
        """The fields `bos_token_id`, `eos_token_id`, `pad_token_id` and `add_bos_token`, unchecked."""
        names = ("bos_token_id", "eos_token_id", "pad_token_id", "add_bos_token")
        return {name: self.data.get(name) for name in names}

    def of_layer(self, index: int) -> JsonFields:
        """The fields in which a layer differs from others: its entry of `per_layer_config`, as transformers saves it.

        The keys are padded with zeros, such as `04` in a model of 35 layers. transformers refuses other fields too.
        """
        layers = self.mapping("per_layer_config", {})
        for name in layers.data:
            if not name.isdecimal() or len(name) > 9:
                raise CheckpointError(f"{layers.origin}: {name!r:.99} is not the number of a layer")
            if int(name) == index:
                found = layers.mapping(name, {})
                for field_name in found.data:
                    if field_name not in _OF_LAYER:
                        raise CheckpointError(f"{found.origin}: {field_name!r:.99} of one layer is not supported")
                return found
        return JsonFields({}, layers.origin)

    def rope(self, kind: str) -> JsonFields:
        return self.mapping("rope_parameters", {}).mapping(kind, {})

    def rotary(self, index: int, head_dim: int, turned: int | None) -> tuple[int | None, float]:
        """The rotary embedding of a layer: its index in `ropes`, or None; and the factor of its cosines and sines.

        turned : rotated numbers of a head, if a family has put them in the order of a bundle; None for what
            `partial_rotary_factor` says
        """
        rotates = self.data.get("no_rope_layers")
        theta = self.data["layer_rope_theta"][index] if "layer_rope_theta" in self.data else None
        if theta == 0 or (rotates is not None and not rotates[index]):
            return None, 1.0
        if head_dim > MAX_HEAD_DIM:
            raise CheckpointError(f"{self.origin}: a head of {head_dim} numbers is not supported, {MAX_HEAD_DIM} are")
        parameters, still = self.rope(self.kind(index)), 0
        if theta is not None:
            parameters = JsonFields({**parameters.data, "rope_theta": theta}, parameters.origin)
        if turned is not None:
            parameters = JsonFields({**parameters.data, "partial_rotary_factor": 1.0}, parameters.origin)
            still = head_dim - turned
        most = self.integer("max_position_embeddings")
        found = rotary(parameters, head_dim - still, most, longest=self.context)
        numbers = rotary_numbers(np.pad(found.frequencies, (0, still // 2)))
        if numbers not in self.ropes:
            self.ropes.append(numbers)
        return self.ropes.index(numbers), found.factor


def _no_embeddings(config: Config) -> PerLayerEmbeddings | None:
    return None


def _as_stored(config: Config, index: int) -> Mapping[str, RowsOf]:
    return {}


def _as_it_is(data: dict[str, Any]) -> dict[str, Any]:
    return data


@dataclass(frozen=True, kw_only=True)
class Family:
    """The computations of a family's models, beyond what `config.json` says."""

    name: str
    architectures: tuple[str, ...]
    """Names in `architectures` of `config.json`."""
    defaults: Mapping[str, Any]
    """Values of fields that `config.json` leaves out, in either spelling: those of the configuration's class. A field
    that only some classes have, such as a window, is read only if it is here."""
    layer: Callable[[Config, int], Layer]
    """Layer `index` as data."""
    names: Mapping[str, str] = field(default_factory=dict)
    """Tensors whose names in a checkpoint are not those of `tensor_table`: the bundle's -> the checkpoint's, those of a
    layer without its prefix."""
    rows_of: Callable[[Config, int], Mapping[str, RowsOf]] = _as_stored
    """Tensors of layer `index` that are rows of others in a checkpoint, all without the layer's prefix."""
    scaled_embedding: bool = False
    """Whether the token embedding is multiplied by sqrt(hidden_size), beside `embedding_multiplier`."""
    per_layer: Callable[[Config], PerLayerEmbeddings | None] = _no_embeddings
    """The per-layer embeddings, if its models have them."""
    towers: bool = False
    """Whether vision and audio towers of its checkpoints can be read; those of others are left out."""
    spelling: Callable[[dict[str, Any]], dict[str, Any]] = _as_it_is
    """Changes to the configuration, once it is in the newer spelling."""

    def config(self, data: Mapping[str, Any], origin: str, context: int | None = None) -> Config:
        return Config(self.spelling(newer_spelling(data, self.defaults, origin)), origin, context)


def decoder(family: Family, config: Config) -> Target:
    """The decoder that a configuration describes.

    Raises:
        CheckpointError: a field is missing, damaged, or asks for something that is not supported.
    """
    hidden, softcap = config.integer("hidden_size"), config.data.get("final_logit_softcapping")
    layers = tuple(family.layer(config, index) for index in range(len(config.data["layer_types"])))
    return Target(
        graph=TARGET_GRAPH,
        hidden_size=hidden,
        norm_eps=config.number("rms_norm_eps"),
        rotary=tuple(config.ropes),
        layers=layers,
        vocab_size=config.integer("vocab_size"),
        context_length=config.context,
        embedding_factor=(math.sqrt(hidden) if family.scaled_embedding else 1.0)
        * config.number("embedding_multiplier", 1.0),
        softcap=None if softcap is None else config.number("final_logit_softcapping"),
        tied=config.flag("tie_word_embeddings"),
        per_layer=family.per_layer(config),
    )


def attention(
    config: Config,
    index: int,
    *,
    scale: float | None = None,
    head_dim: int | None = None,
    turned: int | None = None,
    **own: Any,
) -> Attention:
    """The attention of layer `index`, with the fields that a family sets itself.

    scale : factor of the scores, head_dim**-0.5 if None
    head_dim : numbers of a head, `Config.head_dim` if None
    turned : see `Config.rotary`
    own : further fields of `Attention`, in place of those of the configuration
    """
    heads, special = config.integer("num_attention_heads"), config.of_layer(index)
    size = special.integer("head_dim", config.head_dim) if head_dim is None else head_dim
    rope, factor = config.rotary(index, size, turned)
    kv_heads = special.integer("num_key_value_heads", config.integer("num_key_value_heads", heads))
    sizes: dict[str, Any] = {"kv_heads": kv_heads, **own}
    if heads % sizes["kv_heads"]:
        raise CheckpointError(f"{config.origin}: {heads} query heads cannot share {sizes['kv_heads']} KV heads")
    if size % 2:
        raise CheckpointError(f"{config.origin}: a head of {size} numbers cannot be rotated")
    window = min(config.integer("sliding_window"), config.context) if config.kind(index) == SLIDING else None
    scale = (size**-0.5 if scale is None else scale) * factor * factor  # cos and sin of q and of k have it
    return Attention(heads=heads, head_dim=size, scale=scale, **{"window": window, "rotary": rope, **sizes})


def pre_normed(own: Mixer, feed: FeedForward) -> Layer:
    """A layer whose blocks have a norm before them and none after, as in most families."""
    return Layer((Block(own, norm_in=True, norm_out=False), Block(feed, norm_in=True, norm_out=False)))


def feed_forward(config: Config) -> FeedForward:
    """The dense feed-forward block of a layer."""
    return FeedForward(config.integer("intermediate_size"), config.activation)


def experts(config: Config, width: str, count: str = "num_local_experts", scoring: Scoring = "softmax") -> FeedForward:
    """Experts in place of the dense block, which have no biases.

    width, count : the fields that have the inner width of one, and their number
    """
    number = config.integer(count, maximum=MAX_EXPERTS)
    top = config.integer("num_experts_per_tok", maximum=number)
    return FeedForward(0, config.activation, ExpertsConfig(number, top, config.integer(width), scoring=scoring))
