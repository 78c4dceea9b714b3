"""Published shapes of Gemma 4 as data: text models, assistants and towers of all sizes, and heads for E2B.

The sizes are fields of `config.json`, E2B's in full and the others' where they differ from it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ondevice.bundle_format.audio import AudioEntry
from ondevice.bundle_format.model_config import HeadsEntry, ShortlistEntry, Target
from ondevice.bundle_format.tensor_table import Shapes, drafter_shapes
from ondevice.bundle_format.vision import VisionEntry
from ondevice_export.checkpoint import audio as audio_towers
from ondevice_export.checkpoint import vision as vision_towers
from ondevice_export.checkpoint.models import checkpoint_shapes
from ondevice_export.checkpoint.named_tensors import TensorNames
from ondevice_export.families import read_target
from ondevice_export.families.gemma4_assistant import read_drafter

Fields = Mapping[str, Any]

VOCABULARY = 262_144

TARGET: Fields = {
    "architectures": ["Gemma4ForCausalLM"],
    "hidden_size": 1536,
    "num_hidden_layers": 35,
    "layer_types": (["sliding_attention"] * 4 + ["full_attention"]) * 7,
    "num_attention_heads": 8,
    "num_key_value_heads": 1,
    "head_dim": 256,
    "global_head_dim": 512,
    "intermediate_size": 6144,
    "use_double_wide_mlp": True,
    "num_kv_shared_layers": 20,
    "sliding_window": 512,
    "hidden_size_per_layer_input": 256,
    "vocab_size_per_layer_input": VOCABULARY,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 131_072,
    "final_logit_softcapping": 30.0,
    "rms_norm_eps": 1e-6,
}

DRAFTER: Fields = {
    "architectures": ["Gemma4AssistantForCausalLM"],
    "backbone_hidden_size": 1536,
    "use_ordered_embeddings": True,
    "num_centroids": 2048,
    "centroid_intermediate_top_k": 32,
    "text_config": {
        "hidden_size": 256,
        "num_hidden_layers": 4,
        "num_kv_shared_layers": 4,
        "layer_types": ["sliding_attention"] * 3 + ["full_attention"],
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 256,
        "global_head_dim": 512,
        "intermediate_size": 2048,
        "sliding_window": 512,
        "hidden_size_per_layer_input": 0,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 131_072,
        "rms_norm_eps": 1e-6,
    },
}

E2B_VISION = VisionEntry(
    graph=vision_towers.VISION_GRAPH, layers=16, hidden_size=768, intermediate_size=3072, query_heads=12, head_dim=64,
    norm_eps=1e-6, theta=100.0, patch=16, pool=3, positions=10_240, standardize=False, tokens=280,
    begin_token_id=255_999, image_token_id=258_880, end_token_id=258_882,
)  # fmt: skip


E2B_AUDIO = AudioEntry(
    graph=audio_towers.AUDIO_GRAPH, layers=12, hidden_size=1024, query_heads=8, output_size=1536, mel_bins=128,
    channels=32, kernel=5, keys=12, logit_cap=50.0, residual_weight=0.5, norm_eps=1e-6, begin_token_id=256_000,
    audio_token_id=258_881, end_token_id=258_883,
)  # fmt: skip

FIVE_TO_ONE = ["sliding_attention"] * 5 + ["full_attention"]
NO_PLE = {"hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0, "use_double_wide_mlp": False}
LARGE = {**NO_PLE, "attention_k_eq_v": True, "sliding_window": 1024, "max_position_embeddings": 262_144}
LARGE_DRAFTER = {"hidden_size": 1024, "intermediate_size": 8192, "num_attention_heads": 16, "sliding_window": 1024}

TARGETS: dict[str, Fields] = {
    "E2B": {},
    "E4B": {
        "hidden_size": 2560,
        "num_hidden_layers": 42,
        "layer_types": FIVE_TO_ONE * 7,
        "num_key_value_heads": 2,
        "intermediate_size": 10240,
        "use_double_wide_mlp": False,
        "num_kv_shared_layers": 18,
    },
    "12B": {
        **LARGE,
        "hidden_size": 3840,
        "num_hidden_layers": 48,
        "layer_types": FIVE_TO_ONE * 8,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "num_global_key_value_heads": 1,
        "intermediate_size": 15360,
    },
    "26B-A4B": {
        **LARGE,
        "hidden_size": 2816,
        "num_hidden_layers": 30,
        "layer_types": FIVE_TO_ONE * 5,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "num_global_key_value_heads": 2,
        "intermediate_size": 2112,
        "enable_moe_block": True,
        "num_experts": 128,
        "top_k_experts": 8,
        "moe_intermediate_size": 704,
    },
    "31B": {
        **LARGE,
        "hidden_size": 5376,
        "num_hidden_layers": 60,
        "layer_types": FIVE_TO_ONE * 10,
        "num_attention_heads": 32,
        "num_key_value_heads": 16,
        "num_global_key_value_heads": 4,
        "intermediate_size": 21504,
    },
}
"""Published sizes, where they differ from E2B's."""

