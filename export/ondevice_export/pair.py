"""Checks that a drafter belongs to a target."""

from __future__ import annotations

from typing import get_args

from ondevice.contract import AttentionKind
from ondevice.errors import PairMismatchError
from ondevice_export.config import DrafterConfig, TextConfig


def check_pair(target: TextConfig, drafter: DrafterConfig) -> None:
    """Compare what the two share: the vocabulary, the hidden state and the caches.

    Raises:
        PairMismatchError: naming both values.
    """
    if drafter.text.vocab_size != target.vocab_size:
        raise PairMismatchError(
            f"the drafter's vocabulary has {drafter.text.vocab_size} tokens, the target's {target.vocab_size}"
        )
    if drafter.backbone_hidden_size != target.hidden_size:
        raise PairMismatchError(
            f"the drafter was made for a hidden size of {drafter.backbone_hidden_size}, the target's is "
            f"{target.hidden_size}"
        )
    for kind in get_args(AttentionKind):
        if target.last_kv_layer(kind) is None:
            raise PairMismatchError(f"the target has no {kind} attention layer whose cache a drafter could read")
    for index, layer in enumerate(drafter.text.layers):
        owner = target.last_kv_layer(layer.kind)
        assert owner is not None
        shared = target.layers[owner]
        if (layer.kv_heads, layer.head_dim) != (shared.kv_heads, shared.head_dim):
            raise PairMismatchError(
                f"drafter layer {index} reads {layer.kv_heads} KV heads of {layer.head_dim}, "
                f"target layer {owner} has {shared.kv_heads} of {shared.head_dim}"
            )
