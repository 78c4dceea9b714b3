"""Both spellings of the layers' differences, and the defaults of transformers."""

from __future__ import annotations

import json
from typing import Any

import pytest
from transformers import Gemma4TextConfig, Gemma4UnifiedTextConfig

from ondevice.bundle_format.model_config import Target
from ondevice_export.families import read_target

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


def parse(fields: dict[str, Any], architecture: str = "Gemma4ForCausalLM") -> Target:
    return read_target({"architectures": [architecture], **fields}, "config.json").target


@pytest.mark.parametrize("name", FLAT)
def test_flat_form_equals_what_transformers_saves(name: str) -> None:
    flat = parse({"model_type": "gemma4_text", **FLAT[name]})
    saved = json.loads(Gemma4TextConfig(**FLAT[name]).to_json_string())
    assert parse(saved) == flat


def test_unified_has_no_per_layer_embeddings() -> None:
    saved = json.loads(Gemma4UnifiedTextConfig().to_json_string())
    config = parse(saved, "Gemma4UnifiedForCausalLM")
    assert config.per_layer is None
    assert (config.window, config.context_length) == (1024, 262_144)
    bare = parse({"model_type": "gemma4_unified_text"}, "Gemma4UnifiedForCausalLM")
    # Without per_layer_config the flat form's defaults apply, which are the same.
    assert bare == config


def test_e2b_layers() -> None:
    config = parse(FLAT["E2B"])
    assert config.first_shared_layer == 15
    assert (config.last_kv_layer("sliding"), config.last_kv_layer("full")) == (13, 14)
    assert {config.attention[index].kv_source for index in range(15, 35)} == {13, 14}
    assert [config.layers[index].feed_forward.width for index in (14, 15)] == [6144, 12288]
    assert [config.attention[index].head_dim for index in (13, 14)] == [256, 512]


def test_null_in_place_of_the_rotations_is_the_default() -> None:
    assert parse({"rope_parameters": None}) == parse({})
    saved = json.loads(Gemma4TextConfig(rope_parameters=None).to_json_string())
    assert parse({"rope_parameters": None}).rotary == parse(saved).rotary
