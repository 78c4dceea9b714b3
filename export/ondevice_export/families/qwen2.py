"""Qwen2 and Qwen2.5: as Llama, with biases of the projections of queries, keys and values."""

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


FAMILIES = (Family(name="qwen2", architectures=("Qwen2ForCausalLM",), defaults=DEFAULTS, layer=layer, names=NAMES),)
