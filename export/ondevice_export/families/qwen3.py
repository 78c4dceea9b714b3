"""Qwen3: as Llama, with norms of the heads of queries and keys, whose size is 128 whatever the hidden size is.

Its mixtures, such as 30B-A3B, have experts in place of the dense block in all or some layers.
"""

from __future__ import annotations

from typing import Any

from ondevice.bundle_format.decoder import FeedForward, Layer, Scoring
from ondevice.errors import CheckpointError
from ondevice_export.families import qwen2
from ondevice_export.families.family import Config, Family, attention, experts, feed_forward, pre_normed
from ondevice_export.families.llama import NAMES


def layer(config: Config, index: int) -> Layer:
    return _layer(config, index, feed_forward(config))


def mixture_layer(config: Config, index: int) -> Layer:
    if _has_experts(config, index):
        return _layer(config, index, experts(config, "moe_intermediate_size", scoring=scoring(config)))
    return layer(config, index)


def _layer(config: Config, index: int, feed: FeedForward) -> Layer:
    return pre_normed(attention(config, index, q_norm=True, k_norm=True), feed)


def scoring(config: Config) -> Scoring:
    """How the scores of experts become weights. Source: Qwen2MoeTopKRouter."""
    return "softmax" if config.flag("norm_topk_prob") else "softmax_of_all"


def _has_experts(config: Config, index: int) -> bool:
    """Source: Qwen3MoeDecoderLayer."""
    dense = config.data.get("mlp_only_layers", [])
    if not isinstance(dense, list) or not all(isinstance(each, int) for each in dense):
        raise CheckpointError(f"{config.origin}: mlp_only_layers is {dense!r:.99}, expected numbers of layers")
    return index not in dense and (index + 1) % config.integer("decoder_sparse_step") == 0


def _spelling(data: dict[str, Any]) -> dict[str, Any]:
    """The number of experts had another name before transformers 5."""
    return {**data, "num_local_experts": data["num_experts"]} if "num_experts" in data else data


NAMES_OF_MIXTURES = {
    **NAMES,
    "router.proj.weight": "mlp.gate.weight",
    "experts.gate_up_proj": "mlp.experts.gate_up_proj",
    "experts.down_proj": "mlp.experts.down_proj",
}

_MIXTURE = {
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 10_000.0,
    "max_position_embeddings": 32_768,
    "tie_word_embeddings": False,
    "num_key_value_heads": 4,
    "intermediate_size": 6144,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "decoder_sparse_step": 1,
    "moe_intermediate_size": 768,
    "num_experts_per_tok": 8,
    "num_local_experts": 128,
    "norm_topk_prob": False,
}

FAMILIES = (
    Family(
        name="qwen3",
        architectures=("Qwen3ForCausalLM",),
        defaults={**qwen2.DEFAULTS, "head_dim": 128},
        layer=layer,
        names=NAMES,
    ),
    Family(
        name="qwen3-moe",
        architectures=("Qwen3MoeForCausalLM",),
        defaults=_MIXTURE,
        layer=mixture_layer,
        names=NAMES_OF_MIXTURES,
        spelling=_spelling,
    ),
)
