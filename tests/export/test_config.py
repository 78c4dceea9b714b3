"""Both spellings of the layers' differences, and the defaults of transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import Gemma4TextConfig, Gemma4UnifiedTextConfig

from ondevice.bundle_format.model_config import Target
from ondevice_export.checkpoint.config import read_target

FLAT: dict[str, dict[str, Any]] = {
    "E2B": {
        "hidden_size": 1536,
        "intermediate_size": 6144,
        "num_hidden_layers": 35,
        "num_key_value_heads": 1,
        "num_kv_shared_layers": 20,
        "use_double_wide_mlp": True,
        "layer_types": (["sliding_attention"] * 4 + ["full_attention"]) * 7,
    },
    "31B": {
        "hidden_size": 5376,
        "num_attention_heads": 32,
        "num_hidden_layers": 60,
        "num_key_value_heads": 16,
        "num_global_key_value_heads": 4,
        "attention_k_eq_v": True,
        "hidden_size_per_layer_input": 0,
    },
    "defaults": {},
}


def parse(path: Path, fields: dict[str, Any], architecture: str = "Gemma4ForCausalLM") -> Target:
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps({"architectures": [architecture], **fields}))
    return read_target(path)[1]


@pytest.mark.parametrize("name", FLAT)
def test_flat_form_equals_what_transformers_saves(name: str, tmp_path: Path) -> None:
    flat = parse(tmp_path / "flat", {"model_type": "gemma4_text", **FLAT[name]})
    saved = json.loads(Gemma4TextConfig(**FLAT[name]).to_json_string())
    assert parse(tmp_path / "saved", saved) == flat


def test_unified_has_no_per_layer_embeddings(tmp_path: Path) -> None:
    saved = json.loads(Gemma4UnifiedTextConfig().to_json_string())
    config = parse(tmp_path / "saved", saved, "Gemma4UnifiedForCausalLM")
    assert config.ple_size == 0
    assert (config.sliding_window, config.context_length) == (1024, 262_144)
    bare = parse(tmp_path / "bare", {"model_type": "gemma4_unified_text"}, "Gemma4UnifiedForCausalLM")
    # Without per_layer_config the flat form's defaults apply, which are the same.
    assert bare == config


def test_e2b_layers(tmp_path: Path) -> None:
    config = parse(tmp_path / "flat", FLAT["E2B"])
    assert config.first_shared_layer == 15
    assert (config.last_kv_layer("sliding"), config.last_kv_layer("full")) == (13, 14)
    assert {config.layers[index].kv_source for index in range(15, 35)} == {13, 14}
    assert [config.layers[index].intermediate_size for index in (14, 15)] == [6144, 12288]
    assert [config.layers[index].head_dim for index in (13, 14)] == [256, 512]
