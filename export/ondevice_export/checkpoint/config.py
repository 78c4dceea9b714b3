"""`config.json` of the Gemma 4 families as an `ondevice.bundle_format.model_config`, read without transformers.

Absent fields take the defaults of `Gemma4TextConfig` or `Gemma4UnifiedTextConfig` (transformers 5.22.2). Two
spellings of the layers' differences exist: the hub's flat one (`global_head_dim`, `num_global_key_value_heads`) and
`per_layer_config`, which `save_pretrained` writes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ondevice.bundle_format.graph_io import AttentionKind
from ondevice.bundle_format.model_config import (
    MOST_EXPERTS,
    MOST_LAYERS,
    DrafterEntry,
    ExpertsConfig,
    Layer,
    LayerConfig,
    Rope,
    Shortlist,
    Target,
)
from ondevice.errors import CheckpointError, PairMismatchError
from ondevice_export.checkpoint.json_fields import Fields, read_json

TARGET_GRAPH, DRAFTER_GRAPH = "target.onnx", "drafter.onnx"

TARGETS = {
    "Gemma4ForConditionalGeneration": "gemma4",
    "Gemma4ForCausalLM": "gemma4",
    "Gemma4UnifiedForConditionalGeneration": "gemma4_unified",
    "Gemma4UnifiedForCausalLM": "gemma4_unified",
}
DRAFTERS = ("Gemma4AssistantForCausalLM", "Gemma4UnifiedAssistantForCausalLM")

_KINDS: dict[str, AttentionKind] = {"full_attention": "full", "sliding_attention": "sliding"}
_ROPE = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
    "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1_000_000.0},
}


def read_target(directory: Path) -> tuple[str, Target]:
    """Read the family and the configuration of a target checkpoint.

    Raises:
        CheckpointError: the architecture is unknown, or the configuration is damaged or not supported.
    """
    path = directory / "config.json"
    data = read_json(path)
    family = TARGETS.get(_architecture(data))
    if family is None:
        hint = ": this is a drafter, pass it with --drafter" if _architecture(data) in DRAFTERS else ""
        raise CheckpointError(
            f"{path}: architecture {_architecture(data)!r} is not a Gemma 4 target{hint} (known: {', '.join(TARGETS)})"
        )
    outer = Fields(data, str(path))
    fields = _text_fields(outer)
    unified = _is_unified(fields)
    # The unified text model has no per-layer embeddings, and its config.json has no field for them.
    ple = 0 if unified else fields.integer("hidden_size_per_layer_input", 256, minimum=0)
    ple_entries = fields.integer("vocab_size_per_layer_input", 262_144, minimum=0)
    softcap = fields.data.get("final_logit_softcapping")
    context = fields.integer("max_position_embeddings", 262_144 if unified else 131_072)
    return family, Target(
        **_decoder(fields),
        graph=TARGET_GRAPH,
        vocab_size=fields.integer("vocab_size", 262_144),
        context_length=context,
        sliding_window=min(fields.integer("sliding_window", 1024 if unified else 512), context),
        softcap=None if softcap is None else fields.number("final_logit_softcapping", 30.0),
        tied=_tied(outer, fields),
        ple_size=ple,
        ple_vocab_size=ple_entries if ple else 0,
        layers=_target_layers(fields),
    )


def read_drafter(directory: Path, target: Target) -> DrafterEntry:
    """Read the configuration of a drafter ("assistant") checkpoint, for the target whose KV caches it reads.

    Raises:
        CheckpointError: the checkpoint is no assistant, or its configuration is damaged or not supported.
        PairMismatchError: the drafter was made for another target; the message has the values of both.
    """
    path = directory / "config.json"
    data = read_json(path)
    if _architecture(data) not in DRAFTERS:
        raise CheckpointError(
            f"{path}: architecture {_architecture(data)!r} is not a Gemma 4 drafter (known: {', '.join(DRAFTERS)})"
        )
    outer = Fields(data, str(path))
    fields = _text_fields(outer)
    if not _tied(outer, fields):
        raise CheckpointError(f"{path}: a drafter whose head is not tied to its embedding is not supported")
    layers = _drafter_layers(fields)
    if _experts(fields) is not None:
        raise CheckpointError(f"{path}: enable_moe_block is set: a drafter with experts is not supported")
    vocab_size = fields.integer("vocab_size", 262_144)
    shortlist = _shortlist(outer, vocab_size)
    backbone = outer.integer("backbone_hidden_size", 1536)
    full, sliding = _shared_caches(target, layers, vocab_size, backbone)
    return DrafterEntry(
        **_decoder(fields),
        graph=DRAFTER_GRAPH,
        full_layer=full,
        sliding_layer=sliding,
        candidates=vocab_size if shortlist is None else shortlist.candidates(vocab_size),
        shortlist=shortlist,
        layers=layers,
    )


def read_token_ids(directory: Path) -> dict[str, Any]:
    """The fields `bos_token_id`, `eos_token_id` and `pad_token_id` of a target's `config.json`, unchecked."""
    outer = Fields(read_json(directory / "config.json"), str(directory))
    fields = outer.mapping("text_config", outer.data)
    defaults = (("bos_token_id", 2), ("eos_token_id", 1), ("pad_token_id", 0))
    return {name: fields.data.get(name, outer.data.get(name, default)) for name, default in defaults}


