"""Phi-3, 3.5 and 4: as Llama, with one matrix for queries, keys and values, and one for gate and up.

Phi-4-mini rotates a part of each head, the first 96 of 128 numbers: number i with number i + 48.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ondevice.bundle_format.decoder import Layer
from ondevice_export.checkpoint.config import FULL
from ondevice_export.checkpoint.stacks import Taken
from ondevice_export.families.family import Config, Family, RowsOf, attention, feed_forward, pre_normed
from ondevice_export.families.llama import NAMES
from ondevice_export.families.rows import gate_and_up, queries_and_keys, turned_numbers


def layer(config: Config, index: int) -> Layer:
    own = attention(config, index, turned=turned_numbers(config, index))
    return pre_normed(own, feed_forward(config))


def rows_of(config: Config, index: int) -> Mapping[str, RowsOf]:
    heads, size = config.integer("num_attention_heads"), config.head_dim
    kv_heads, joined = config.integer("num_key_value_heads", heads), "self_attn.qkv_proj.weight"
    queries, keys = queries_and_keys(config, index, first_key=heads * size)
    values = (heads + kv_heads) * size
    return {
        "self_attn.q_proj.weight": (joined, queries),
        "self_attn.k_proj.weight": (joined, keys),
        "self_attn.v_proj.weight": (joined, [Taken(values, values + kv_heads * size)]),
        **gate_and_up(config),
    }


def _spelling(data: dict[str, Any]) -> dict[str, Any]:
    """Older names of `longrope`, as in Phi3Config; and no window where no text exceeds it, as in Phi-4-mini."""
    ropes = {kind: dict(own) for kind, own in data["rope_parameters"].items()}
    for own in ropes.values():
        if own["rope_type"] in ("su", "yarn"):
            own["rope_type"] = "longrope"
    window, longest, kinds = data.get("sliding_window"), data.get("max_position_embeddings"), data["layer_types"]
    if isinstance(window, int) and isinstance(longest, int) and window >= longest:
        kinds = [FULL] * len(kinds)
    return {**data, "rope_parameters": ropes, "layer_types": kinds}


_DEFAULTS = {
    "vocab_size": 32_064,
    "hidden_size": 3072,
    "intermediate_size": 8192,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "hidden_act": "silu",
    "max_position_embeddings": 4096,
    "original_max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10_000.0,
    "tie_word_embeddings": False,
    "sliding_window": None,
    "bos_token_id": 1,
    "eos_token_id": 32_000,
    "pad_token_id": 32_000,
}

FAMILIES = (
    Family(
        name="phi3",
        architectures=("Phi3ForCausalLM",),
        defaults=_DEFAULTS,
        layer=layer,
        names=NAMES,
        rows_of=rows_of,
        spelling=_spelling,
    ),
)
