"""The published shape of Qwen3 30B-A3B as data: the fields of its `config.json`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ondevice.bundle_format.tensor_table import Shapes
from ondevice_export.checkpoint.models import checkpoint_shapes
from ondevice_export.checkpoint.named_tensors import TensorNames
from ondevice_export.families import read_target

MIXTURE = "Qwen3-30B-A3B"

FIELDS: Mapping[str, Any] = {
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
}


def shapes() -> Shapes:
    """The tensors by their names in a checkpoint."""
    return checkpoint_shapes(read_target(FIELDS, MIXTURE).target, TensorNames("model."))
