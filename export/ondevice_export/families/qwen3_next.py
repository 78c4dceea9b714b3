"""Qwen3-Next: as the mixtures of Qwen3.5, but for the rows of the projections of the gated delta rule.

One matrix has the rows of queries, keys, values and z, key head by key head, and one those of b and a.
"""

from __future__ import annotations

from collections.abc import Mapping

from ondevice.bundle_format.decoder import Layer
from ondevice.errors import CheckpointError
from ondevice_export.checkpoint.config import DELTA
from ondevice_export.checkpoint.stacks import Taken
from ondevice_export.families import qwen3_5
from ondevice_export.families.family import Config, Family, RowsOf

_FIELDS = {"norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []}
"""Fields of the class, and the values with which all layers are those of Qwen3.5's mixtures."""


def layer(config: Config, index: int) -> Layer:
    for name, needed in _FIELDS.items():
        if (found := config.data.get(name)) != needed:
            raise CheckpointError(f"{config.origin}: {name} is {found!r:.99}, which is not supported")
    return qwen3_5.mixture_layer(config, index)


def rows_of(config: Config, index: int) -> Mapping[str, RowsOf]:
    found = dict(qwen3_5.rows_of(config, index))
    if config.kind(index) == DELTA:
        own = qwen3_5.delta(config)
        shared = own.value_heads // own.key_heads
        values = shared * own.value_dim
        b, a = _parts(own.key_heads, shared, shared)
        found |= _rows("ba", b=b, a=a)
        if config.flag("joined_qkvz"):
            query, key, value, z = _parts(own.key_heads, own.key_dim, own.key_dim, values, values)
            found |= _rows("qkvz", qkv=[*query, *key, *value], z=z)
    return found


def _rows(joined: str, **taken: list[Taken]) -> Mapping[str, RowsOf]:
    """The rows of one matrix that are those of others."""
    name = "linear_attn.in_proj_{}.weight".format
    return {name(own): (name(joined), rows) for own, rows in taken.items()}


def _parts(heads: int, *sizes: int) -> list[list[Taken]]:
    """The rows of each part of all heads, where every head has the rows of all parts."""
    starts = [sum(sizes[:part]) for part in range(len(sizes))]
    stride = sum(sizes)
    return [
        [Taken(head * stride + start, head * stride + start + size) for head in range(heads)]
        for start, size in zip(starts, sizes, strict=True)
    ]


FAMILIES = (
    Family(
        name="qwen3-next",
        architectures=("Qwen3NextForCausalLM",),
        defaults={
            **qwen3_5.MIXTURE,
            **_FIELDS,
            "vocab_size": 151_936,
            "num_hidden_layers": 48,
            "num_experts_per_tok": 10,
            "num_experts": 512,
            "joined_qkvz": True,
        },
        layer=layer,
        names=qwen3_5.NAMES_OF_MIXTURES,
        rows_of=rows_of,
    ),
)
