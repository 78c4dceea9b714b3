"""Gemma 3, the text models of 270M to 27B, alone or in a multimodal checkpoint; Gemma 2; the first one, and CodeGemma.

Norms before and after every block, whose weights are stored without 1; norms of the heads of queries and keys; five of
six layers with a window and a rotation of their own. Gemma 2 has no norms of heads, a softcap of scores, a window in
every other layer, and one rotation. The first Gemma is as Llama but for the 1, the factor of its embeddings and its
activation.
"""

from __future__ import annotations

from typing import Any

from ondevice.bundle_format.decoder import Block, Layer
from ondevice_export.families.family import Config, Family, attention, feed_forward
from ondevice_export.families.llama import NAMES
from ondevice_export.families.llama import layer as llama_layer


def layer(config: Config, index: int) -> Layer:
    return _layer(config, index, q_norm=True, k_norm=True)


def layer_of_second(config: Config, index: int) -> Layer:
    capped = config.data.get("attn_logit_softcapping") is not None
    return _layer(config, index, softcap=config.number("attn_logit_softcapping") if capped else None)


def _layer(config: Config, index: int, **own: Any) -> Layer:
    """A layer with norms before and after its blocks. own : further fields of `Attention`"""
    scale = config.number("query_pre_attn_scalar") ** -0.5
    return Layer(
        (
            Block(attention(config, index, scale=scale, **own), norm_in=True, norm_out=True),
            Block(feed_forward(config), norm_in=True, norm_out=True),
        )
    )


def _spelling_of_first(data: dict[str, Any]) -> dict[str, Any]:
    """The published files name the exact `gelu`, and mean the approximation, as transformers takes it."""
    return {**data, "hidden_activation": "gelu_pytorch_tanh"} if data["hidden_activation"] == "gelu" else data


COMMON = {
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 131_072,
    "sliding_window_pattern": 6,
    "tie_word_embeddings": True,
    "final_logit_softcapping": None,
    "bos_token_id": 2,
    "eos_token_id": 1,
    "pad_token_id": 0,
    "add_bos_token": True,
}
"""Defaults that Gemma 4 has too."""

_DEFAULTS = {
    **COMMON,
    "vocab_size": 262_208,
    "num_hidden_layers": 26,
    "norm_offset": 1,
    "query_pre_attn_scalar": 256,
    "rope_theta": 1_000_000.0,
    "rope_local_base_freq": 10_000.0,
    "sliding_window": 4096,
}

_SECOND = {
    **COMMON,
    "vocab_size": 256_000,
    "num_hidden_layers": 26,
    "norm_offset": 1,
    "query_pre_attn_scalar": 256,
    "rope_theta": 10_000.0,
    "max_position_embeddings": 8192,
    "sliding_window": 4096,
    "window_period": 2,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
}

_FIRST = {
    "vocab_size": 256_000,
    "hidden_size": 3072,
    "intermediate_size": 24_576,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "head_dim": 256,
    "hidden_act": "gelu_pytorch_tanh",
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10_000.0,
    "tie_word_embeddings": True,
    "norm_offset": 1,
    "bos_token_id": 2,
    "eos_token_id": 1,
    "pad_token_id": 0,
    "add_bos_token": True,
}

FAMILIES = (
    Family(
        name="gemma",
        architectures=("GemmaForCausalLM",),
        defaults=_FIRST,
        layer=llama_layer,
        names=NAMES,
        scaled_embedding=True,
        spelling=_spelling_of_first,
    ),
    Family(
        name="gemma2",
        architectures=("Gemma2ForCausalLM",),
        defaults=_SECOND,
        layer=layer_of_second,
        scaled_embedding=True,
    ),
    Family(
        name="gemma3",
        architectures=("Gemma3ForCausalLM", "Gemma3ForConditionalGeneration"),
        defaults=_DEFAULTS,
        layer=layer,
        scaled_embedding=True,
    ),
)
