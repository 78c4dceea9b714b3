"""EXAONE 4: norms after the blocks alone, norms of the heads of queries and keys.

Of 32B three of four layers have a window, and only these rotate. 1.2B has no windows, and all of its layers rotate.
"""

from __future__ import annotations

from typing import Any

from ondevice.bundle_format.decoder import Block, Layer
from ondevice_export.checkpoint.config import SLIDING
from ondevice_export.families.family import Config, Family, attention, feed_forward


def layer(config: Config, index: int) -> Layer:
    own = attention(config, index, q_norm=True, k_norm=True)
    return Layer((Block(own, norm_in=False, norm_out=True), Block(feed_forward(config), norm_in=False, norm_out=True)))


def _spelling(data: dict[str, Any]) -> dict[str, Any]:
    """Which layers rotate, in the spelling of families whose configurations list them (`Exaone4Attention`)."""
    windows = "sliding_window" in data
    return {**data, "no_rope_layers": [int(not windows or kind == SLIDING) for kind in data["layer_types"]]}


_DEFAULTS = {
    "vocab_size": 102_400,
    "hidden_size": 4096,
    "intermediate_size": 16_384,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "hidden_act": "silu",
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10_000.0,
    "tie_word_embeddings": False,
    "sliding_window": 4096,
    "sliding_window_pattern": 4,
    "bos_token_id": 0,
    "eos_token_id": 2,
}

FAMILIES = (
    Family(
        name="exaone4",
        architectures=("Exaone4ForCausalLM",),
        defaults=_DEFAULTS,
        layer=layer,
        spelling=_spelling,
    ),
)