def _shared_caches(target: Target, layers: tuple[LayerConfig, ...], vocab_size: int, backbone: int) -> tuple[int, int]:
    """The indices of the target's layers whose KV caches a drafter reads: (full attention, sliding attention).

    Raises:
        PairMismatchError: vocabulary size, hidden size or cache shapes of the two models differ.
    """
    if vocab_size != target.vocab_size:
        raise PairMismatchError(f"the drafter's vocabulary has {vocab_size} tokens, the target's {target.vocab_size}")
    if backbone != target.hidden_size:
        raise PairMismatchError(
            f"the drafter was made for a hidden size of {backbone}, the target's is {target.hidden_size}"
        )
    owners: dict[AttentionKind, int] = {}
    for kind in _KINDS.values():
        owner = target.last_kv_layer(kind)
        if owner is None:
            raise PairMismatchError(f"the target has no {kind} attention layer whose cache a drafter could read")
        owners[kind] = owner
    for index, layer in enumerate(layers):
        shared = target.layers[owners[layer.kind]]
        if (layer.kv_heads, layer.head_dim) != (shared.kv_heads, shared.head_dim):
            raise PairMismatchError(
                f"drafter layer {index} reads {layer.kv_heads} KV heads of {layer.head_dim}, "
                f"target layer {owners[layer.kind]} has {shared.kv_heads} of {shared.head_dim}"
            )
    return owners["full"], owners["sliding"]


def _architecture(data: Mapping[str, Any]) -> str:
    names = data.get("architectures")
    return str(names[0])[:99] if isinstance(names, list) and names else "none"


def _text_fields(outer: Fields) -> Fields:
    """The fields of the text model; raises CheckpointError where one asks for an unsupported feature."""
    fields = outer.mapping("text_config", outer.data)
    _refuse_unsupported(outer, fields)
    return fields


def _is_unified(fields: Fields) -> bool:
    return str(fields.data.get("model_type", "")).startswith("gemma4_unified")


def _tied(outer: Fields, fields: Fields) -> bool:
    return fields.flag("tie_word_embeddings", True) and outer.flag("tie_word_embeddings", True)


def _decoder(fields: Fields) -> dict[str, Any]:
    """The keyword arguments of a `Decoder`, except `graph`."""
    return {
        "hidden_size": fields.integer("hidden_size", 2304),
        "query_heads": _query_heads(fields),
        "norm_eps": fields.number("rms_norm_eps", 1e-6),
        "rope": {kind: _rope(fields, name) for name, kind in _KINDS.items()},
    }


def _query_heads(fields: Fields) -> int:
    return fields.integer("num_attention_heads", 8)


def _shortlist(outer: Fields, vocab_size: int) -> Shortlist | None:
    """The token clusters of a drafter's centroid head; None for a head over the whole vocabulary."""
    top = outer.integer("centroid_intermediate_top_k", 32)
    if not outer.flag("use_ordered_embeddings"):
        return None
    clusters = outer.integer("num_centroids", 2048)
    if vocab_size % clusters or top > clusters:
        raise CheckpointError(
            f"{outer.origin}: {clusters} centroids, {top} of them scored, do not fit a vocabulary of {vocab_size}"
        )
    return Shortlist(clusters, top)


def _refuse_unsupported(outer: Fields, fields: Fields) -> None:
    if fields.flag("attention_bias"):
        raise CheckpointError(f"{outer.origin}: attention_bias is not supported")
    if fields.data.get("use_bidirectional_attention") == "all":
        raise CheckpointError(f"{outer.origin}: bidirectional attention is not supported, this is no language model")
    activation = fields.data.get("hidden_activation", "gelu_pytorch_tanh")
    if activation != "gelu_pytorch_tanh":
        raise CheckpointError(f"{outer.origin}: activation {activation!r:.99} is not supported, only gelu_pytorch_tanh")


