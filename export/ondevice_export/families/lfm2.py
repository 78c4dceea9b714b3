"""LFM2 and LFM2.5: most layers have a short convolution in place of attention; else as Llama, with norms of heads.

The mixtures, such as 8B-A1B, have experts in all layers but the first ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ondevice.bundle_format.decoder import (
    MAX_EXPERTS,
    MAX_TAPS,
    Attention,
    ExpertsConfig,
    FeedForward,
    Layer,
    ShortConvolution,
)
from ondevice.bundle_format.tensor_table import CONVOLUTION_TAPS, FINAL_NORM
from ondevice.errors import CheckpointError
from ondevice_export.checkpoint.config import CONVOLUTION
from ondevice_export.checkpoint.stacks import Taken
from ondevice_export.families.family import Config, Family, RowsOf, attention, feed_forward, pre_normed

MAX_FACTOR = 1e6
"""Largest factor of the width of feed-forward blocks, so that the width stays finite."""


def layer(config: Config, index: int) -> Layer:
    return pre_normed(_mixer(config, index), FeedForward(_width(config), config.activation))


def mixture_layer(config: Config, index: int) -> Layer:
    dense = index < config.integer("num_dense_layers", minimum=0)
    return pre_normed(_mixer(config, index), feed_forward(config) if dense else _experts(config))


def _mixer(config: Config, index: int) -> Attention | ShortConvolution:
    if config.kind(index) != CONVOLUTION:
        return attention(config, index, q_norm=True, k_norm=True)
    if config.flag("conv_bias"):
        raise CheckpointError(f"{config.origin}: conv_bias is true: biases of convolutions are not supported")
    channels = config.integer("hidden_size")
    if channels % 2:
        raise CheckpointError(f"{config.origin}: a convolution of {channels} channels is not supported")
    return ShortConvolution(channels, config.integer("conv_L_cache", maximum=MAX_TAPS))


def rows_of(config: Config, index: int) -> Mapping[str, RowsOf]:
    """The taps as a matrix: torch has a convolution of every channel alone as [channels, 1, window]."""
    if config.kind(index) != CONVOLUTION:
        return {}
    return {CONVOLUTION_TAPS: (CONVOLUTION_TAPS, [Taken(0, config.integer("hidden_size"))])}


def _width(config: Config) -> int:
    """Rows of gate and up (`Lfm2MLP`)."""
    width = config.integer("intermediate_size")
    if not config.flag("block_auto_adjust_ff_dim"):
        return width
    unit = config.integer("block_multiple_of")
    width = int(config.number("block_ffn_dim_multiplier", maximum=MAX_FACTOR) * int(2 * width / 3))
    return unit * ((width + unit - 1) // unit)


def _experts(config: Config) -> FeedForward:
    for name, needed in {"norm_topk_prob": 1.0, "routed_scaling_factor": 1.0}.items():
        if (found := config.data.get(name)) != needed:
            raise CheckpointError(f"{config.origin}: {name} is {found!r:.99}, which is not supported")
    count = config.integer("num_experts", maximum=MAX_EXPERTS)
    top, width = config.integer("num_experts_per_tok", maximum=count), config.integer("moe_intermediate_size")
    selects = config.flag("use_expert_bias")
    experts = ExpertsConfig(count, top, width, scoring="sigmoid", selection_bias=selects)
    return FeedForward(0, config.activation, experts)


def _spelling(data: dict[str, Any]) -> dict[str, Any]:
    """The names of LFM2's class for what other families have too; older configurations have two more."""
    return {**data, **{_SPELLINGS[name]: value for name, value in data.items() if name in _SPELLINGS}}


_SPELLINGS = {
    "norm_eps": "rms_norm_eps",
    "block_ff_dim": "intermediate_size",
    "tie_embedding": "tie_word_embeddings",
}
_NAMES: Mapping[str, str] = {
    FINAL_NORM: "embedding_norm.weight",
    "input_layernorm.weight": "operator_norm.weight",
    "pre_feedforward_layernorm.weight": "ffn_norm.weight",
    "self_attn.q_norm.weight": "self_attn.q_layernorm.weight",
    "self_attn.k_norm.weight": "self_attn.k_layernorm.weight",
    "self_attn.o_proj.weight": "self_attn.out_proj.weight",
    "mlp.gate_proj.weight": "feed_forward.w1.weight",
    "mlp.up_proj.weight": "feed_forward.w3.weight",
    "mlp.down_proj.weight": "feed_forward.w2.weight",
    "router.proj.weight": "feed_forward.gate.weight",
    "router.selection_bias": "feed_forward.expert_bias",
    "experts.gate_up_proj": "feed_forward.experts.gate_up_proj",
    "experts.down_proj": "feed_forward.experts.down_proj",
}

_DEFAULTS = {
    "vocab_size": 65_536,
    "hidden_size": 2560,
    "intermediate_size": 12_288,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "hidden_act": "silu",
    "max_position_embeddings": 128_000,
    "norm_eps": 1e-5,
    "rope_theta": 1_000_000.0,
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "conv_bias": False,
    "conv_L_cache": 3,
}
_DENSE = {
    **_DEFAULTS,
    "block_multiple_of": 256,
    "block_ffn_dim_multiplier": 1.0,
    "block_auto_adjust_ff_dim": True,
}
_MIXTURE = {
    **_DEFAULTS,
    "hidden_size": 2048,
    "intermediate_size": 7168,
    "moe_intermediate_size": 1792,
    "num_dense_layers": 2,
    "num_experts_per_tok": 4,
    "num_experts": 32,
    "use_expert_bias": True,
    "routed_scaling_factor": 1.0,
    "norm_topk_prob": True,
}

FAMILIES = (
    Family(
        name="lfm2",
        architectures=("Lfm2ForCausalLM",),
        defaults=_DENSE,
        layer=layer,
        names=_NAMES,
        rows_of=rows_of,
        spelling=_spelling,
    ),
    Family(
        name="lfm2-moe",
        architectures=("Lfm2MoeForCausalLM",),
        defaults=_MIXTURE,
        layer=mixture_layer,
        names=_NAMES,
        rows_of=rows_of,
        spelling=_spelling,
    ),
)
