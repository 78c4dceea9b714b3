"""The MTP drafters of Gemma 4 ("assistants"): layers without a cache, which read the target's.

A drafter that `models/recipe` trains for any target has the same form. Its head may be the target's rows of a list of
frequent tokens: `config.json` then has their number, `num_head_tokens`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ondevice.bundle_format.decoder import Attention, Layer
from ondevice.bundle_format.graph_io import AttentionKind
from ondevice.bundle_format.model_config import DrafterEntry, ShortlistEntry, Target
from ondevice.errors import CheckpointError, PairMismatchError
from ondevice_export.checkpoint.config import FULL, architecture, newer_spelling
from ondevice_export.checkpoint.json_fields import JsonFields
from ondevice_export.families.family import Config
from ondevice_export.families.gemma4 import DEFAULTS, UNIFIED, last_is_full, made_layer

DRAFTER_GRAPH = "drafter.onnx"
ARCHITECTURES = ("Gemma4AssistantForCausalLM", "Gemma4UnifiedAssistantForCausalLM")


def read_drafter(data: Mapping[str, Any], origin: str, target: Target) -> DrafterEntry:
    """Read the configuration of a drafter, for the target whose KV caches it reads.

    Args:
        data: its `config.json`.
        origin: what error messages call `data`.
        target: the target.

    Raises:
        CheckpointError: the checkpoint is no assistant, or its configuration is damaged or not supported.
        PairMismatchError: the drafter was made for another target; the message has the values of both.
    """
    if (name := architecture(data)) not in ARCHITECTURES:
        raise CheckpointError(f"{origin}: architecture {name!r} is not a drafter (known: {', '.join(ARCHITECTURES)})")
    outer = JsonFields(data, origin)
    text = outer.mapping("text_config", data)
    unified = str(text.data.get("model_type", "")).startswith("gemma4_unified")
    config = Config(last_is_full(newer_spelling(data, UNIFIED if unified else DEFAULTS, origin)), origin)
    if not config.flag("tie_word_embeddings"):
        raise CheckpointError(f"{origin}: a drafter whose head is not tied to its embedding is not supported")
    if config.flag("enable_moe_block"):
        raise CheckpointError(f"{origin}: enable_moe_block is set: a drafter with experts is not supported")
    vocab_size, backbone = config.integer("vocab_size"), outer.integer("backbone_hidden_size", 1536)
    if vocab_size != target.vocab_size:
        raise PairMismatchError(f"the drafter's vocabulary has {vocab_size} tokens, the target's {target.vocab_size}")
    if backbone != target.hidden_size:
        raise PairMismatchError(
            f"the drafter was made for a hidden size of {backbone}, the target's is {target.hidden_size}"
        )
    listed, shortlist = outer.integer("num_head_tokens", 0, 0, vocab_size), _shortlist(outer, vocab_size)
    if listed and shortlist is not None:
        raise CheckpointError(f"{origin}: a drafter with num_head_tokens and use_ordered_embeddings is not supported")
    ropes: list[int] = []
    layers = tuple(_layer(config, index, target, ropes) for index in range(len(config.data["layer_types"])))
    return DrafterEntry(
        graph=DRAFTER_GRAPH,
        hidden_size=config.integer("hidden_size"),
        norm_eps=config.number("rms_norm_eps"),
        rotary=tuple(target.rotary[rope] for rope in ropes),
        layers=layers,
        candidates=listed or (vocab_size if shortlist is None else shortlist.candidates(vocab_size)),
        shortlist=shortlist,
        target_head=listed > 0,
        acceptance=None if outer.data.get("acceptance") is None else outer.number("acceptance", maximum=1.0),
    )


def _layer(config: Config, index: int, target: Target, ropes: list[int]) -> Layer:
    """A layer that reads the target's last cache of its kind, through the target's window and with its rotation.

    ropes : the target's rotary embeddings that the layers before have; extended
    """
    kind: AttentionKind = "full" if config.kind(index) == FULL else "sliding"
    source = target.last_kv_layer(kind)
    if source is None:
        raise PairMismatchError(f"the target has no {kind} attention layer whose cache a drafter could read")
    own, rotary = target.layers[source].mixer, None
    assert isinstance(own, Attention)
    if own.rotary is not None:
        if own.rotary not in ropes:
            ropes.append(own.rotary)
        rotary = ropes.index(own.rotary)
    made = made_layer(config, index, kv_source=source, experts=None, embedding=0, window=own.window, rotary=rotary)
    found = made.mixer
    assert isinstance(found, Attention)
    if (found.kv_heads, found.head_dim) != (own.kv_heads, own.head_dim):
        raise PairMismatchError(
            f"drafter layer {index} reads {found.kv_heads} KV heads of {found.head_dim}, "
            f"target layer {source} has {own.kv_heads} of {own.head_dim}"
        )
    return made


def _shortlist(outer: JsonFields, vocab_size: int) -> ShortlistEntry | None:
    """The token clusters of a drafter's centroid head; None for a head that scores the same tokens in every step."""
    top = outer.integer("centroid_intermediate_top_k", 32)
    if not outer.flag("use_ordered_embeddings"):
        return None
    clusters = outer.integer("num_centroids", 2048)
    if vocab_size % clusters or top > clusters:
        raise CheckpointError(
            f"{outer.origin}: {clusters} centroids, {top} of them scored, do not fit a vocabulary of {vocab_size}"
        )
    return ShortlistEntry(clusters, top)