def _target_layers(fields: Fields) -> tuple[Layer, ...]:
    kinds = _layer_kinds(fields)
    shared = fields.integer("num_kv_shared_layers", 0, minimum=0)
    first_shared = len(kinds) - shared
    if first_shared <= 0:
        raise CheckpointError(
            f"{fields.origin}: {shared} KV-shared layers of {len(kinds)} leave none that owns a cache"
        )
    k_eq_v, double_wide = fields.flag("attention_k_eq_v"), fields.flag("use_double_wide_mlp")
    experts, layers = _experts(fields), []
    for index, kind in enumerate(kinds):
        sizes = _layer(fields, index, kind)
        wide = sizes.intermediate_size * (2 if double_wide and index >= first_shared else 1)
        source = _kv_source(fields, kinds, index, first_shared)
        layers.append(
            Layer(kind, sizes.kv_heads, sizes.head_dim, wide, source, k_eq_v=k_eq_v and kind == "full", experts=experts)
        )
    return tuple(layers)


def _drafter_layers(fields: Fields) -> tuple[LayerConfig, ...]:
    return tuple(_layer(fields, index, kind) for index, kind in enumerate(_layer_kinds(fields)))


def _experts(fields: Fields) -> ExpertsConfig | None:
    """The mixture of experts of every layer where `enable_moe_block` is set; its three sizes have no defaults."""
    if not fields.flag("enable_moe_block"):
        return None
    count = fields.integer("num_experts", 0, maximum=MOST_EXPERTS)
    top = fields.integer("top_k_experts", 0, maximum=count)
    return ExpertsConfig(count, top, fields.integer("moe_intermediate_size", 0))


def _layer_kinds(fields: Fields) -> list[AttentionKind]:
    count = fields.integer("num_hidden_layers", 30, maximum=MOST_LAYERS)
    names = fields.data.get("layer_types")
    if names is None:
        names = ["full_attention" if (index + 1) % 6 == 0 else "sliding_attention" for index in range(count)]
    if not isinstance(names, list) or len(names) != count or not all(name in list(_KINDS) for name in names):
        raise CheckpointError(f"{fields.origin}: layer_types does not name {count} full or sliding attention layers")
    kinds = [_KINDS[name] for name in names]
    kinds[-1] = "full"  # Gemma4TextConfig does the same
    return kinds


def _kv_source(fields: Fields, kinds: list[AttentionKind], index: int, first_shared: int) -> int:
    if index < first_shared:
        return index
    donors = [donor for donor in range(first_shared) if kinds[donor] == kinds[index]]
    if not donors:
        raise CheckpointError(f"{fields.origin}: layer {index} shares the KV of a {kinds[index]} layer, there is none")
    return donors[-1]


def _layer(fields: Fields, index: int, kind: AttentionKind) -> LayerConfig:
    """The configuration of layer `index`: its attention kind and its sizes, with its overrides applied."""
    sizes = LayerConfig(
        kind,
        fields.integer("num_key_value_heads", 4),
        fields.integer("head_dim", 256),
        fields.integer("intermediate_size", 9216),
    )
    if fields.data.get("per_layer_config") is not None:
        own = _layer_overrides(fields.mapping("per_layer_config", {}), index)
        kv_heads = own.integer("num_key_value_heads", sizes.kv_heads)
        sizes = dataclasses.replace(sizes, kv_heads=kv_heads, head_dim=own.integer("head_dim", sizes.head_dim))
    elif kind == "full":
        sizes = dataclasses.replace(sizes, head_dim=fields.integer("global_head_dim", 512))
        # Gemma4TextConfig reads the global KV heads only where attention_k_eq_v is set.
        if fields.flag("attention_k_eq_v") and fields.data.get("num_global_key_value_heads") is not None:
            sizes = dataclasses.replace(sizes, kv_heads=fields.integer("num_global_key_value_heads", sizes.kv_heads))
    heads = _query_heads(fields)
    if heads % sizes.kv_heads:
        raise CheckpointError(f"{fields.origin}: {heads} query heads cannot share {sizes.kv_heads} KV heads")
    return sizes


def _layer_overrides(layers: Fields, index: int) -> Fields:
    """One layer's entry of `per_layer_config`. Its keys are padded with zeros, such as `04` in a model of 35 layers."""
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
