"""Llama 2 and 3, SmolLM2 and SmolLM3, Mistral, Ministral and Mixtral: norms before the blocks alone, SiLU, a rotation.

SmolLM3 has layers without rotation (`no_rope_layers`), Mistral and Ministral may have a window in all or some layers.
Ministral 3 and Mistral Small 3 are in multimodal checkpoints, of which the text model is read. Mixtral has experts.
"""

from __future__ import annotations

from ondevice.bundle_format.decoder import Layer
from ondevice_export.families.family import Config, Family, attention, experts, feed_forward, pre_normed

NAMES = {"pre_feedforward_layernorm.weight": "post_attention_layernorm.weight"}
"""The norm between attention and feed-forward is named after the former."""


def layer(config: Config, index: int) -> Layer:
    return pre_normed(attention(config, index), feed_forward(config))


def mixture_layer(config: Config, index: int) -> Layer:
    return pre_normed(attention(config, index), experts(config, "intermediate_size"))


_LLAMA = {
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 10_000.0,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_MISTRAL = {
    **_LLAMA,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131_072,
    "sliding_window": 4096,
}
_MIXTRAL = {
    **_LLAMA,
    "vocab_size": 32_000,
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 131_072,
    "sliding_window": None,
    "num_experts_per_tok": 2,
    "num_local_experts": 8,
}
_MINISTRAL3 = {
    **_LLAMA,
    "rms_norm_eps": 1e-5,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 262_144,
    "sliding_window": None,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 1_000_000.0,
        "factor": 16.0,
        "original_max_position_embeddings": 16_384,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "llama_4_scaling_beta": 0.1,
    },
    "pad_token_id": 11,
}
_SMOLLM3 = {
    **_LLAMA,
    "num_key_value_heads": 4,
    "rope_theta": 2_000_000.0,
    "max_position_embeddings": 32_768,
    "tie_word_embeddings": True,
    "no_rope_layer_interval": 4,
    "use_sliding_window": False,
    "sliding_window": None,
    "bos_token_id": 128_000,
    "eos_token_id": 128_001,
    "pad_token_id": 128_004,
}

FAMILIES = (
    Family(name="llama", architectures=("LlamaForCausalLM",), defaults=_LLAMA, layer=layer, names=NAMES),
    Family(
        name="mistral",
        architectures=("MistralForCausalLM", "MinistralForCausalLM"),
        defaults=_MISTRAL,
        layer=layer,
        names=NAMES,
    ),
    Family(
        name="mixtral",
        architectures=("MixtralForCausalLM",),
        defaults=_MIXTRAL,
        layer=mixture_layer,
        names={
            **NAMES,
            "router.proj.weight": "block_sparse_moe.gate.weight",
            "experts.gate_up_proj": "block_sparse_moe.experts.gate_up_proj",
            "experts.down_proj": "block_sparse_moe.experts.down_proj",
        },
    ),
    Family(name="ministral3", architectures=("Ministral3ForCausalLM",), defaults=_MINISTRAL3, layer=layer, names=NAMES),
    Family(
        name="mistral3",
        architectures=("Mistral3ForConditionalGeneration",),
        defaults={**_MISTRAL, "sliding_window": None, "tie_word_embeddings": True},
        layer=layer,
        names=NAMES,
    ),
    Family(name="smollm3", architectures=("SmolLM3ForCausalLM",), defaults=_SMOLLM3, layer=layer, names=NAMES),
)
