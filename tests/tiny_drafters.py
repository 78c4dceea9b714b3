"""Tiny random MTP drafters for the targets of `tiny_families`, in every form that one may have."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.tiny_families import CONTEXT, VOCAB, WINDOW

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_SLIDING, _FULL = "sliding_attention", "full_attention"
_HIDDEN = 64

DRAFTERS: dict[str, dict[str, Any]] = {
    # the target's rows of a list of tokens, tied to its embedding
    "smollm2": {"num_head_tokens": 100},
    # the same, of a head of its own
    "llama3": {"num_head_tokens": 77},
    # two kinds of attention
    "gemma3": {"layer_types": [_SLIDING, _FULL], "num_head_tokens": VOCAB},
    # Gemma's own forms: clusters of the vocabulary, or the whole vocabulary
    "qwen2": {"num_centroids": 24, "centroid_intermediate_top_k": 4},
    "mistral-full": {},
}
"""Target -> fields of the drafter's configuration; it chooses clusters if these have `num_centroids`."""


def save_drafter(path: Path, family: str, target: Path, seed: int = 1) -> PreTrainedModel:
    """Save a random drafter for a saved target of one of `tiny_families`; returns transformers' model.

    The head of that is of no use if the drafter's is the target's.
    """
    import torch
    from safetensors.torch import save_file

    config = drafter_config(family, json.loads((target / "config.json").read_text()))
    torch.manual_seed(seed)
    model = _random_model(config)
    tensors = {name: value for name, value in model.state_dict().items() if not name.startswith("lm_head")}
    if "num_head_tokens" in config:
        del tensors["model.embed_tokens.weight"]
        listed = torch.randperm(config["text_config"]["vocab_size"])[: config["num_head_tokens"]]
        tensors["masked_embedding.head_tokens"] = listed.sort().values.int()
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config), "utf-8")
    save_file(tensors, path / "model.safetensors")
    return model.eval()


def drafter_config(family: str, target: dict[str, Any]) -> dict[str, Any]:
    """The `config.json` of a drafter; `target` is that of its target."""
    form = dict(DRAFTERS[family])
    kinds, rope = form.pop("layer_types", [_FULL, _FULL]), target["rope_parameters"]
    head_dim = target.get("head_dim") or target["hidden_size"] // target["num_attention_heads"]
    text = {
        "model_type": "gemma4_text",
        "vocab_size": target["vocab_size"],
        "hidden_size": _HIDDEN,
        "intermediate_size": 96,
        "num_hidden_layers": len(kinds),
        "num_kv_shared_layers": len(kinds),
        "num_attention_heads": 2 * target["num_key_value_heads"],
        "num_key_value_heads": target["num_key_value_heads"],
        "head_dim": head_dim,
        "global_head_dim": head_dim,
        "sliding_window": WINDOW,
        "max_position_embeddings": CONTEXT,
        "layer_types": kinds,
        "rope_parameters": rope if _FULL in rope else dict.fromkeys((_SLIDING, _FULL), rope),
        "hidden_size_per_layer_input": 0,
        "vocab_size_per_layer_input": 0,
    }
    return {
        "architectures": ["Gemma4AssistantForCausalLM"],
        "model_type": "gemma4_assistant",
        "text_config": text,
        "backbone_hidden_size": target["hidden_size"],
        "use_ordered_embeddings": "num_centroids" in form,
        **form,
    }


def _random_model(config: dict[str, Any]) -> PreTrainedModel:
    import torch
    import transformers

    text = transformers.Gemma4TextConfig(**config["text_config"])
    backbone = config["backbone_hidden_size"]
    model: PreTrainedModel = transformers.Gemma4AssistantForCausalLM(
        transformers.Gemma4AssistantConfig(
            text_config=text,
            backbone_hidden_size=backbone,
            use_ordered_embeddings=config["use_ordered_embeddings"],
            num_centroids=config.get("num_centroids", 1),
            centroid_intermediate_top_k=config.get("centroid_intermediate_top_k", 1),
        )
    )
    with torch.no_grad():
        for name, value in [*model.named_parameters(), *model.named_buffers()]:
            if name.endswith("token_ordering"):
                value.copy_(torch.randperm(len(value)))
            elif name.endswith("q_norm.weight"):
                value.uniform_(0.05, 0.35)
            elif "norm" in name or name.endswith("layer_scalar"):
                value.uniform_(0.5, 1.5)
            elif value.dim() >= 2:
                value.normal_(0.0, 0.1)
    return model
