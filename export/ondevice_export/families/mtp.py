"""MTP layers that checkpoints have beside the model, and that draft for it: those of Qwen3.5 and Qwen3-Next.

The layer has the form of a layer of the model with full attention. Its input is made of a token and the hidden state
after the last layer that the token was chosen from; token embedding and head are the model's. Its norms and
projections are those of `Qwen3_5MultiTokenPredictor` in vLLM; as in llama.cpp, hidden states are those before a norm.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from ondevice.bundle_format.decoder import Attention, Block, Layer
from ondevice.bundle_format.model_config import DrafterEntry, Target
from ondevice.bundle_format.tensor_table import MTP, MTP_EMBEDDING, MTP_HIDDEN
from ondevice_export.checkpoint.config import FULL
from ondevice_export.families.family import Config, Family, RowsOf
from ondevice_export.families.gemma4_assistant import DRAFTER_GRAPH

JOINED = f"{MTP}fc.weight"
"""The checkpoint's projection of embedding and hidden state, side by side; bundles have its halves."""
HALVES = (MTP_EMBEDDING, MTP_HIDDEN)
LAYER = f"{MTP}layers.0."
"""Prefix of the layer's tensors in a checkpoint."""

NAMES = {
    f"{MTP}embedding_norm.weight": f"{MTP}pre_fc_norm_embedding.weight",
    f"{MTP}hidden_norm.weight": f"{MTP}pre_fc_norm_hidden.weight",
    **{
        f"{MTP}{name}.weight": f"{LAYER}{name}.weight"
        for name in ("input_layernorm", "self_attn.k_proj", "self_attn.v_proj", "self_attn.k_norm")
    },
}
"""Tensors of the target for an MTP layer: the bundle's name -> the checkpoint's."""

LISTED = 65_536
"""Number of tokens that a drafter scores of a larger vocabulary, beside the tokens that were added to it: those with
the lowest ids, which byte-level BPE gave to frequent pairs first. All 248,320 of Qwen3.5 are a third of the weights
of 0.8B. With the 65,536 most frequent ones as many drafts of an MTP layer were accepted as with all, 0.87, and with
32,768 of them 0.72 (another architecture with this vocabulary, ggml-org/llama.cpp #25187).
"""

_STEPS = 3
"""Length of a draft where no schedule chooses it, as the authors recommend for SGLang (`--speculative-num-steps`)."""


def rows_of(family: Family, config: Config) -> Mapping[str, RowsOf]:
    """As `Family.rows_of`, of the MTP layer."""
    return family.rows_of(config, _index(config))


def with_mtp_layer(family: Family, config: Config, target: Target, head_tokens: int) -> tuple[Target, DrafterEntry]:
    """The target with the keys and values of its MTP layer, and the drafter that reads them.

    head_tokens : number of tokens that the drafter scores
    """
    made = family.layer(config, _index(config))
    own = made.mixer
    assert isinstance(own, Attention)
    written = replace(target, mtp=replace(own, q_norm=False, gated=False))
    reading = replace(own, kv_source=written.mtp_cache, k_norm=False, rotary=None if own.rotary is None else 0)
    first, *others = made.blocks
    drafter = DrafterEntry(
        graph=DRAFTER_GRAPH,
        hidden_size=target.hidden_size,
        norm_eps=target.norm_eps,
        rotary=() if own.rotary is None else (target.rotary[own.rotary],),
        layers=(Layer((Block(reading, first.norm_in, first.norm_out), *others)),),
        candidates=head_tokens,
        shortlist=None,
        target_head=True,
        num_assistant_tokens=_STEPS,
    )
    return written, drafter


def _index(config: Config) -> int:
    """Index of a layer that the MTP layer has the form of."""
    return list(config.data["layer_types"]).index(FULL)
