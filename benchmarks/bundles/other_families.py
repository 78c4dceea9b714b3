"""The published shapes of models of other families than Gemma 4 as data: the fields of their `config.json`."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from ondevice.bundle_format.tensor_table import Shapes
from ondevice_export.checkpoint.models import checkpoint_shapes
from ondevice_export.checkpoint.named_tensors import TensorNames
from ondevice_export.families import read_target


def _kinds(layers: int, attending: Collection[int]) -> list[str]:
    """LFM2's kind of every layer: some have attention, the others a convolution."""
    return ["full_attention" if index in attending else "conv" for index in range(layers)]


_LFM2 = {
    "hidden_size": 2048,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "conv_L_cache": 3,
    "max_position_embeddings": 128_000,
    "rope_theta": 1_000_000.0,
    "norm_eps": 1e-5,
    "vocab_size": 65_536,
}
_QWEN_3_5 = {
    "head_dim": 256,
    "linear_num_key_heads": 16,
    "max_position_embeddings": 262_144,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10_000_000.0, "partial_rotary_factor": 0.25},
}
_DENSE_QWEN_3_5 = {
    **_QWEN_3_5,
    "architectures": ["Qwen3_5ForCausalLM"],
    "tie_word_embeddings": True,
    "mtp_num_hidden_layers": 1,
}

FIELDS: Mapping[str, Mapping[str, Any]] = {
    "Qwen3-30B-A3B": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "hidden_size": 2048,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "max_position_embeddings": 40_960,
        "rope_theta": 1_000_000.0,
        "rms_norm_eps": 1e-6,
        "vocab_size": 151_936,
        "tie_word_embeddings": False,
    },
    "gpt-oss-20b": {
        "architectures": ["GptOssForCausalLM"],
        "hidden_size": 2880,
        "num_hidden_layers": 24,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "intermediate_size": 2880,
        "num_local_experts": 32,
        "num_experts_per_tok": 4,
        "sliding_window": 128,
        "max_position_embeddings": 131_072,
        "rope_theta": 150_000.0,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 4096,
        },
        "rms_norm_eps": 1e-5,
        "vocab_size": 201_088,
        "tie_word_embeddings": False,
    },
    "LFM2-1.2B": {
        "architectures": ["Lfm2ForCausalLM"],
        "num_hidden_layers": 16,
        "layer_types": _kinds(16, (2, 5, 8, 10, 12, 14)),
        "block_ff_dim": 12_288,
        **_LFM2,
    },
    "LFM2-8B-A1B": {
        "architectures": ["Lfm2MoeForCausalLM"],
        "num_hidden_layers": 24,
        "layer_types": _kinds(24, (2, 6, 10, 14, 18, 21)),
        "intermediate_size": 7168,
        "moe_intermediate_size": 1792,
        "num_experts": 32,
        "num_experts_per_tok": 4,
        "num_dense_layers": 2,
        **_LFM2,
    },
    "Qwen3.5-0.8B": {
        "hidden_size": 1024,
        "intermediate_size": 3584,
        "num_hidden_layers": 24,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "linear_num_value_heads": 16,
        **_DENSE_QWEN_3_5,
    },
    "Qwen3.5-4B": {
        "hidden_size": 2560,
        "intermediate_size": 9216,
        "num_hidden_layers": 32,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "linear_num_value_heads": 32,
        **_DENSE_QWEN_3_5,
    },
    "Qwen3.5-35B-A3B": {
        "architectures": ["Qwen3_5MoeForCausalLM"],
        "hidden_size": 2048,
        "num_hidden_layers": 40,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "linear_num_value_heads": 32,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "num_experts": 256,
        "num_experts_per_tok": 8,
        "vocab_size": 248_320,
        "tie_word_embeddings": False,
        "mtp_num_hidden_layers": 1,
        **_QWEN_3_5,
    },
}
"""Name -> fields."""
MIXTURES = [name for name, fields in FIELDS.items() if "num_experts_per_tok" in fields]
"""Names of those that have experts."""
IN_MXFP4 = ("gpt-oss-20b",)
"""Names of the models that are published with their experts in MXFP4, which bundles keep."""


def shapes(name: str) -> Shapes:
    """The tensors by their names in a checkpoint."""
    return checkpoint_shapes(read_target(FIELDS[name], name).target, TensorNames("model."))
