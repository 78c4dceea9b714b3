"""Phi-3, 3.5 and 4: as Llama, with one matrix for queries, keys and values, and one for gate and up.

Phi-4-mini rotates a part of each head, the first 96 of 128 numbers: number i with number i + 48. Bundles rotate number
i with number i + 64. So the rows of queries and keys are stored in an order in which both are the same pairs, and pairs
that do not turn have the frequency 0. The scores of attention are the same in any order. In a bundle the scale of the
scores has the square of the factor of cosines and sines: queries are divided by it where they do not turn.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ondevice.bundle_format.decoder import Layer
from ondevice.errors import CheckpointError
from ondevice_export.checkpoint.config import FULL
from ondevice_export.checkpoint.stacks import Taken
from ondevice_export.families.family import Config, Family, RowsOf, attention, feed_forward, pre_normed
from ondevice_export.families.llama import NAMES


def layer(config: Config, index: int) -> Layer:
    turned = _turned(config, config.kind(index))
    return pre_normed(attention(config, index, turned=turned), feed_forward(config))


def _turned(config: Config, kind: str) -> int:
    """The rotated numbers of a head."""
    share = config.rope(kind).number("partial_rotary_factor", 1.0, maximum=1.0)
    turned = int(config.head_dim * share)
    if turned % 2:
        raise CheckpointError(
            f"{config.origin}: partial_rotary_factor {share:g} turns {turned} numbers of a head, which are no pairs"
        )
    return turned


def rows_of(config: Config, index: int) -> Mapping[str, RowsOf]:
    heads, size, width = config.integer("num_attention_heads"), config.head_dim, config.integer("intermediate_size")
    kv_heads, turned = config.integer("num_key_value_heads", heads), _turned(config, config.kind(index))
    keys, values = heads * size, (heads + kv_heads) * size
    with np.errstate(over="ignore"):  # infinite weights are refused when they are read
        still = float(np.float64(config.rotary(index, size, turned)[1]) ** -2)
    joined, both = "self_attn.qkv_proj.weight", "mlp.gate_up_proj.weight"
    return {
        "self_attn.q_proj.weight": (joined, _of_heads(0, heads, size, turned, still)),
        "self_attn.k_proj.weight": (joined, _of_heads(keys, kv_heads, size, turned)),
        "self_attn.v_proj.weight": (joined, [Taken(values, values + kv_heads * size)]),
        "mlp.gate_proj.weight": (both, [Taken(0, width)]),
        "mlp.up_proj.weight": (both, [Taken(width, 2 * width)]),
    }


def _of_heads(first: int, heads: int, size: int, turned: int, still: float = 1.0) -> list[Taken]:
    """The rows of heads from row `first` on in a bundle's order; those that do not turn times `still`."""
    if turned == size:
        return [Taken(first, first + heads * size)]
    half, pairs = size // 2, turned // 2
    order = (
        Taken(0, pairs),
        Taken(turned, pairs + half, still),
        Taken(pairs, turned),
        Taken(pairs + half, size, still),
    )
    starts = range(first, first + heads * size, size)
    return [Taken(start + each.start, start + each.stop, each.factor) for start in starts for each in order]


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
