"""A draft model: a `Gemma4ForCausalLM` with a target's tokens and about a million parameters, tables not counted."""

from pathlib import Path

import numpy as np
import torch
from pair.target import SHORT, NextTokenRun, new_model
from training.schedule import Budget
from transformers import Gemma4ForCausalLM, Gemma4TextConfig

TEXT, OWN = "text.npy", "own.npy"  # streams of tokens: of files, and of the target's own text


def draft_config(target: Gemma4TextConfig) -> Gemma4TextConfig:
    """Four layers, each with keys and values of its own."""
    return Gemma4TextConfig(
        vocab_size=target.vocab_size,
        vocab_size_per_layer_input=target.vocab_size,
        hidden_size=64,
        hidden_size_per_layer_input=32,
        intermediate_size=192,
        num_hidden_layers=4,
        layer_types=["sliding_attention"] * 3 + ["full_attention"],
        num_kv_shared_layers=0,
        use_double_wide_mlp=False,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=64,
        global_head_dim=128,
        sliding_window=256,
        max_position_embeddings=target.max_position_embeddings,
        final_logit_softcapping=target.final_logit_softcapping,
        pad_token_id=target.pad_token_id,
        eos_token_id=target.eos_token_id,
        bos_token_id=target.bos_token_id,
    )


def draft_model_run(target: Gemma4TextConfig, work: Path, device: torch.device, budget: Budget) -> NextTokenRun:
    """Next-token training on both streams alternately, because acceptance depends on the target's own text."""
    streams = [np.load(work / TEXT, mmap_mode="r"), np.load(work / OWN, mmap_mode="r").ravel()]
    file = work / "draft-model.pt"
    return NextTokenRun(
        new_model(draft_config(target)), streams, file=file, device=device, budget=budget, lengths=(SHORT, SHORT)
    )


def trained_draft_model(target: Gemma4TextConfig, work: Path) -> Gemma4ForCausalLM:
    """The draft model with its latest weights, frozen, in float32."""
    model = new_model(draft_config(target))
    model.load_state_dict(torch.load(work / "draft-model.pt", weights_only=True, map_location="cpu")["model"])
    return model.requires_grad_(False).eval()
