"""Tiny random Gemma 4 pairs, one per family, as transformers saves them: the oracle's input and ours."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import (
    Gemma4AssistantConfig,
    Gemma4AssistantForCausalLM,
    Gemma4Config,
    Gemma4ForCausalLM,
    Gemma4ForConditionalGeneration,
    Gemma4TextConfig,
    Gemma4UnifiedAssistantConfig,
    Gemma4UnifiedAssistantForCausalLM,
    Gemma4UnifiedConfig,
    Gemma4UnifiedForConditionalGeneration,
    Gemma4UnifiedTextConfig,
    PreTrainedModel,
)

VOCAB = 384
WINDOW = 16
CONTEXT = 256
_SLIDING, _FULL = "sliding_attention", "full_attention"

_TEXT: dict[str, dict[str, Any]] = {
    # PLE, KV sharing, a double-wide upper half, one KV head.
    "e2b": {
        "layer_types": [_SLIDING, _SLIDING, _FULL] * 2,
        "num_key_value_heads": 1,
        "hidden_size_per_layer_input": 32,
        "vocab_size_per_layer_input": VOCAB,
        "num_kv_shared_layers": 3,
        "use_double_wide_mlp": True,
    },
    # PLE, KV sharing, two KV heads.
    "e4b": {
        "layer_types": [_SLIDING, _FULL, _SLIDING, _SLIDING, _FULL],
        "num_key_value_heads": 2,
        "hidden_size_per_layer_input": 32,
        "vocab_size_per_layer_input": VOCAB,
        "num_kv_shared_layers": 2,
    },
    # Neither; full layers have one KV head and no v projection.
    "12b": {
        "layer_types": [_SLIDING, _SLIDING, _FULL],
        "num_key_value_heads": 2,
        "num_global_key_value_heads": 1,
        "attention_k_eq_v": True,
    },
    # The same with two global KV heads of several.
    "31b": {
        "layer_types": [_SLIDING, _FULL],
        "num_key_value_heads": 4,
        "num_global_key_value_heads": 2,
        "attention_k_eq_v": True,
        "hidden_size_per_layer_input": 0,
        "vocab_size_per_layer_input": VOCAB,
    },
}
_TEXT["multimodal"] = _TEXT["e2b"]
FAMILIES = tuple(_TEXT)


def save_target(path: Path, family: str, seed: int = 0, **overrides: Any) -> PreTrainedModel:
    """Save a random target and return it.

    Args:
        path: a directory, made where missing.
        family: one of `FAMILIES`; `multimodal` is `e2b` inside the vision and audio layout, `12b` is unified.
        seed: of the weights.
        overrides: fields of the text configuration.
    """
    fields = {
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_attention_heads": 4,
        "head_dim": 32,
        "global_head_dim": 64,
        "sliding_window": WINDOW,
        "max_position_embeddings": CONTEXT,
        "final_logit_softcapping": 30.0,
        "num_hidden_layers": len(_TEXT[family]["layer_types"]),
        **_TEXT[family],
        **overrides,
    }
    torch.manual_seed(seed)
    model: PreTrainedModel
    if family == "12b":
        text = Gemma4UnifiedTextConfig(**fields)
        model = Gemma4UnifiedForConditionalGeneration(
            Gemma4UnifiedConfig(text_config=text, vision_config=None, audio_config=None)
        )
    elif family == "multimodal":
        config = Gemma4Config(text_config=Gemma4TextConfig(**fields), vision_config=None, audio_config=None)
        model = Gemma4ForConditionalGeneration(config)
    else:
        model = Gemma4ForCausalLM(Gemma4TextConfig(**fields))
    _randomise(model)
    model.save_pretrained(path)
    if family == "multimodal":
        _add_vision_tensors(path / "model.safetensors")
    return model.eval()


def save_drafter(path: Path, family: str, seed: int = 1) -> PreTrainedModel:
    """Save a random drafter for the target of the same family and return it."""
    fields = {name: _TEXT[family][name] for name in ("num_key_value_heads",)}
    for name in ("num_global_key_value_heads", "attention_k_eq_v"):
        if name in _TEXT[family]:
            fields[name] = _TEXT[family][name]
    fields.update(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        head_dim=32,
        global_head_dim=64,
        sliding_window=WINDOW,
        max_position_embeddings=CONTEXT,
        layer_types=[_SLIDING] * 3 + [_FULL],
    )
    torch.manual_seed(seed)
    model: PreTrainedModel
    if family == "12b":
        unified = Gemma4UnifiedAssistantConfig(text_config=Gemma4UnifiedTextConfig(**fields), backbone_hidden_size=64)
        model = Gemma4UnifiedAssistantForCausalLM(unified)
    else:
        text = Gemma4TextConfig(**fields, hidden_size_per_layer_input=0, vocab_size_per_layer_input=0)
        config = Gemma4AssistantConfig(
            text_config=text,
            backbone_hidden_size=64,
            use_ordered_embeddings=family != "31b",
            num_centroids=48,
            centroid_intermediate_top_k=6,
        )
        model = Gemma4AssistantForCausalLM(config)
    _randomise(model)
    model.save_pretrained(path)
    return model.eval()


def _randomise(model: PreTrainedModel) -> None:
    """Random norms and scalars too, and weights large enough that every part shows in the logits."""
    with torch.no_grad():
        for name, value in [*model.named_parameters(), *model.named_buffers()]:
            if name.endswith("token_ordering"):
                value.copy_(torch.randperm(len(value)))
            elif name.endswith("q_norm.weight"):
                # The scores are not scaled by head_dim ** -0.5: larger ones saturate, and magnify rounding errors.
                value.uniform_(0.05, 0.35)
            elif name.endswith(("norm.weight", "layer_scalar")):
                value.uniform_(0.5, 1.5)
            elif value.dim() == 2 and not name.endswith("inv_freq"):
                value.normal_(0.0, 0.1)


def _add_vision_tensors(path: Path) -> None:
    tensors = load_file(path)
    tensors["model.vision_tower.patch_embedder.weight"] = torch.zeros(4, 4)
    tensors["model.embed_audio.embedding_projection.weight"] = torch.zeros(2, 2)
    save_file(tensors, path)
