"""`config.json` of the Gemma 4 families, read without transformers.

Absent fields take the defaults of `Gemma4TextConfig` or `Gemma4UnifiedTextConfig` (transformers 5.22.2). Two
spellings of the layers' differences exist: the hub's flat one (`global_head_dim`, `num_global_key_value_heads`) and
`per_layer_config`, which `save_pretrained` writes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ondevice.contract import AttentionKind
from ondevice.errors import CheckpointError
from ondevice_export.json_fields import Fields, read_json

TARGETS = {
    "Gemma4ForConditionalGeneration": "gemma4",
    "Gemma4ForCausalLM": "gemma4",
    "Gemma4UnifiedForConditionalGeneration": "gemma4_unified",
    "Gemma4UnifiedForCausalLM": "gemma4_unified",
}
DRAFTERS = ("Gemma4AssistantForCausalLM", "Gemma4UnifiedAssistantForCausalLM")

MOST_LAYERS = 1000
"""The largest Gemma 4 has 60."""

MOST_EXPERTS = 1024
"""In a layer: 26B-A4B has 128."""

_KINDS: dict[str, AttentionKind] = {"full_attention": "full", "sliding_attention": "sliding"}
_ROPE = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
    "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1_000_000.0},
}


@dataclass(frozen=True)
class Rope:
    """Rotary embedding of one kind of layer."""

    theta: float
    rotated: float
    """Share of the head's frequencies that turn; the others are zero (`proportional`)."""
    factor: float


@dataclass(frozen=True)
class ExpertsConfig:
    """Feed-forward blocks of which every token takes a few, beside the dense one that all take."""

    count: int
    top: int
    """That a token takes."""
    intermediate_size: int
    """Of one expert."""


@dataclass(frozen=True)
class LayerConfig:
    kind: AttentionKind
    head_dim: int
    kv_heads: int
    kv_source: int | None
    """The layer whose cache this one reads, itself where it owns one; None in a drafter, which reads the target's."""
    k_eq_v: bool
    """No v projection: v is the k projection's output."""
    intermediate_size: int
    """Of the dense feed-forward block."""
    experts: ExpertsConfig | None = None


@dataclass(frozen=True)
class TextConfig:
    """A Gemma 4 decoder: the target's, or the drafter's."""

    vocab_size: int
    hidden_size: int
    query_heads: int
    context_length: int
    sliding_window: int
    norm_eps: float
    softcap: float | None
    ple_size: int
    ple_vocab_size: int
    rope: Mapping[AttentionKind, Rope]
    layers: tuple[LayerConfig, ...]
    tied: bool
    """Whether the head is the token embedding."""
    token_ids: Mapping[str, Any]
    """`bos_token_id`, `eos_token_id` and `pad_token_id` as the file has them."""

    @property
    def first_shared_layer(self) -> int:
        """Index of the first layer without KV of its own; the number of layers where all have it."""
        owning = [index for index, layer in enumerate(self.layers) if layer.kv_source == index]
        return owning[-1] + 1 if owning else 0

    def last_kv_layer(self, kind: AttentionKind) -> int | None:
        """Index of the layer whose cache upper layers and the drafter read (`store_full_length_kv`)."""
        found = [i for i, layer in enumerate(self.layers) if layer.kind == kind and layer.kv_source == i]
        return found[-1] if found else None


