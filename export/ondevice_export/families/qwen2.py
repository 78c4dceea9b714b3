"""Qwen2, Qwen2.5 and Seed-OSS: as Llama, with biases of the projections of queries, keys and values.

Of Seed-OSS the configuration says which projections have them, also whether that of the output has.
"""

from __future__ import annotations

from ondevice.bundle_format.decoder import Layer
from ondevice_export.families.family import Config, Family, attention, feed_forward, pre_normed
from ondevice_export.families.llama import NAMES

DEFAULTS = {
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 10_000.0,
    "max_position_embeddings": 32_768,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
}


def layer(config: Config, index: int) -> Layer:
    return pre_normed(attention(config, index, bias=True), feed_forward(config))


def seed_layer(config: Config, index: int) -> Layer:
    biases = {"bias": config.flag("attention_bias"), "output_bias": config.flag("attention_out_bias")}
    return pre_normed(attention(config, index, **biases), feed_forward(config))


_SEED_OSS = {
    "vocab_size": 155_136,
    "hidden_size": 4096,
    "intermediate_size": 27_648,
    "num_hidden_layers": 64,
    "num_attention_heads": 80,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "hidden_act": "silu",
    "max_position_embeddings": 524_288,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10_000.0,
    "tie_word_embeddings": False,
    "attention_bias": True,
    "attention_out_bias": False,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "pad_token_id": 1,
}

FAMILIES = (
    Family(name="qwen2", architectures=("Qwen2ForCausalLM",), defaults=DEFAULTS, layer=layer, names=NAMES),
    Family(name="seed-oss", architectures=("SeedOssForCausalLM",), defaults=_SEED_OSS, layer=seed_layer, names=NAMES),
)