DRAFTERS: dict[str, Fields] = {
    "E2B": {},
    "E4B": {"num_key_value_heads": 2},
    "12B": {**LARGE_DRAFTER, "num_key_value_heads": 8, "num_global_key_value_heads": 1, "attention_k_eq_v": True},
    "26B-A4B": {**LARGE_DRAFTER, "num_key_value_heads": 8, "num_global_key_value_heads": 2, "attention_k_eq_v": True},
    "31B": {**LARGE_DRAFTER, "num_key_value_heads": 16, "num_global_key_value_heads": 4, "attention_k_eq_v": True},
}

LARGE_VISION = replace(
    E2B_VISION, layers=27, hidden_size=1152, intermediate_size=4304, query_heads=16, head_dim=72,
    standardize=True, bidirectional=True,
)  # fmt: skip

VISION: dict[str, VisionEntry] = {
    "E2B": E2B_VISION,
    "E4B": E2B_VISION,
    "12B": replace(
        E2B_VISION, layers=0, hidden_size=3840, intermediate_size=0, query_heads=0, head_dim=0, patch=48, pool=1,
        positions=1120, bidirectional=True,
    ),
    "26B-A4B": LARGE_VISION,
    "31B": LARGE_VISION,
}  # fmt: skip
"""The vision towers of `TARGETS`."""

AUDIO: dict[str, AudioEntry] = {
    "E2B": E2B_AUDIO,
    "E4B": E2B_AUDIO,
    "12B": replace(
        E2B_AUDIO, layers=0, hidden_size=0, query_heads=0, output_size=640, mel_bins=0, channels=0, kernel=0,
        keys=0, logit_cap=0.0, residual_weight=0.0,
    ),
}  # fmt: skip
"""The audio towers of those that have one."""

SHORTLIST = ShortlistEntry(DRAFTER["num_centroids"], DRAFTER["centroid_intermediate_top_k"])
CANDIDATES = SHORTLIST.candidates(VOCABULARY)

HEADS = (
    HeadsEntry("medusa", "heads.medusa.onnx", 4, CANDIDATES, shortlist=SHORTLIST),
    HeadsEntry(
        "blockwise", "heads.blockwise.onnx", 4, CANDIDATES, width=2 * TARGET["hidden_size"], shortlist=SHORTLIST
    ),
    HeadsEntry("exit", "heads.exit.onnx", 1, CANDIDATES, 14, shortlist=SHORTLIST),
)


def target_fields(name: str) -> dict[str, Any]:
    """The `config.json` of one of `TARGETS`, as far as its text model goes."""
    return {**TARGET, **TARGETS[name]}


def drafter_fields(name: str) -> dict[str, Any]:
    """The same of its assistant."""
    return {
        **DRAFTER,
        "backbone_hidden_size": target_fields(name)["hidden_size"],
        "use_ordered_embeddings": "num_global_key_value_heads" not in DRAFTERS[name],
        "text_config": {**DRAFTER["text_config"], **DRAFTERS[name]},
    }


def read_shapes(name: str) -> tuple[Target, Shapes, Shapes]:
    """The target's configuration, and the tensors of target and drafter."""
    target = read_target(target_fields(name), name).target
    drafter = read_drafter(drafter_fields(name), name, target)
    return target, checkpoint_shapes(target, TensorNames("model.")), drafter_shapes(drafter, target)
