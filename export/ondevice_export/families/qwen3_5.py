"""Qwen3.5 and its successors of the same classes: in three of four layers the gated delta rule in place of attention.

Attention has norms of the heads of queries and keys, rotates the first quarter of each head, and multiplies its output
by a gate, whose rows lie between those of the queries. The mixtures, such as 35B-A3B, have experts in all layers, and
beside them an expert that every token uses. Text alone is read of checkpoints with a vision tower.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from ondevice.bundle_format.decoder import MAX_TAPS, FeedForward, GatedDelta, Layer
from ondevice.bundle_format.tensor_table import DELTA_GATES, DELTA_TAPS
from ondevice.errors import CheckpointError
from ondevice_export.checkpoint.config import DELTA
from ondevice_export.checkpoint.stacks import Taken
from ondevice_export.families import qwen2_moe
from ondevice_export.families.family import (
    MAX_HEADS,
    Config,
    Family,
    RowsOf,
    attention,
    experts,
    feed_forward,
    pre_normed,
)
from ondevice_export.families.llama import NAMES
from ondevice_export.families.rows import queries_and_keys, turned_numbers

_QUERIES, _GATE, _KEYS = "self_attn.q_proj.weight", "self_attn.gate_proj.weight", "self_attn.k_proj.weight"
_NORMS = ("self_attn.q_norm.weight", "self_attn.k_norm.weight")
_TAPS = "linear_attn.conv1d.weight"


def layer(config: Config, index: int) -> Layer:
    return _layer(config, index, feed_forward(config))


def mixture_layer(config: Config, index: int) -> Layer:
    routed, width = experts(config, "moe_intermediate_size", "num_experts"), "shared_expert_intermediate_size"
    return _layer(config, index, dataclasses.replace(routed, width=config.integer(width), shared=True))


def _layer(config: Config, index: int, feed: FeedForward) -> Layer:
    if config.kind(index) == DELTA:
        return pre_normed(delta(config), feed)
    turned = turned_numbers(config, index)
    if config.rotary(index, config.head_dim, turned)[1] != 1:  # it would reach numbers that do not turn
        raise CheckpointError(f"{config.origin}: a factor of cosines beside norms of queries is not supported")
    own = attention(config, index, turned=turned, q_norm=True, k_norm=True, gated=True)
    return pre_normed(own, feed)


def delta(config: Config) -> GatedDelta:
    key_heads = config.integer("linear_num_key_heads", maximum=MAX_HEADS)
    value_heads = config.integer("linear_num_value_heads")
    if value_heads % key_heads:
        raise CheckpointError(f"{config.origin}: {value_heads} value heads cannot share {key_heads} key heads")
    return GatedDelta(
        key_heads,
        value_heads,
        config.integer("linear_key_head_dim"),
        config.integer("linear_value_head_dim"),
        config.integer("linear_conv_kernel_dim", maximum=MAX_TAPS),
        config.flag("tiled_value_heads"),
    )


def rows_of(config: Config, index: int) -> Mapping[str, RowsOf]:
    if config.kind(index) == DELTA:
        return {_TAPS: (_TAPS, [Taken(0, delta(config).channels)])}
    size = config.head_dim
    queries, keys = queries_and_keys(config, index, query_stride=2 * size)
    starts = range(0, 2 * config.integer("num_attention_heads") * size, 2 * size)
    one_head = keys[: len(keys) // config.integer("num_key_value_heads")]
    return {
        _QUERIES: (_QUERIES, queries),
        _GATE: (_QUERIES, [Taken(start + size, start + 2 * size) for start in starts]),
        _KEYS: (_KEYS, keys),
        **{norm: (norm, one_head) for norm in _NORMS},
    }


_DEFAULTS: dict[str, Any] = {
    "vocab_size": 248_320,
    "hidden_size": 4096,
    "intermediate_size": 12_288,
    "num_hidden_layers": 32,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_act": "silu",
    "max_position_embeddings": 32_768,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10_000.0,
    "partial_rotary_factor": 0.25,
    "tie_word_embeddings": False,
    "full_attention_interval": 4,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "norm_offset": 1,
    "log_decay": True,
    "tiled_value_heads": False,
}
MIXTURE = {
    **{name: value for name, value in _DEFAULTS.items() if name != "intermediate_size"},
    "hidden_size": 2048,
    "num_hidden_layers": 40,
    "num_key_value_heads": 2,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "num_experts_per_tok": 8,
    "num_experts": 256,
}

_NAMES = {
    **NAMES,
    "delta.qkv.weight": "linear_attn.in_proj_qkv.weight",
    "delta.z.weight": "linear_attn.in_proj_z.weight",
    **{name: f"linear_attn.in_proj_{name.split('.')[1]}.weight" for name in DELTA_GATES},
    DELTA_TAPS: _TAPS,
    "delta.decay": "linear_attn.A_log",
    "delta.dt_bias": "linear_attn.dt_bias",
    "delta.scale": "linear_attn.norm.weight",
    "delta.out.weight": "linear_attn.out_proj.weight",
}
NAMES_OF_MIXTURES = {**_NAMES, **qwen2_moe.NAMES_OF_MIXTURES}

FAMILIES = (
    Family(
        name="qwen3.5",
        architectures=("Qwen3_5ForCausalLM", "Qwen3_5ForConditionalGeneration"),
        defaults=_DEFAULTS,
        layer=layer,
        names=_NAMES,
        rows_of=rows_of,
    ),
    Family(
        name="qwen3.5-moe",
        architectures=("Qwen3_5MoeForCausalLM", "Qwen3_5MoeForConditionalGeneration"),
        defaults=MIXTURE,
        layer=mixture_layer,
        names=NAMES_OF_MIXTURES,
        rows_of=rows_of,
    ),
)
