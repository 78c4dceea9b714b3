"""Tiny random Gemma 4 pairs, one per family, saved by transformers: the input of the oracle and of our export.

`python -m tests.tiny_models DIR` saves the pairs of the tests that need no transformers in a directory, for runs
without it.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from transformers import PreTrainedModel

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
    # No PLE, no KV sharing; full layers have one KV head and no v projection.
    "12b": {
        "layer_types": [_SLIDING, _SLIDING, _FULL],
        "num_key_value_heads": 2,
        "num_global_key_value_heads": 1,
        "attention_k_eq_v": True,
    },
    # Experts beside the dense block; two global KV heads and no v projection in full layers.
    "26b": {
        "layer_types": [_SLIDING, _SLIDING, _FULL],
        "num_key_value_heads": 4,
        "num_global_key_value_heads": 2,
        "attention_k_eq_v": True,
        "hidden_size_per_layer_input": 0,
        "vocab_size_per_layer_input": VOCAB,
        "enable_moe_block": True,
        "num_experts": 12,
        "top_k_experts": 3,
        "moe_intermediate_size": 32,
    },
    # As above, without experts.
    "31b": {
        "layer_types": [_SLIDING, _FULL],
        "num_key_value_heads": 4,
        "num_global_key_value_heads": 2,
        "attention_k_eq_v": True,
        "hidden_size_per_layer_input": 0,
        "vocab_size_per_layer_input": VOCAB,
    },
}
_TEXT["multimodal"] = _TEXT["seeing"] = _TEXT["e2b"]
_TEXT["seeing-e4b"] = _TEXT["e4b"]
for _size in ("12b", "26b", "31b"):
    _TEXT[f"seeing-{_size}"] = _TEXT[_size]
SEEING = ("seeing", "seeing-e4b", "seeing-12b", "seeing-26b", "seeing-31b")
"""Families with a vision tower. The first one has an audio tower too; the second one standardises, and has no limits of
linear layers; 12B has towers without layers. From 12B on, the tokens of a picture see each other in sliding layers."""
BLOCKWISE = SEEING[2:]
BEGIN, IMAGE, END, PAD = 16, 17, 18, 3
"""Tokens of families with a tower, as in `tokenizers_made.gemma_seeing`."""
BEGIN_AUDIO, AUDIO, END_AUDIO = 19, 20, 21
"""The same for sounds."""
MEL_BINS, AUDIO_LAYERS, AUDIO_KEYS = 16, 2, 4
PATCH, POOL, TOWER_HIDDEN, TOWER_LAYERS = 4, 3, 48, 3
FAMILIES = tuple(name for name in _TEXT if name not in SEEING)
QUANTISED = ("e2b", "e4b", "12b", "26b", "31b")
"""Families that the simd engine is tested with; `multimodal` is left out, as its graph is that of `e2b`."""


def save_pair(directory: Path, family: str) -> None:
    """Save a target, its drafter and its heads in the layout that an export of `directory / "target"` finds."""
    save_target(directory / "target", family)
    save_drafter(directory / "drafter", family)
    save_heads(directory / "heads", directory / "target", family)


def save_target(path: Path, family: str, seed: int = 0, **overrides: Any) -> PreTrainedModel:
    """Save a random target and return it.

    Args:
        path: a directory, created if missing.
        family: one of `FAMILIES`; `multimodal` is `e2b` in the layout with vision and audio, but without towers, the
            families of SEEING have a vision tower, `12b` is unified.
        seed: seed of the weights.
        overrides: fields of the text configuration to replace.
    """
    import torch
    import transformers

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
    if family == "seeing-12b":
        model = transformers.Gemma4UnifiedForConditionalGeneration(_seeing_unified_config(fields))
    elif family == "12b":
        unified = transformers.Gemma4UnifiedTextConfig(**fields)
        model = transformers.Gemma4UnifiedForConditionalGeneration(
            transformers.Gemma4UnifiedConfig(text_config=unified, vision_config=None, audio_config=None)
        )
    elif family in SEEING:
        model = transformers.Gemma4ForConditionalGeneration(_seeing_config(family, fields))
    elif family == "multimodal":
        text = transformers.Gemma4TextConfig(**fields)
        config = transformers.Gemma4Config(text_config=text, vision_config=None, audio_config=None)
        model = transformers.Gemma4ForConditionalGeneration(config)
    else:
        model = transformers.Gemma4ForCausalLM(transformers.Gemma4TextConfig(**fields))
    _randomise(model)
    model.save_pretrained(path)
    if family == "multimodal":
        _add_vision_tensors(path / "model.safetensors")
    return model.eval()


def save_drafter(path: Path, family: str, seed: int = 1) -> PreTrainedModel:
    """Save a random drafter for the target of the same family and return it."""
    import torch
    import transformers

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
    if family.endswith("12b"):
        unified = transformers.Gemma4UnifiedAssistantConfig(
            text_config=transformers.Gemma4UnifiedTextConfig(**fields), backbone_hidden_size=64
        )
        model = transformers.Gemma4UnifiedAssistantForCausalLM(unified)
    else:
        text = transformers.Gemma4TextConfig(**fields, hidden_size_per_layer_input=0, vocab_size_per_layer_input=0)
        config = transformers.Gemma4AssistantConfig(
            text_config=text,
            backbone_hidden_size=64,
            use_ordered_embeddings=family not in ("26b", "31b"),
            num_centroids=48,
            centroid_intermediate_top_k=6,
        )
        model = transformers.Gemma4AssistantForCausalLM(config)
    _randomise(model)
    model.save_pretrained(path)
    return model.eval()


def save_heads(path: Path, target: Path, family: str, seed: int = 2) -> None:
    """Save random heads of every kind for a saved target, as `models/recipe/train_heads.py` does for trained ones.

    The heads of 31b score the whole vocabulary, the others a shortlist; the exit head reads a layer below the middle.
    """
    from safetensors.numpy import save_file

    from ondevice_export.checkpoint.heads import weights_sha256
    from ondevice_export.checkpoint.models import open_target
    from ondevice_export.checkpoint.source import locate

    path.mkdir()
    rng, hidden, offsets, width = np.random.default_rng(seed), 64, 3, 96
    with open_target(locate(str(target)), lambda line: None) as opened:
        made_for = {
            "name": "tiny",
            "hidden_size": hidden,
            "vocab_size": VOCAB,
            "layers": len(opened.config.layers),
            "weights_sha256": weights_sha256(opened),
        }
    tensors: dict[str, Any] = {
        "medusa.blocks.weight": rng.normal(0, 0.2, (offsets * hidden, hidden)).astype(np.float32),
        "blockwise.inner.weight": rng.normal(0, 0.2, (width, hidden)).astype(np.float32),
        "blockwise.outer.weight": rng.normal(0, 0.2, (offsets * hidden, width)).astype(np.float32),
        "blockwise.norm.weight": rng.uniform(0.5, 1.5, hidden).astype(np.float32),
        "exit.norm.weight": rng.uniform(0.5, 1.5, hidden).astype(np.float32),
        "exit.block.weight": rng.normal(0, 0.2, (hidden, hidden)).astype(np.float32),
        "shortlist.centroids.weight": rng.normal(0, 0.2, (48, hidden)).astype(np.float32),
        "shortlist.token_ordering": rng.permutation(VOCAB),
    }
    config = {
        "model_type": "ondevice_heads",
        "target": made_for,
        "kinds": {
            "medusa": {"offsets": offsets},
            "blockwise": {"offsets": offsets, "width": width},
            "exit": {"layer": len(_TEXT[family]["layer_types"]) // 2 - 1},
        },
        "shortlist": None if family == "31b" else {"clusters": 48, "top": 6},
    }
    (path / "config.json").write_text(json.dumps(config), "utf-8")
    save_file(tensors, path / "model.safetensors")


def _randomise(model: PreTrainedModel) -> None:
    """Randomise all weights, norms and scalars, large enough that every part of the model affects the logits."""
    import torch

    with torch.no_grad():
        for name, value in [*model.named_parameters(), *model.named_buffers()]:
            if name.endswith("token_ordering"):
                value.copy_(torch.randperm(len(value)))
            elif name.endswith("q_norm.weight"):
                # Attention scores are not scaled by head_dim ** -0.5: larger ones saturate and magnify rounding errors.
                value.uniform_(0.05, 0.35)
            elif name.endswith("post_feedforward_layernorm_2.weight"):
                # At near-ties a rounding error chooses another expert, so the experts' output must not dominate.
                value.uniform_(0.05, 0.25)
            elif name.endswith("_min"):
                value.uniform_(-1.5, -0.5)  # narrow enough to cut, wide enough not to cut everything
            elif name.endswith("_max"):
                value.uniform_(0.5, 1.5)
            elif name.endswith(("std_bias", "per_dim_scale", "output_proj.bias")):
                value.normal_(0.0, 0.5)
            elif name.endswith("std_scale"):
                value.uniform_(0.1, 0.4)
            elif name.endswith("layer_scalar") or "norm" in name:
                value.uniform_(0.5, 1.5)
            elif name.endswith("router.scale"):
                value.uniform_(8.0, 24.0)  # spreads the router's scores, so that near-ties between top experts are rare
            elif name.endswith("per_expert_scale"):
                value.uniform_(0.5, 1.5)
            elif value.dim() >= 2 and not name.endswith(("inv_freq", "inv_timescales")):
                value.normal_(0.0, 0.1)


_MEDIA_TOKENS = {
    "boi_token_id": BEGIN,
    "image_token_id": IMAGE,
    "eoi_token_id": END,
    "video_token_id": VOCAB - 1,
    "audio_token_id": AUDIO,
    "boa_token_id": BEGIN_AUDIO,
    "eoa_token_index": END_AUDIO,
}


def _seeing_config(family: str, fields: dict[str, Any]) -> Any:
    import transformers

    vision = transformers.Gemma4VisionConfig(
        hidden_size=TOWER_HIDDEN,
        intermediate_size=80,
        num_hidden_layers=TOWER_LAYERS,
        num_attention_heads=3,
        num_key_value_heads=3,
        head_dim=24 if family == "seeing" else 72,
        patch_size=PATCH,
        pooling_kernel_size=POOL,
        position_embedding_size=240,
        use_clipped_linears=family == "seeing",
        standardize=family != "seeing",
    )
    attention = "vision" if family in BLOCKWISE else None
    return transformers.Gemma4Config(
        text_config=transformers.Gemma4TextConfig(**fields, pad_token_id=PAD, use_bidirectional_attention=attention),
        vision_config=vision,
        audio_config=_audio_config() if family == "seeing" else None,
        **_MEDIA_TOKENS,
    )


def _seeing_unified_config(fields: dict[str, Any]) -> Any:
    import transformers

    return transformers.Gemma4UnifiedConfig(
        text_config=transformers.Gemma4UnifiedTextConfig(**fields, pad_token_id=PAD),
        vision_config=transformers.Gemma4UnifiedVisionConfig(
            patch_size=PATCH, pooling_kernel_size=POOL, mm_embed_dim=48, mm_posemb_size=40, output_proj_dims=48
        ),
        audio_config=transformers.Gemma4UnifiedAudioConfig(audio_embed_dim=64),
        **_MEDIA_TOKENS,
    )


def _audio_config() -> Any:
    import transformers

    return transformers.Gemma4AudioConfig(
        hidden_size=32,
        num_hidden_layers=AUDIO_LAYERS,
        num_attention_heads=4,
        subsampling_conv_channels=[MEL_BINS, 8],
        conv_kernel_size=3,
        attention_chunk_size=AUDIO_KEYS,
        attention_context_left=AUDIO_KEYS + 1,
        attention_logit_cap=3.0,
        residual_weight=0.7,
        output_proj_dims=24,
    )


def _add_vision_tensors(path: Path) -> None:
    import torch
    from safetensors.torch import load_file, save_file

    tensors = load_file(path)
    tensors["model.vision_tower.patch_embedder.weight"] = torch.zeros(4, 4)
    tensors["model.embed_audio.embedding_projection.weight"] = torch.zeros(2, 2)
    save_file(tensors, path)


def save(name: str, directory: Path) -> None:
    """Save a pair of Gemma 4, one that was trained quantised, or the target of another family."""
    from tests import tiny_families
    from tests.trained_models import TRAINED, save_trained_pair

    if name in tiny_families.FAMILIES:
        tiny_families.save_family(directory / "target", name)
    elif name in TRAINED:
        save_trained_pair(directory, name)
    else:
        save_pair(directory, name)


if __name__ == "__main__":
    from tests import tiny_families
    from tests.trained_models import TRAINED

    for each in (*QUANTISED, *SEEING, *TRAINED, *tiny_families.FAMILIES):
        save(each, Path(sys.argv[1]) / each)
