"""The mixtures of Qwen2, such as Qwen1.5-MoE-A2.7B and 57B-A14B: attention as in Qwen2, experts in all layers, and an
expert that every token uses beside them.
"""

from __future__ import annotations

import dataclasses

from ondevice.bundle_format.decoder import Layer
from ondevice.errors import CheckpointError
from ondevice_export.families import qwen2, qwen3
from ondevice_export.families.family import Config, Family, attention, experts, pre_normed


def layer(config: Config, index: int) -> Layer:
    if config.data.get("mlp_only_layers") or config.data.get("decoder_sparse_step") != 1:
        raise CheckpointError(f"{config.origin}: layers without experts are not supported in models of this class")
    routed = experts(config, "moe_intermediate_size", "num_experts", qwen3.scoring(config))
    feed = dataclasses.replace(routed, width=config.integer("shared_expert_intermediate_size"), shared=True)
    return pre_normed(attention(config, index, bias=config.flag("qkv_bias")), feed)


NAMES_OF_MIXTURES = {
    **qwen3.NAMES_OF_MIXTURES,
    "mlp.shared_gate.weight": "mlp.shared_expert_gate.weight",
    **{f"mlp.{name}_proj.weight": f"mlp.shared_expert.{name}_proj.weight" for name in ("gate", "up", "down")},
}

_DEFAULTS = {
    **qwen2.DEFAULTS,
    "vocab_size": 151_936,
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "alternating_windows": True,
    "decoder_sparse_step": 1,
    "moe_intermediate_size": 1408,
    "shared_expert_intermediate_size": 5632,
    "num_experts_per_tok": 4,
    "num_experts": 60,
    "norm_topk_prob": False,
    "qkv_bias": True,
}

FAMILIES = (
    Family(
        name="qwen2-moe",
        architectures=("Qwen2MoeForCausalLM",),
        defaults=_DEFAULTS,
        layer=layer,
        names=NAMES_OF_MIXTURES,
    ),
)
