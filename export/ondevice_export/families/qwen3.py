"""Qwen3: as Llama, with norms of the heads of queries and keys, whose size is 128 whatever the hidden size is."""

from __future__ import annotations

from ondevice.bundle_format.decoder import Block, Layer
from ondevice_export.families import qwen2
from ondevice_export.families.family import Config, Family, attention, feed_forward
from ondevice_export.families.llama import NAMES


def layer(config: Config, index: int) -> Layer:
    return Layer(
        (
            Block(attention(config, index, q_norm=True, k_norm=True), norm_in=True, norm_out=False),
            Block(feed_forward(config), norm_in=True, norm_out=False),
        )
    )


FAMILIES = (
    Family(
        name="qwen3",
        architectures=("Qwen3ForCausalLM",),
        defaults={**qwen2.DEFAULTS, "head_dim": 128},
        layer=layer,
        names=NAMES,
    ),
)
