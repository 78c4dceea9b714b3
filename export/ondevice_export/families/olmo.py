"""OLMo 2 and OLMo 3: norms after the blocks alone, norms of all heads of queries, and of keys, together; and OLMoE.

Of OLMo 3 three of four layers have a window, whose rotation is never scaled. OLMoE has the norms before the blocks, and
experts in all layers.
"""

from __future__ import annotations

from typing import Any

from ondevice.bundle_format.decoder import Attention, Block, Layer
from ondevice_export.checkpoint.config import FULL, SLIDING
from ondevice_export.families import qwen3
from ondevice_export.families.family import Config, Family, attention, experts, feed_forward, pre_normed


def layer(config: Config, index: int) -> Layer:
    own = _attention(config, index)
    return Layer((Block(own, norm_in=False, norm_out=True), Block(feed_forward(config), norm_in=False, norm_out=True)))


def mixture_layer(config: Config, index: int) -> Layer:
    routed = experts(config, "intermediate_size", "num_experts", qwen3.scoring(config))
    return pre_normed(_attention(config, index), routed)


def _attention(config: Config, index: int) -> Attention:
    biased = config.flag("attention_bias")
    return attention(config, index, q_norm=True, k_norm=True, whole_norms=True, bias=biased, output_bias=biased)


def _unscaled_windows(data: dict[str, Any]) -> dict[str, Any]:
    """The older spelling, that of the published files, has one scaled rotation and means full attention's
    (`Olmo3Config.convert_rope_params_to_dict`).
    """
    if "rope_scaling" not in data:
        return data
    full = data["rope_parameters"][FULL]
    plain = {"rope_type": "default", "rope_theta": full.get("rope_theta")}
    return {**data, "rope_parameters": {FULL: full, SLIDING: plain}}


_DEFAULTS = {
    "vocab_size": 50_304,
    "hidden_size": 4096,
    "intermediate_size": 11_008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "hidden_act": "silu",
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "pad_token_id": 1,
    "eos_token_id": 50_279,
}

FAMILIES = (
    Family(
        name="olmo2",
        architectures=("Olmo2ForCausalLM",),
        defaults={**_DEFAULTS, "rope_theta": 10_000.0},
        layer=layer,
    ),
    Family(
        name="olmo3",
        architectures=("Olmo3ForCausalLM",),
        defaults={**_DEFAULTS, "rope_theta": 500_000.0, "sliding_window": 4096, "window_period": 4},
        layer=layer,
        spelling=_unscaled_windows,
    ),
    Family(
        name="olmoe",
        architectures=("OlmoeForCausalLM",),
        defaults={
            **_DEFAULTS,
            "hidden_size": 2048,
            "intermediate_size": 2048,
            "num_hidden_layers": 16,
            "num_attention_heads": 16,
            "max_position_embeddings": 4096,
            "rope_theta": 10_000.0,
            "num_experts_per_tok": 8,
            "num_experts": 64,
            "norm_topk_prob": False,
        },
        layer=mixture_layer,
        names=qwen3.NAMES_OF_MIXTURES,
    ),
)