@dataclass(frozen=True)
class DrafterConfig:
    """A Gemma 4 assistant around its decoder."""

    text: TextConfig
    backbone_hidden_size: int
    centroids: int | None
    """Clusters of the vocabulary; None where the whole head is scored."""
    centroid_top_k: int

    @property
    def candidates(self) -> int:
        """Tokens scored per step."""
        if self.centroids is None:
            return self.text.vocab_size
        return self.centroid_top_k * (self.text.vocab_size // self.centroids)


def read_target(directory: Path) -> tuple[str, TextConfig]:
    """The family and the decoder of a target checkpoint."""
    path = directory / "config.json"
    data = read_json(path)
    family = TARGETS.get(_architecture(data))
    if family is None:
        hint = ": this is a drafter, pass it with --drafter" if _architecture(data) in DRAFTERS else ""
        raise CheckpointError(
            f"{path}: architecture {_architecture(data)!r} is not a Gemma 4 target{hint} (known: {', '.join(TARGETS)})"
        )
    return family, _text_config(Fields(data, str(path)), owns_kv=True)


def read_drafter(directory: Path) -> DrafterConfig:
    """The configuration of an assistant checkpoint."""
    path = directory / "config.json"
    data = read_json(path)
    if _architecture(data) not in DRAFTERS:
        raise CheckpointError(
            f"{path}: architecture {_architecture(data)!r} is not a Gemma 4 drafter (known: {', '.join(DRAFTERS)})"
        )
    fields = Fields(data, str(path))
    text = _text_config(fields, owns_kv=False)
    if any(layer.experts is not None for layer in text.layers):
        raise CheckpointError(f"{path}: enable_moe_block is set: a drafter with experts is not supported")
    centroids = fields.integer("num_centroids", 2048) if fields.flag("use_ordered_embeddings") else None
    top_k = fields.integer("centroid_intermediate_top_k", 32)
    if centroids is not None and (text.vocab_size % centroids or top_k > centroids):
        raise CheckpointError(
            f"{path}: {centroids} centroids, {top_k} of them scored, do not fit a vocabulary of {text.vocab_size}"
        )
    return DrafterConfig(text, fields.integer("backbone_hidden_size", 1536), centroids, top_k)


def _architecture(data: Mapping[str, Any]) -> str:
    names = data.get("architectures")
    return str(names[0])[:99] if isinstance(names, list) and names else "none"


def _text_config(outer: Fields, *, owns_kv: bool) -> TextConfig:
    fields = outer.mapping("text_config", outer.data)
    _refuse_unsupported(outer, fields)
    tied = fields.flag("tie_word_embeddings", True) and outer.flag("tie_word_embeddings", True)
    if not tied and not owns_kv:
        raise CheckpointError(f"{outer.origin}: a drafter whose head is not tied to its embedding is not supported")
    unified = str(fields.data.get("model_type", "")).startswith("gemma4_unified")
    heads = fields.integer("num_attention_heads", 8)
    layers = _layers(fields, owns_kv=owns_kv)
    for layer in layers:
        if heads % layer.kv_heads:
            raise CheckpointError(f"{fields.origin}: {heads} query heads cannot share {layer.kv_heads} KV heads")
    # The unified text model has no per-layer embeddings and no field to say so.
    ple = 0 if unified else fields.integer("hidden_size_per_layer_input", 256, minimum=0)
    softcap = fields.data.get("final_logit_softcapping")
    return TextConfig(
        vocab_size=fields.integer("vocab_size", 262_144),
        hidden_size=fields.integer("hidden_size", 2304),
        query_heads=heads,
        context_length=fields.integer("max_position_embeddings", 262_144 if unified else 131_072),
        sliding_window=fields.integer("sliding_window", 1024 if unified else 512),
        norm_eps=fields.number("rms_norm_eps", 1e-6),
        softcap=None if softcap is None else fields.number("final_logit_softcapping", 30.0),
        ple_size=ple,
        ple_vocab_size=fields.integer("vocab_size_per_layer_input", 262_144, minimum=0),
        rope={kind: _rope(fields, name) for name, kind in _KINDS.items()},
        layers=layers,
        tied=tied,
        token_ids={
            name: fields.data.get(name, outer.data.get(name, default))
            for name, default in (("bos_token_id", 2), ("eos_token_id", 1), ("pad_token_id", 0))
        },
    )


def _refuse_unsupported(outer: Fields, fields: Fields) -> None:
    if fields.flag("attention_bias"):
        raise CheckpointError(f"{outer.origin}: attention_bias is not supported")
    if fields.data.get("use_bidirectional_attention") == "all":
        raise CheckpointError(f"{outer.origin}: bidirectional attention is not supported, this is no language model")
    activation = fields.data.get("hidden_activation", "gelu_pytorch_tanh")
    if activation != "gelu_pytorch_tanh":
        raise CheckpointError(f"{outer.origin}: activation {activation!r:.99} is not supported, only gelu_pytorch_tanh")


def _layers(fields: Fields, *, owns_kv: bool) -> tuple[LayerConfig, ...]:
    count = fields.integer("num_hidden_layers", 30, maximum=MOST_LAYERS)
    kinds = _layer_kinds(fields, count)
    shared = fields.integer("num_kv_shared_layers", 0, minimum=0) if owns_kv else count
    first_shared = count - shared
    if owns_kv and first_shared <= 0:
        raise CheckpointError(f"{fields.origin}: {shared} KV-shared layers of {count} leave none that owns a cache")
    k_eq_v = fields.flag("attention_k_eq_v")
    double_wide = fields.flag("use_double_wide_mlp") and owns_kv
    width = fields.integer("intermediate_size", 9216)
    experts = _experts(fields)
    layers = []
    for index, kind in enumerate(kinds):
        head_dim, kv_heads = _attention_shape(fields, index, kind, k_eq_v)
        layers.append(
            LayerConfig(
                kind=kind,
                head_dim=head_dim,
                kv_heads=kv_heads,
                kv_source=_kv_source(fields, kinds, index, first_shared) if owns_kv else None,
                k_eq_v=k_eq_v and kind == "full",
                intermediate_size=width * (2 if double_wide and index >= first_shared else 1),
                experts=experts,
            )
        )
    return tuple(layers)


def _experts(fields: Fields) -> ExpertsConfig | None:
    """What all layers have where `enable_moe_block` is set; its three sizes have no defaults."""
    if not fields.flag("enable_moe_block"):
        return None
    count = fields.integer("num_experts", 0, maximum=MOST_EXPERTS)
    top = fields.integer("top_k_experts", 0, maximum=count)
    return ExpertsConfig(count, top, fields.integer("moe_intermediate_size", 0))


def _layer_kinds(fields: Fields, count: int) -> list[AttentionKind]:
    names = fields.data.get("layer_types")
    if names is None:
        names = ["full_attention" if (index + 1) % 6 == 0 else "sliding_attention" for index in range(count)]
    if not isinstance(names, list) or len(names) != count or not all(name in list(_KINDS) for name in names):
        raise CheckpointError(f"{fields.origin}: layer_types does not name {count} full or sliding attention layers")
    kinds = [_KINDS[name] for name in names]
    kinds[-1] = "full"  # as Gemma4TextConfig does
    return kinds


def _kv_source(fields: Fields, kinds: list[AttentionKind], index: int, first_shared: int) -> int:
    if index < first_shared:
        return index
    donors = [donor for donor in range(first_shared) if kinds[donor] == kinds[index]]
    if not donors:
        raise CheckpointError(f"{fields.origin}: layer {index} shares the KV of a {kinds[index]} layer, there is none")
    return donors[-1]


def _attention_shape(fields: Fields, index: int, kind: AttentionKind, k_eq_v: bool) -> tuple[int, int]:
    """Head size and KV heads of one layer."""
    head_dim = fields.integer("head_dim", 256)
    kv_heads = fields.integer("num_key_value_heads", 4)
    if fields.data.get("per_layer_config") is not None:
        own = _layer_overrides(fields.mapping("per_layer_config", {}), index)
        return own.integer("head_dim", head_dim), own.integer("num_key_value_heads", kv_heads)
    if kind == "full":
        head_dim = fields.integer("global_head_dim", 512)
        # Gemma4TextConfig reads the global KV heads only where attention_k_eq_v is set.
        if k_eq_v and fields.data.get("num_global_key_value_heads") is not None:
            kv_heads = fields.integer("num_global_key_value_heads", kv_heads)
    return head_dim, kv_heads


def _layer_overrides(layers: Fields, index: int) -> Fields:
    """One layer's entry of `per_layer_config`, whose keys transformers pads with zeros: `04` of 35 layers."""
    for name in layers.data:
        if not name.isdecimal() or len(name) > 9:
            raise CheckpointError(f"{layers.origin}: {name!r:.99} is not the number of a layer")
        if int(name) == index:
            return layers.mapping(name, {})
    return Fields({}, layers.origin)


def _rope(fields: Fields, name: str) -> Rope:
    own = fields.mapping("rope_parameters", _ROPE).mapping(name, _ROPE[name])
    rope_type = own.data.get("rope_type", "default")
    if rope_type not in ("default", "proportional"):
        raise CheckpointError(f"{own.origin}: rope_type {rope_type!r:.99} is not supported")
    proportional = rope_type == "proportional"
    return Rope(
        theta=own.number("rope_theta", 10_000.0),
        rotated=own.number("partial_rotary_factor", 1.0, maximum=1.0) if proportional else 1.0,
        factor=own.number("factor", 1.0) if proportional else 1.0,
    )
