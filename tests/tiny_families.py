"""Tiny random models of the families other than Gemma 4, saved by transformers in the newer or the older spelling.

Their weights are large enough that every part affects the logits: norms are away from 1, `query_pre_attn_scalar` is
not the head size, windows are shorter than the tests' texts, biases are not zero.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedModel

VOCAB, CONTEXT, WINDOW = 384, 256, 16
_SLIDING, _FULL = "sliding_attention", "full_attention"
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_YARN = {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0, "original_max_position_embeddings": 64}

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    # three query heads per KV head, tied, as SmolLM2
    "smollm2": ("Llama", {"num_attention_heads": 3, "num_key_value_heads": 1, "tie_word_embeddings": True}),
    # one query head per KV head, a head of its own, as Llama 2
    "llama2": ("Llama", {"num_attention_heads": 3, "num_key_value_heads": 3}),
    "llama3": ("Llama", {"num_attention_heads": 4, "num_key_value_heads": 2, "rope_parameters": _LLAMA3}),
    # one head of queries and of keys
    "alone": ("Llama", {"num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 64}),
    "smollm3": ("SmolLM3", {"num_key_value_heads": 2, "no_rope_layer_interval": 2, "num_hidden_layers": 4}),
    "mistral": ("Mistral", {"num_key_value_heads": 2, "sliding_window": WINDOW}),
    "mistral-full": ("Mistral", {"num_key_value_heads": 4, "sliding_window": None, "rope_parameters": _YARN}),
    "ministral": (
        "Ministral",
        {"num_key_value_heads": 2, "sliding_window": WINDOW, "layer_types": [_FULL, _SLIDING, _SLIDING]},
    ),
    "gemma3": (
        "Gemma3",
        {
            "num_key_value_heads": 1,
            "query_pre_attn_scalar": 48,
            "sliding_window": WINDOW,
            "layer_types": [_SLIDING, _FULL, _SLIDING],
            "rope_parameters": {
                _SLIDING: {"rope_type": "default", "rope_theta": 10_000.0},
                _FULL: {"rope_type": "linear", "factor": 8.0, "rope_theta": 1_000_000.0},
            },
            "final_logit_softcapping": None,
        },
    ),
    # Inside a multimodal checkpoint, whose configuration leaves most fields out
    "gemma3-multimodal": (
        "Gemma3",
        {"num_key_value_heads": 2, "sliding_window": WINDOW, "layer_types": [_SLIDING] * 5 + [_FULL]},
    ),
    # seven query heads per KV head, as Qwen2.5 0.5B
    "qwen2": ("Qwen2", {"num_attention_heads": 14, "num_key_value_heads": 2, "tie_word_embeddings": True}),
    "qwen3": ("Qwen3", {"num_key_value_heads": 2, "head_dim": 64}),
}
"""Name -> transformers' name of the family, and fields of the configuration."""


def save_family(path: Path, name: str, *, older: bool = False, seed: int = 0) -> PreTrainedModel:
    """Save a random model of one of `FAMILIES` and return it; `older` in the spelling of transformers 4."""
    import torch
    import transformers

    kind, own = FAMILIES[name]
    fields = {
        "vocab_size": VOCAB,
        "hidden_size": 96,
        "intermediate_size": 160,
        "num_hidden_layers": len(own.get("layer_types", [0] * 3)),
        "num_attention_heads": 4,
        "head_dim": 32,
        "max_position_embeddings": CONTEXT,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
        "tie_word_embeddings": kind in ("Gemma3", "SmolLM3"),
        **own,
    }
    if kind in ("Qwen2", "SmolLM3"):  # these derive it
        fields["head_dim"] = 32
        fields["hidden_size"] = 32 * fields["num_attention_heads"]
    torch.manual_seed(seed)
    if name == "gemma3-multimodal":
        text = transformers.Gemma3TextConfig(**fields)
        config = transformers.Gemma3Config(text_config=text, vision_config=_vision(), mm_tokens_per_image=4)
        model: PreTrainedModel = transformers.Gemma3ForConditionalGeneration(config)
    else:
        text = getattr(transformers, f"{kind}TextConfig" if kind == "Gemma3" else f"{kind}Config")(**fields)
        model = getattr(transformers, f"{kind}ForCausalLM")(text)
    _randomise(model, norms_without_one=kind == "Gemma3")
    model.save_pretrained(path)
    if older:
        written = path / "config.json"
        written.write_text(json.dumps(older_spelling(json.loads(written.read_text()))))
    return model.eval()


def older_spelling(config: dict[str, Any]) -> dict[str, Any]:
    """A `config.json` of transformers 5 in the spelling of version 4."""
    if "text_config" in config:
        return {**config, "text_config": _older_text(dict(config["text_config"]))}
    return _older_text(dict(config))


def _older_text(config: dict[str, Any]) -> dict[str, Any]:
    config["torch_dtype"] = config.pop("dtype", "float32")
    rope = config.pop("rope_parameters")
    full = dict(rope.get(_FULL, rope))
    config["rope_theta"] = full.pop("rope_theta")
    if _SLIDING in rope:
        config["rope_local_base_freq"] = rope[_SLIDING]["rope_theta"]
    if full.get("rope_type", "default") != "default":
        config["rope_scaling"] = {"type": full.pop("rope_type"), **full}
    kinds = config.pop("layer_types", None)
    if config["model_type"] == "gemma3_text":
        config["sliding_window_pattern"] = kinds.index(_FULL) + 1
        config["hidden_act"] = config.pop("hidden_activation")
    elif config["model_type"] == "ministral":
        config["layer_types"] = kinds
    config.pop("no_rope_layers", None)
    return config


def _vision() -> Any:
    import transformers

    return transformers.SiglipVisionConfig(
        hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, image_size=8, patch_size=4
    )


def _randomise(model: PreTrainedModel, *, norms_without_one: bool) -> None:
    import torch

    with torch.no_grad():
        for name, value in model.named_parameters():
            if "norm" in name and value.dim() == 1:
                value.uniform_(-0.5, 0.5) if norms_without_one else value.uniform_(0.5, 1.5)
            elif name.endswith("bias"):
                value.normal_(0.0, 0.3)
            elif value.dim() >= 2:
                value.normal_(0.0, 0.1)
