"""A draft model: a `Gemma4ForCausalLM` with an eighth of the target's parameters and the same tokens.

It learns from the corpus and from text that the target wrote, by turns: acceptance is about the target's own words.
"""

from pathlib import Path

import numpy as np
import torch
from schedule import Budget
from target import NextTokenRun, new_model, text_config, trained
from transformers import Gemma4ForCausalLM


def new_draft_model() -> Gemma4ForCausalLM:
    """An untrained one: four layers, each with keys and values of its own."""
    config = text_config(
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=4,
        layer_types=["sliding_attention"] * 3 + ["full_attention"],
        num_kv_shared_layers=0,
        use_double_wide_mlp=False,
        num_attention_heads=2,
        hidden_size_per_layer_input=16,
    )
    return new_model(config)


def draft_model_run(work: Path, device: torch.device, budget: Budget) -> NextTokenRun:
    """Its training."""
    streams = [np.load(work / file, mmap_mode="r") for file in ("train.npy", "own.npy")]
    return NextTokenRun(new_draft_model(), streams, file=work / "draft-model.pt", device=device, budget=budget)


def trained_draft_model(work: Path) -> Gemma4ForCausalLM:
    """The draft model with its latest weights."""
    return trained(new_draft_model(), work / "draft-model.pt")
