"""Gemma 4, of every size: per-layer embeddings, layers that share keys and values, values that are keys, experts.

The hub spells the layers' differences flat (`global_head_dim`, `num_global_key_value_heads`), `save_pretrained` as
`per_layer_config`.
"""

from __future__ import annotations

import math
from typing import Any

from ondevice.bundle_format.decoder import MAX_EXPERTS, Block, ExpertsConfig, FeedForward, Layer, LayerEmbedding
from ondevice.bundle_format.model_config import PerLayerEmbeddings
from ondevice.errors import CheckpointError
from ondevice_export.checkpoint.config import FULL
from ondevice_export.families.family import Config, Family, attention
from ondevice_export.families.gemma3 import COMMON


def layer(config: Config, index: int) -> Layer:
    shared = config.integer("num_kv_shared_layers", 0, minimum=0)
    if shared >= (count := len(config.data["layer_types"])):
        raise CheckpointError(f"{config.origin}: {shared} KV-shared layers of {count} leave none that owns a cache")
    source = _donor(config, index, count - shared) if index >= count - shared else None
    return made_layer(config, index, kv_source=source, experts=_experts(config), embedding=embedding_width(config))


def made_layer(
    config: Config, index: int, *, kv_source: int | None, experts: ExpertsConfig | None, embedding: int, **own: Any
) -> Layer:
    """A layer of a target or a drafter that reads the cache of layer `kv_source`, or has its own if that is None.

    experts : None if the layer has the dense block only
    embedding : width of its slice of the per-layer embeddings, 0 for none
    own : further fields of its attention
    """
    writes, is_full = kv_source is None, config.kind(index) == FULL
    sizes = _sizes(config, is_full=is_full)
    k_eq_v = writes and is_full and config.flag("attention_k_eq_v")
    norms = {"q_norm": True, "k_norm": writes, "v_norm": writes}
    body = attention(config, index, scale=1.0, kv_source=kv_source, k_eq_v=k_eq_v, **sizes, **norms, **own)
    double = not writes and config.flag("use_double_wide_mlp")
    width = config.integer("intermediate_size") * (2 if double else 1)
    blocks = [
        Block(body, norm_in=True, norm_out=True),
        Block(FeedForward(width, config.activation, experts), norm_in=True, norm_out=True),
    ]
    if embedding:
        blocks.append(Block(LayerEmbedding(embedding, config.activation), norm_in=False, norm_out=True))
    return Layer(tuple(blocks), scalar=True)


def embedding_width(config: Config) -> int:
    return config.integer("hidden_size_per_layer_input", minimum=0)


def _per_layer(config: Config) -> PerLayerEmbeddings | None:
    """Source: Gemma4TextModel.get_per_layer_inputs and project_per_layer_inputs."""
    if not (width := embedding_width(config)):
        return None
    entries, hidden = config.integer("vocab_size_per_layer_input"), config.integer("hidden_size")
    return PerLayerEmbeddings(width, entries, hidden**-0.5, math.sqrt(width), 2.0**-0.5)


def _donor(config: Config, index: int, first_shared: int) -> int:
    """The layer whose cache a layer without its own reads: the last one of its kind that has one."""
    kind = config.kind(index)
    donors = [donor for donor in range(first_shared) if config.kind(donor) == kind]
    if not donors:
        raise CheckpointError(f"{config.origin}: layer {index} shares the KV of a {kind} layer, there is none")
    return donors[-1]


def _experts(config: Config) -> ExpertsConfig | None:
    """The experts of every layer where `enable_moe_block` is set; their three sizes have no defaults."""
    if not config.flag("enable_moe_block"):
        return None
    count = config.integer("num_experts", maximum=MAX_EXPERTS)
    return ExpertsConfig(count, config.integer("top_k_experts", maximum=count), config.integer("moe_intermediate_size"))


def _sizes(config: Config, *, is_full: bool) -> dict[str, int]:
    """Numbers of a head and KV heads of a layer in the hub's spelling, where these differ from other layers'."""
    if not is_full or "per_layer_config" in config.data:
        return {}
    found = {"head_dim": config.integer("global_head_dim", 512)}
    # Gemma4TextConfig reads the global KV heads only where attention_k_eq_v is set
    if config.flag("attention_k_eq_v") and "num_global_key_value_heads" in config.data:
        found["kv_heads"] = config.integer("num_global_key_value_heads")
    return found


def last_is_full(data: dict[str, Any]) -> dict[str, Any]:
    """The last layer has full attention whatever `layer_types` says: Gemma4TextConfig does the same."""
    return {**data, "layer_types": [*data["layer_types"][:-1], FULL]}


DEFAULTS: dict[str, Any] = {
    **COMMON,
    "vocab_size": 262_144,
    "num_hidden_layers": 30,
    "rope_theta": 10_000.0,
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
        "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1_000_000.0},
    },
    "sliding_window": 512,
    "hidden_size_per_layer_input": 256,
    "vocab_size_per_layer_input": 262_144,
}
UNIFIED: dict[str, Any] = {
    **DEFAULTS,
    "max_position_embeddings": 262_144,
    "sliding_window": 1024,
    "hidden_size_per_layer_input": 0,
}


def _family(name: str, architectures: tuple[str, ...], defaults: dict[str, Any]) -> Family:
    return Family(
        name=name,
        architectures=architectures,
        defaults=defaults,
        layer=layer,
        scaled_embedding=True,
        towers=True,
        per_layer=_per_layer,
        spelling=last_is_full,
    )


FAMILIES = (
    _family("gemma4", ("Gemma4ForConditionalGeneration", "Gemma4ForCausalLM"), DEFAULTS),
    _family("gemma4_unified", ("Gemma4UnifiedForConditionalGeneration", "Gemma4UnifiedForCausalLM"), UNIFIED),
)
