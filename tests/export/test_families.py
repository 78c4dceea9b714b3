"""Families other than Gemma 4: float32 graphs against transformers, both spellings of config.json, and refusals."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from ondevice.bundle import Bundle
from ondevice.bundle_format.checks import InvalidFieldError
from ondevice.bundle_format.model_config import check_target
from ondevice.engines.ort import OrtEngine
from ondevice.engines.protocol import Rows, TokenTree
from ondevice.errors import CheckpointError, UsageError
from ondevice_export import export, families
from ondevice_export.checkpoint.json_fields import JsonFields
from ondevice_export.checkpoint.rope import rotary
from ondevice_export.families.family import Family
from ondevice_export.verify import verify
from tests.conftest import ROOT
from tests.fixtures.tiny_families import CONTEXT, FAMILIES, VOCAB, WINDOW, older_spelling, save_family

PROMPT = np.random.default_rng(0).integers(0, VOCAB, 3 * WINDOW + 5).tolist()


def logits_of(bundle: Path, prompt: list[int] = PROMPT, ends: Iterable[int] = (20, 21)) -> np.ndarray:
    """Logits at every position of a prompt, whose chunks end at these; with a single row and a chunk after a first."""
    engine = OrtEngine(Bundle.open(bundle), threads=1)
    session, found, start = engine.open_session(), [], 0
    for stop in (*ends, len(prompt)):
        count = stop - start
        [outputs] = engine.forward([Rows(session, TokenTree.chain(prompt[start:stop]), range(count))])
        session.commit(range(count))
        found.append(outputs.logits.copy())
        start = stop
    engine.close()
    return np.concatenate(found)


@pytest.mark.parametrize("name", FAMILIES)
def test_float32_equals_transformers(name: str, tmp_path: Path) -> None:
    model = save_family(tmp_path / "model", name, older=True)
    with torch.no_grad():
        expected = model(torch.tensor([PROMPT])).logits[0].numpy()
    found = logits_of(export(tmp_path / "model", tmp_path / "bundle", quantize="none"))
    np.testing.assert_allclose(found, expected, atol=1e-4)


@pytest.mark.parametrize("top", [5, 6])
@pytest.mark.parametrize("name", ["qwen3-moe", "qwen3.5-moe", "gpt-oss", "olmoe"])
def test_any_number_of_experts_leaves_a_row_alike(name: str, top: int, tmp_path: Path) -> None:
    """ONNX Runtime sums rows of 5 or 6 numbers in an order that depends on their addresses, so that a row among others
    would differ from the same row alone.
    """
    save_family(tmp_path / "model", name)
    change_config(tmp_path / "model", num_experts_per_tok=top)
    bundle = export(tmp_path / "model", tmp_path / "bundle", quantize="none")
    alone = logits_of(bundle, PROMPT[:40], range(1, 40))
    np.testing.assert_array_equal(logits_of(bundle, PROMPT[:40]), alone)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("text", ["Ministral3", "Mistral"])
def test_the_text_model_of_a_multimodal_mistral(text: str, tied: bool, tmp_path: Path) -> None:
    fields: dict[str, Any] = {"vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 96, "head_dim": 32}
    fields |= {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2, "sliding_window": None}
    fields["tie_word_embeddings"] = tied
    vision = transformers.PixtralVisionConfig(
        hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, image_size=28, head_dim=8
    )
    own = getattr(transformers, f"{text}Config")(**fields, max_position_embeddings=CONTEXT)
    config = transformers.Mistral3Config(text_config=own, vision_config=vision, tie_word_embeddings=tied)
    model = transformers.Mistral3ForConditionalGeneration(config).eval()
    model.save_pretrained(tmp_path / "model")
    with torch.no_grad():
        expected = model(input_ids=torch.tensor([PROMPT])).logits[0].numpy()
    bundle = export(tmp_path / "model", tmp_path / "bundle", quantize="none")
    np.testing.assert_allclose(logits_of(bundle), expected, atol=1e-4)
    assert Bundle.open(bundle).manifest.target.tied == tied


@pytest.mark.parametrize("kind", ["Qwen3_5", "Qwen3_5Moe"])
def test_the_text_model_of_a_multimodal_qwen(kind: str, tmp_path: Path) -> None:
    """As published: experts are stacked, which transformers saves one by one, and tensors that draft are not read."""
    from safetensors.numpy import load_file, save_file

    _, own = FAMILIES["qwen3.5" if kind == "Qwen3_5" else "qwen3.5-moe"]
    fields: dict[str, Any] = {"vocab_size": VOCAB, "hidden_size": 64, "head_dim": 32, "num_attention_heads": 4, **own}
    if kind == "Qwen3_5":
        fields["intermediate_size"] = 96
    text = getattr(transformers, f"{kind}TextConfig")(**fields, max_position_embeddings=CONTEXT)
    vision = getattr(transformers, f"{kind}VisionConfig")(
        depth=1, hidden_size=16, intermediate_size=16, num_heads=2, out_hidden_size=64, num_position_embeddings=16
    )
    config = getattr(transformers, f"{kind}Config")(text_config=text, vision_config=vision)
    torch.manual_seed(0)
    model = getattr(transformers, f"{kind}ForConditionalGeneration")(config).eval()
    with torch.no_grad():
        for name, value in model.named_parameters():
            if value.ndim > 1:
                value.normal_(0.0, 0.5 if name.endswith("mlp.gate.weight") else 0.1)
        expected = model(input_ids=torch.tensor([PROMPT])).logits[0].numpy()
    model.save_pretrained(tmp_path / "model")
    weights, tensors = tmp_path / "model" / "model.safetensors", {"mtp.fc.weight": np.zeros((64, 128), np.float32)}
    saved = {name for name in load_file(weights) if ".experts." not in name}
    tensors |= {name: value.numpy() for name, value in model.state_dict().items()}
    stacks = tensors.keys() - saved - {"mtp.fc.weight"}
    assert len(stacks) == (8 if kind == "Qwen3_5Moe" else 0)
    assert all(name.startswith("model.language_model.layers.") and ".mlp.experts." in name for name in stacks)
    save_file(tensors, weights, {"format": "pt"})
    bundle = export(tmp_path / "model", tmp_path / "bundle", quantize="none", drafter="none")
    np.testing.assert_allclose(logits_of(bundle), expected, atol=1e-4)


def test_a_text_ends_where_ministral_3_scales_its_queries(tmp_path: Path) -> None:
    save_family(tmp_path, "ministral3")
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["rope_parameters"]["llama_4_scaling_beta"] == 0.1
    assert families.read_target(config, "config.json").target.context_length == 128 < CONTEXT


def loaded_logits(directory: Path) -> np.ndarray:
    """The logits of a saved checkpoint as transformers loads it."""
    with torch.no_grad():
        logits = AutoModelForCausalLM.from_pretrained(directory)(torch.tensor([PROMPT])).logits[0]
    return np.asarray(logits.numpy())


def test_a_head_that_differs_from_the_embedding_is_not_tied(tmp_path: Path) -> None:
    save_family(tmp_path / "model", "llama2")
    change_config(tmp_path / "model", tie_word_embeddings=True)
    notes: list[str] = []
    bundle = export(tmp_path / "model", tmp_path / "bundle", quantize="none", note=notes.append)
    np.testing.assert_allclose(logits_of(bundle), loaded_logits(tmp_path / "model"), atol=1e-4)
    assert "lm_head.weight differs from the token embedding" in "".join(notes)


@pytest.mark.parametrize("kept", ["lm_head.weight", "both"])
def test_a_tied_embedding_may_be_saved_as_the_head(kept: str, tmp_path: Path) -> None:
    from safetensors.numpy import load_file, save_file

    save_family(tmp_path / "model", "smollm2")
    expected = export(tmp_path / "model", tmp_path / "expected", quantize="none")
    weights = tmp_path / "model" / "model.safetensors"
    tensors = load_file(weights)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].copy()
    if kept != "both":
        del tensors["model.embed_tokens.weight"]
    save_file(tensors, weights, {"format": "pt"})
    bundle = export(tmp_path / "model", tmp_path / "bundle", quantize="none")
    np.testing.assert_array_equal(logits_of(bundle), logits_of(expected))
    np.testing.assert_allclose(logits_of(bundle), loaded_logits(tmp_path / "model"), atol=1e-4)
    assert Bundle.open(bundle).manifest.target.tied


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("mistral", {"use_sliding_window": False}),
        ("mistral", {"max_window_layers": 2}),
        ("mistral", {"sliding_window_pattern": 2}),
        ("mistral", {"rope_local_base_freq": 500.0}),
        ("llama2", {"use_sliding_window": True, "sliding_window": WINDOW}),
        ("llama2", {"hidden_activation": "gelu_pytorch_tanh", "final_logit_softcapping": 2.0}),
        ("qwen3", {"no_rope_layer_interval": 2}),
        ("qwen3", {"no_rope_layers": [1, 0, 1]}),
    ],
)
def test_fields_that_a_class_does_not_have_change_nothing(name: str, fields: dict[str, Any], tmp_path: Path) -> None:
    save_family(tmp_path, name)
    before, logits = json.loads((tmp_path / "config.json").read_text()), loaded_logits(tmp_path)
    change_config(tmp_path, **fields)
    after = json.loads((tmp_path / "config.json").read_text())
    assert families.read_target(after, "after").target == families.read_target(before, "before").target
    np.testing.assert_array_equal(loaded_logits(tmp_path), logits)


def test_windows_of_smollm3_are_in_layers_without_rotation(tmp_path: Path) -> None:
    save_family(tmp_path / "model", "smollm3")
    own = {"use_sliding_window": True, "sliding_window": WINDOW, "layer_types": None, "no_rope_layers": [1, 1, 0, 1, 0]}
    change_config(tmp_path / "model", **own)
    bundle = export(tmp_path / "model", tmp_path / "bundle", quantize="none")
    np.testing.assert_allclose(logits_of(bundle), loaded_logits(tmp_path / "model"), atol=1e-4)
    target = Bundle.open(bundle).manifest.target
    assert [own.window for own in target.attention] == [None, None, WINDOW, None]


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("gemma2", {"sliding_window_pattern": 3}),
        ("gemma3-multimodal", {}),
        ("gpt-oss", {"sliding_window_pattern": 3}),
        ("olmo3", {"sliding_window_pattern": 2}),
        ("exaone4", {"sliding_window_pattern": 3}),
        ("qwen2", {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 4}),
        ("qwen3", {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 4}),
        ("qwen2-moe", {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 4}),
    ],
)
def test_windows_of_layers_that_are_not_listed(name: str, fields: dict[str, Any], tmp_path: Path) -> None:
    save_family(tmp_path, name)
    config = json.loads((tmp_path / "config.json").read_text())
    config.get("text_config", config).update(layer_types=None, num_hidden_layers=7, **fields)
    own = {key: value for key, value in config.get("text_config", config).items() if key != "layer_types"}
    expected = AutoConfig.for_model(**own).layer_types
    found = families.read_target(config, "config.json").target
    kinds = [layer.mixer.window for layer in found.layers]
    assert kinds == [found_window(kinds) if kind == "sliding_attention" else None for kind in expected]
    assert any(kinds)


def found_window(windows: Sequence[int | None]) -> int:
    """The one window that layers have."""
    [window] = {each for each in windows if each is not None}
    return window


def change_config(directory: Path, **fields: Any) -> None:
    """Set fields of a `config.json`."""
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | fields))


@pytest.mark.parametrize("name", ["smollm2", "gemma3-multimodal", "qwen2"])
def test_a_bundle_is_verified_against_its_original(name: str, tmp_path: Path) -> None:
    save_family(tmp_path / "model", name)
    bundle = export(tmp_path / "model", tmp_path / "bundle", quantize="none")
    found = verify(bundle, tmp_path / "model", None, [PROMPT], threads=1)
    assert found.passes
    assert found.largest_logit_error < 1e-4
    assert found.drafts == 0


@pytest.mark.parametrize("name", FAMILIES)
def test_both_spellings_are_one_decoder(name: str, tmp_path: Path) -> None:
    save_family(tmp_path / "model", name)
    newer = json.loads((tmp_path / "model" / "config.json").read_text())
    older = older_spelling(json.loads(json.dumps(newer)))
    assert older.get("text_config", older)["rope_theta"]
    assert families.read_target(newer, "newer").target == families.read_target(older, "older").target


@pytest.mark.parametrize("kind", [None, "rope", "absolute"])
def test_granite_3_rotates_whatever_a_field_of_granite_4_says(kind: str | None, tmp_path: Path) -> None:
    """transformers has no such field in its class."""
    save_family(tmp_path, "granite")
    config = json.loads((tmp_path / "config.json").read_text())
    expected = families.read_target(config, "config.json").target
    assert families.read_target({**config, "position_embedding_type": kind}, "config.json").target == expected
    assert expected.attention[0].rotary == 0


def test_layers_of_exaone_4_by_a_pattern(tmp_path: Path) -> None:
    """Where layers are listed, as in the published files, the pattern may be one of letters, and is not read."""
    save_family(tmp_path, "exaone4")
    config = json.loads((tmp_path / "config.json").read_text())
    expected = families.read_target(config, "config.json").target
    assert [(own.window, own.rotary) for own in expected.attention] == [(WINDOW, 0), (WINDOW, 0), (None, None)]
    for fields in ({"layer_types": None}, {"sliding_window_pattern": "LLG"}):
        assert families.read_target({**config, **fields}, "config.json").target == expected


def test_layers_of_granite_swash_that_are_not_listed(tmp_path: Path) -> None:
    """The first of four layers has no window, and all rotate alike."""
    save_family(tmp_path, "granite-swash")
    change_config(tmp_path, layer_types=None, layer_rope_theta=None)
    target = families.read_target(json.loads((tmp_path / "config.json").read_text()), "config.json").target
    windows = [None, WINDOW, WINDOW, WINDOW]
    assert [(own.window, own.rotary) for own in target.attention] == [(window, 0) for window in windows]
    loaded = AutoConfig.from_pretrained(tmp_path)
    assert [kind == "sliding_attention" for kind in loaded.layer_types] == [window is not None for window in windows]


def test_layers_differ_as_the_configuration_says(tmp_path: Path) -> None:
    windows = {}
    for name in ("smollm2", "mistral", "mistral-full", "ministral", "gemma3", "smollm3"):
        save_family(tmp_path / name, name)
        target = families.read_target(json.loads((tmp_path / name / "config.json").read_text()), name).target
        windows[name] = [own.window for own in target.attention]
        if name == "smollm3":
            assert [own.rotary for own in target.attention] == [0, None, 0, None]
        elif name == "gemma3":
            assert [own.rotary for own in target.attention] == [0, 1, 0]
            assert {own.scale for own in target.attention} == {48**-0.5}
    assert windows["smollm2"] == windows["mistral-full"] == [None] * 3
    assert windows["mistral"] == [WINDOW] * 3
    assert windows["ministral"] == [None, WINDOW, WINDOW]
    assert windows["gemma3"] == [WINDOW, None, WINDOW]


ROPES: list[dict[str, Any]] = [
    {"rope_type": "default"},
    {"rope_type": "linear", "factor": 3.0},
    {"rope_type": "proportional", "partial_rotary_factor": 0.25, "factor": 2.0},
    {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096, "truncate": False, "beta_fast": 16},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096, "mscale": 0.7, "mscale_all_dim": 1},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096, "attention_factor": 1.5},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096, "beta_fast": 1, "beta_slow": 32},
    {
        "rope_type": "longrope",
        "short_factor": [1.0 + index / 64 for index in range(64)],
        "long_factor": [4.0] * 64,
        "original_max_position_embeddings": 4096,
    },
]


@pytest.mark.parametrize("parameters", ROPES, ids=lambda each: each["rope_type"])
def test_rotary_embeddings_are_those_of_transformers(parameters: dict[str, Any]) -> None:
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    parameters = {"rope_theta": 500_000.0, **parameters}
    found = rotary(JsonFields(parameters, "config.json"), 128, 16_384)
    if parameters["rope_type"] == "default":
        expected, factor = 1.0 / 500_000.0 ** (np.arange(0, 128, 2) / 128), 1.0
    else:
        config = LlamaConfig(
            head_dim=128, hidden_size=256, num_attention_heads=2, max_position_embeddings=16_384,
            rope_parameters=dict(parameters),
        )  # fmt: skip
        tensor, factor = ROPE_INIT_FUNCTIONS[parameters["rope_type"]](config, torch.device("cpu"))
        expected = tensor.numpy()
    np.testing.assert_allclose(found.frequencies, expected, rtol=2e-6)
    assert found.factor == pytest.approx(factor)


def test_both_spellings_of_rope_side_by_side_may_agree() -> None:
    newer = {"rope_type": "linear", "factor": 2.0, "rope_theta": 500_000.0}
    both = {"rope_parameters": newer, "rope_scaling": {"type": "linear", "factor": 2.0}}
    expected = families.read_target({**CONFIG, "rope_parameters": newer}, "config.json").target
    assert families.read_target({**CONFIG, **both}, "config.json").target == expected


def test_null_in_truncate_is_false() -> None:
    parameters = {**ROPES[4], "rope_theta": 10_000.0}
    config = {**CONFIG, "max_position_embeddings": 16_384}
    null, false, absent = (
        families.read_target({**config, "rope_parameters": {**parameters, **own}}, "config.json").target
        for own in ({"truncate": None}, {"truncate": False}, dict[str, bool]())
    )
    assert null == false != absent


def test_one_rotation_for_gemma_3_is_refused() -> None:
    """transformers takes its defaults for both kinds of layers, whatever the parameters say."""
    fields = {**CONFIG, "architectures": ["Gemma3ForCausalLM"], "num_attention_heads": 4}
    families.read_target(fields, "config.json")
    flat = {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e6}
    with pytest.raises(CheckpointError, match="rope_parameters names neither full_attention nor sliding_attention"):
        families.read_target({**fields, "rope_parameters": flat}, "config.json")


@pytest.mark.parametrize(
    ("rope_type", "absent"), [("yarn", "beta_fast"), ("yarn", "factor"), ("longrope", "attention_factor")]
)
def test_null_in_rope_parameters_is_no_value(rope_type: str, absent: str) -> None:
    [parameters, *_] = [{**each, "rope_theta": 10_000.0} for each in ROPES if each["rope_type"] == rope_type]
    if rope_type == "longrope":
        parameters |= {"short_factor": [1.5] * 16, "long_factor": [4.0] * 16}
    parameters.pop(absent, None)
    config = {**CONFIG, "max_position_embeddings": 16_384}
    expected = families.read_target({**config, "rope_parameters": parameters}, "config.json").target
    nulls = {**parameters, absent: None}
    assert families.read_target({**config, "rope_parameters": nulls}, "config.json").target == expected


@pytest.mark.parametrize("inside", [{}, {"original_max_position_embeddings": 64}])
def test_an_original_length_beside_the_parameters_counts(inside: dict[str, Any]) -> None:
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    parameters = {
        "rope_type": "llama3", "rope_theta": 10_000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        **inside,
    }  # fmt: skip
    fields = {**CONFIG, "rope_parameters": parameters, "original_max_position_embeddings": 200}
    [found] = families.read_target(fields, "config.json").target.frequencies()
    expected = ROPE_INIT_FUNCTIONS["llama3"](LlamaConfig(**json.loads(json.dumps(fields))), torch.device("cpu"))[0]
    np.testing.assert_allclose(found, expected.numpy(), rtol=2e-6)


def test_an_attention_factor_beyond_floats_is_refused() -> None:
    parameters = {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0, "attention_factor": 1e308}
    target = families.read_target({**CONFIG, "rope_parameters": parameters}, "config.json").target
    with pytest.raises(InvalidFieldError, match="scale of layer 0 of the target is inf"):
        check_target(target)


def test_a_longrope_ends_where_its_frequencies_change() -> None:
    parameters = {**ROPES[-1], "rope_theta": 10_000.0, "short_factor": [1.0] * 16}
    config = {**CONFIG, "max_position_embeddings": 16_384, "rope_parameters": parameters}
    assert families.read_target(config, "config.json").target.context_length == 4096


def test_a_longer_context_has_the_frequencies_of_long_texts(tmp_path: Path) -> None:
    """transformers has them for the whole of a text that is longer than the original length."""
    model, notes = save_family(tmp_path / "model", "phi4-mini", older=True), list[str]()
    prompt = np.random.default_rng(1).integers(0, VOCAB, 200).tolist()
    with torch.no_grad():
        expected = model(torch.tensor([prompt])).logits[0].numpy()
    bundle = export(tmp_path / "model", tmp_path / "bundle", quantize="none", context=200, note=notes.append)
    np.testing.assert_allclose(logits_of(bundle, prompt), expected, atol=1e-4)
    assert Bundle.open(bundle).manifest.target.context_length == 200
    assert not any("--context" in line for line in notes)
    found = verify(bundle, tmp_path / "model", None, [PROMPT], threads=1)
    assert found.largest_logit_error < 1e-4


def test_an_export_without_longer_texts_names_the_option(tmp_path: Path) -> None:
    notes: list[str] = []
    for name in ("phi4-mini", "ministral3", "llama3"):
        save_family(tmp_path / name, name)
        export(tmp_path / name, tmp_path / "bundle", note=notes.append)
    [note] = [line for line in notes if "--context" in line]
    assert note.startswith("texts end at 128 tokens, where the model changes its frequencies: --context N, up to 256,")


@pytest.mark.parametrize(
    ("name", "asked", "context", "long"),
    [
        ("phi4-mini", None, 128, False),
        ("phi4-mini", 100, 100, False),
        ("phi4-mini", 128, 128, False),
        ("phi4-mini", 129, 129, True),
        ("phi4-mini", CONTEXT, CONTEXT, True),
        ("phi4-mini", 1 << 20, CONTEXT, True),
        ("ministral3", 100, 100, False),
        ("ministral3", CONTEXT, 128, False),
        ("mistral-full", 32, 32, False),
        ("llama3", 32, 32, False),
        ("mistral", WINDOW // 2, WINDOW // 2, False),
    ],
)
def test_a_context_that_is_asked_for(name: str, asked: int | None, context: int, long: bool, tmp_path: Path) -> None:
    """The frequencies are those of the model, or of its long texts; the window is not longer than a text."""
    save_family(tmp_path, name)
    config = json.loads((tmp_path / "config.json").read_text())
    given, found = (families.read_target(config, name, each).target for each in (None, asked))
    assert found.context_length == context
    assert (found.rotary != given.rotary) == long
    assert [own.scale for own in found.attention] == [own.scale for own in given.attention]
    assert {own.window for own in found.attention} <= {None, min(WINDOW, context)}
    check_target(found)


@pytest.mark.parametrize(
    ("name", "context", "words"),
    [
        ("phi4-mini", CONTEXT + 1, "--context is 257: texts of this model end at 256 tokens in a bundle, and"),
        ("ministral3", 129, "--context is 129: texts of this model end at 128 tokens in a bundle, and"),
        ("smollm2", CONTEXT + 1, "--context is 257: texts of this model end at 256 tokens"),
        ("smollm2", 1, "context must be a whole number of at least 2, not 1"),
        ("smollm2", 2.5, "context must be a whole number of at least 2, not 2.5"),
    ],
)
def test_a_context_that_no_bundle_has(name: str, context: Any, words: str, tmp_path: Path) -> None:
    save_family(tmp_path / "model", name)
    with pytest.raises(UsageError, match=words):
        export(tmp_path / "model", tmp_path / "bundle", context=context)
    assert not (tmp_path / "bundle").exists()


def test_a_longrope_without_divisors_of_long_texts() -> None:
    parameters = {**ROPES[-1], "rope_theta": 10_000.0, "short_factor": [1.0] * 16}
    config = {**CONFIG, "max_position_embeddings": 16_384, "rope_parameters": parameters}
    with pytest.raises(CheckpointError, match="long_factor is not a list of 16"):
        families.read_target(config, "config.json", 8192)


def test_texts_shorter_than_the_prompts_are_verified(tmp_path: Path) -> None:
    save_family(tmp_path / "model", "mistral")
    bundle = export(tmp_path / "model", tmp_path / "bundle", quantize="none", context=24)
    found = verify(bundle, tmp_path / "model", None, [PROMPT], threads=1)
    assert found.largest_logit_error < 1e-4
    assert found.quality.tokens == 23


CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": VOCAB,
    "hidden_size": 96,
    "intermediate_size": 160,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
}


def test_a_small_configuration_takes_the_defaults_of_its_class() -> None:
    target = families.read_target(CONFIG, "config.json").target
    own = target.attention[0]
    assert (own.heads, own.kv_heads, own.head_dim, own.scale, target.tied) == (3, 3, 32, 32**-0.5, False)
    assert target.context_length == LlamaConfig().max_position_embeddings
    assert target.norm_eps == LlamaConfig().rms_norm_eps


_QWEN_3_5 = {"architectures": ["Qwen3_5ForCausalLM"], "num_hidden_layers": 4, "head_dim": 32, "num_key_value_heads": 3}
_QWEN_3_5_MOE = {**_QWEN_3_5, "architectures": ["Qwen3_5MoeForCausalLM"]}
_QWEN_3_NEXT = {**_QWEN_3_5, "architectures": ["Qwen3NextForCausalLM"]}
_YARN = {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0, "original_max_position_embeddings": 64}
_LFM2 = {"architectures": ["Lfm2ForCausalLM"], "num_key_value_heads": 3}
_OLMO_3 = {"architectures": ["Olmo3ForCausalLM"]}
_SWASH = {"architectures": ["GraniteMoeSWAForCausalLM"], "sliding_window": 16}
_LFM2_MOE = {**_LFM2, "architectures": ["Lfm2MoeForCausalLM"], "num_dense_layers": 0}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            {"architectures": ["Gemma3nForConditionalGeneration"]},
            "architecture 'Gemma3nForConditionalGeneration' is not",
        ),
        ({"architectures": ["Gemma4AssistantForCausalLM"]}, "this is a drafter, pass it with --drafter"),
        ({"architectures": ["DbrxForCausalLM"]}, "supported: Gemma4"),
        ({"attention_bias": True}, "attention_bias is not supported"),
        ({"mlp_bias": True}, "mlp_bias is not supported"),
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping is not supported"),
        ({"use_bidirectional_attention": True}, "bidirectional attention"),
        ({"hidden_act": "relu2"}, "activation 'relu2' is not supported"),
        ({"hidden_act": ["silu"]}, r"activation \['silu'\] is not supported"),
        ({"head_dim": (1 << 31) - 1}, "a head of 2147483647 numbers is not supported"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_type 'dynamic' is not supported"),
        ({"rope_scaling": {"type": "linear"}}, "factor is missing"),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0}, "rope_theta": 1.0}, "yarn cannot be computed: .*zero"),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0, "beta_fast": 1e308}}, "yarn cannot be computed: .*domain"),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0, "beta_fast": 5e-324}}, "yarn cannot be computed: .*infinity"),
        ({"per_layer_config": {"1": {"intermediate_size": 64}}}, "1: 'intermediate_size' of one layer is not"),
        (
            {
                "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
                "rope_scaling": {"type": "linear", "factor": 2},
            },
            "rope_scaling differs from rope_parameters",
        ),
        ({"rope_scaling": {"rope_type": "longrope", "short_factor": [1.0]}}, "short_factor is not a list of 16"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5 is not supported"),
        ({"num_attention_heads": 4, "num_key_value_heads": 3}, "4 query heads cannot share 3 KV heads"),
        ({"head_dim": 33}, "a head of 33 numbers"),
        ({"num_attention_heads": 1 << 30, "head_dim": 32}, "num_attention_heads is 1073741824, expected"),
        ({"architectures": ["Phi3ForCausalLM"], "max_position_embeddings": None}, "max_position_embeddings is missing"),
        ({"architectures": ["Phi3ForCausalLM"], "partial_rotary_factor": 0.6}, "0.6 turns 19 numbers of a head, which"),
        ({"architectures": ["Qwen2MoeForCausalLM"], "mlp_only_layers": [1]}, "layers without experts are not"),
        ({"architectures": ["Qwen2MoeForCausalLM"], "decoder_sparse_step": 2}, "layers without experts are not"),
        ({"architectures": ["OlmoeForCausalLM"], "clip_qkv": 8.0}, "clip_qkv is not supported"),
        ({**_LFM2, "layer_types": ["conv"] * 2}, "no layer has attention"),
        ({**_LFM2, "full_attn_idxs": 1}, "full_attn_idxs is 1, expected numbers of layers"),
        ({**_LFM2, "layer_types": ["conv", "mamba"]}, "layer_types does not name 2"),
        ({**_LFM2, "layer_types": ["sliding_attention", "conv"]}, "does not name 2 layers of full_attention or conv"),
        ({"layer_types": ["conv", "full_attention"]}, "layer_types does not name 2"),
        ({**_LFM2, "full_attn_idxs": [0], "conv_bias": True}, "conv_bias is true: biases of convolutions are not"),
        ({**_LFM2, "full_attn_idxs": [0], "conv_L_cache": 17}, "conv_L_cache is 17, expected"),
        ({**_LFM2, "block_ffn_dim_multiplier": 1e308}, r"block_ffn_dim_multiplier is 1e\+308, expected"),
        ({**_LFM2, "norm_eps": None}, "rms_norm_eps is missing"),
        ({**_LFM2, "intermediate_size": None}, "intermediate_size is missing"),
        ({**_LFM2_MOE, "norm_topk_prob": None}, "norm_topk_prob is None, which is not supported"),
        ({**_LFM2_MOE, "norm_topk_prob": False}, "norm_topk_prob is False, which is not supported"),
        ({**_LFM2_MOE, "routed_scaling_factor": 2.5}, r"routed_scaling_factor is 2\.5, which is not supported"),
        ({"architectures": ["Glm4ForCausalLM"], "partial_rotary_factor": 0.6, "head_dim": 32}, "0.6 turns 19 numbers"),
        ({"architectures": ["Glm4ForCausalLM"], "mlp_bias": True}, "mlp_bias is not supported"),
        ({"architectures": ["SeedOssForCausalLM"], "mlp_bias": True}, "mlp_bias is not supported"),
        ({"architectures": ["Ernie4_5ForCausalLM"], "use_bias": True}, "use_bias is true: biases of all projections"),
        ({"architectures": ["Ernie4_5ForCausalLM"], "partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5 is not"),
        ({"architectures": ["Exaone4ForCausalLM"], "sliding_window_pattern": "LLLG"}, "pattern is 'LLLG', expected a"),
        ({**_SWASH, "layer_rope_theta": [10_000.0]}, "layer_rope_theta has not one number for each layer"),
        ({**_SWASH, "layer_rope_theta": [10_000.0, -1.0]}, "rope_theta is -1.0, expected a positive number"),
        ({**_SWASH, "shared_intermediate_size": 64}, "shared_intermediate_size is not 0: experts beside a dense block"),
        (
            {"architectures": ["HyperCLOVAXForCausalLM"], "logits_scaling": None},
            r"embed_tokens\.weight: it holds no text",
        ),
        ({**_LFM2, "full_attn_idxs": [0], "tie_word_embeddings": None}, r"embed_tokens\.weight: it holds no text"),
        ({"vocab_size": None}, "vocab_size is missing"),
        ({"layer_types": ["linear_attention"] * 2}, "layer_types does not name 2"),
        ({**_QWEN_3_5, "linear_num_value_heads": 24}, "24 value heads cannot share 16 key heads"),
        ({**_QWEN_3_5, "linear_conv_kernel_dim": 17}, "linear_conv_kernel_dim is 17, expected"),
        ({**_QWEN_3_5, "layer_types": ["sliding_attention"] * 4}, "4 layers of full_attention or linear_attention"),
        ({**_QWEN_3_5, "full_attention_interval": 5}, "no layer has attention"),
        ({**_QWEN_3_5, "rope_parameters": _YARN}, "a factor of cosines beside norms of queries is not supported"),
        ({**_QWEN_3_5_MOE, "num_experts": 1025}, "num_experts is 1025, expected"),
        ({**_QWEN_3_5_MOE, "num_experts": 4, "num_experts_per_tok": 5}, "num_experts_per_tok is 5, expected"),
        ({**_QWEN_3_5_MOE, "shared_expert_intermediate_size": 0}, "shared_expert_intermediate_size is 0, expected"),
        (
            {**_QWEN_3_NEXT, "linear_num_key_heads": 1 << 30, "linear_num_value_heads": 1 << 30},
            "is 1073741824, expected",
        ),
        ({**_QWEN_3_NEXT, "norm_topk_prob": False}, "norm_topk_prob is False, which is not supported"),
        ({**_QWEN_3_NEXT, "decoder_sparse_step": 2}, "decoder_sparse_step is 2, which is not supported"),
        ({**_QWEN_3_NEXT, "mlp_only_layers": [1]}, r"mlp_only_layers is \[1\], which is not supported"),
        ({"layer_types": ["sliding_attention"] * 2}, "sliding_window is missing"),
        ({"no_rope_layers": [1]}, "no_rope_layers has not one number for each layer"),
        ({"quantization_config": {"quant_method": "fp8"}}, "weights quantised by 'fp8' are not supported"),
        ({**_OLMO_3, "rope_theta": None, "rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_theta is None"),
    ],
)
def test_what_is_not_supported_is_named(change: dict[str, Any], words: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**CONFIG, **change}))
    (tmp_path / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    with pytest.raises(CheckpointError, match=words) as caught:
        export(tmp_path, tmp_path.parent / "bundle")
    assert "\n" not in str(caught.value)
    assert "text_config" not in str(caught.value)  # the fields are at the top


def test_the_number_of_experts_in_both_spellings() -> None:
    """The newer one is null in a file of the older."""
    moe = {"architectures": ["Qwen3MoeForCausalLM"], "norm_topk_prob": True, "num_key_value_heads": 3}
    older = {**CONFIG, **moe, "num_experts": 16}
    for config in (older, {**older, "num_local_experts": None}, {**CONFIG, **moe, "num_local_experts": 16}):
        experts = families.read_target(config, "config.json").target.layers[0].feed_forward.experts
        assert experts is not None
        assert experts.count == 16


def test_a_joined_matrix_in_a_checkpoint_that_was_trained_quantised(tmp_path: Path) -> None:
    save_family(tmp_path / "model", "phi4-mini")
    change_config(tmp_path / "model", quantization_config={"quant_method": "gemma"})
    with pytest.raises(CheckpointError, match="weight lies in several pieces, which is not supported here"):
        export(tmp_path / "model", tmp_path / "bundle")


def test_rows_that_fill_no_group_are_exported_without_quantisation(tmp_path: Path) -> None:
    """As those of a feed-forward block of stories260K, with 172 numbers."""
    sizes = {"vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 172, "max_position_embeddings": CONTEXT}
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=2, num_attention_heads=8, num_key_value_heads=4))
    model.save_pretrained(tmp_path / "model")
    with pytest.raises(CheckpointError, match=r"rows of 172 weights, .* a multiple of 32: add --quantize none"):
        export(tmp_path / "model", tmp_path / "bundle")
    found = logits_of(export(tmp_path / "model", tmp_path / "bundle", quantize="none"))
    np.testing.assert_allclose(found, loaded_logits(tmp_path / "model"), atol=1e-4)


def test_a_tensor_that_no_layer_reads_is_refused(tmp_path: Path) -> None:
    """Qwen2's biases in a checkpoint that says it is a Llama would be left out otherwise."""
    save_family(tmp_path / "model", "qwen2")
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    (tmp_path / "model" / "config.json").write_text(json.dumps({**config, "architectures": ["LlamaForCausalLM"]}))
    with pytest.raises(CheckpointError, match=r"_proj\.bias has no place"):
        export(tmp_path / "model", tmp_path / "bundle")


def test_norms_that_have_their_offset_already(tmp_path: Path) -> None:
    """GGUF files store 1 + w; their configuration says so."""
    from safetensors.numpy import load_file, save_file

    save_family(tmp_path / "model", "gemma3")
    expected = logits_of(export(tmp_path / "model", tmp_path / "before", quantize="none"))
    weights = tmp_path / "model" / "model.safetensors"
    tensors = {name: value + ("norm" in name) for name, value in load_file(weights).items()}
    save_file({name: value.astype(np.float32) for name, value in tensors.items()}, weights)
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    (tmp_path / "model" / "config.json").write_text(json.dumps({**config, "norm_offset": 0}))
    np.testing.assert_array_equal(logits_of(export(tmp_path / "model", tmp_path / "after", quantize="none")), expected)


def family_of_the_page() -> tuple[Family, ...]:
    """The families of the file that CONTRIBUTING.md shows."""
    page = (ROOT / "CONTRIBUTING.md").read_text("utf-8")
    [source] = [
        block for block in re.findall(r"^```python\n(.*?)^```", page, re.DOTALL | re.MULTILINE) if "Family(" in block
    ]
    scope: dict[str, Any] = {}
    exec(compile(source, "CONTRIBUTING.md", "exec"), scope)
    found: tuple[Family, ...] = scope["FAMILIES"]
    return found


class OlmLayer(torch.nn.Module):
    """`transformers`' Llama layer with another order of norms."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.self_attn, self.mlp = layer.self_attn, layer.mlp
        self.attn_out_norm, self.ffn_norm = layer.input_layernorm, layer.post_attention_layernorm

    def forward(self, hidden: torch.Tensor, **options: Any) -> torch.Tensor:
        hidden = hidden + self.attn_out_norm(self.self_attn(hidden_states=hidden, **options)[0])
        return hidden + self.mlp(self.ffn_norm(hidden))


def test_the_family_that_the_page_adds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fields = {
        **{name: value for name, value in CONFIG.items() if name != "architectures"},
        "max_position_embeddings": CONTEXT,
        "hidden_act": "gelu_pytorch_tanh",
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 5_000.0},
    }
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**fields)).eval()
    model.model.layers = torch.nn.ModuleList([OlmLayer(layer) for layer in model.model.layers])
    with torch.no_grad():
        for value in model.parameters():
            value.uniform_(0.5, 1.5) if value.dim() == 1 else value.normal_(0.0, 0.1)
        expected = model(torch.tensor([PROMPT]), use_cache=False).logits[0].numpy()
    model.save_pretrained(tmp_path / "model")
    own = {name: value for name, value in fields.items() if name not in ("hidden_act", "rope_parameters")}
    (tmp_path / "model" / "config.json").write_text(json.dumps({"architectures": ["OlmForCausalLM"], **own}))
    with pytest.raises(CheckpointError, match="'OlmForCausalLM' is not supported"):
        export(tmp_path / "model", tmp_path / "bundle", quantize="none")
    monkeypatch.setattr(families, "FAMILIES", (*families.FAMILIES, *family_of_the_page()))
    found = logits_of(export(tmp_path / "model", tmp_path / "bundle", quantize="none"))
    np.testing.assert_allclose(found, expected, atol=1e-4)


_KINDS = {
    "gemma3": "gemma3_text",
    "seed-oss": "seed_oss",
    "ernie4.5": "ernie4_5",
    "qwen2-moe": "qwen2_moe",
    "qwen3.5": "qwen3_5_text",
    "qwen3.5-moe": "qwen3_5_moe_text",
    "qwen3-next": "qwen3_next",
    "granite-moe": "granitemoe",
    "granite-swash": "granite_swa",
    "granite-swash-moe": "granitemoe_swa",
}
"""Names of configurations in transformers, where they are not those of the family."""


@pytest.mark.parametrize(
    "name",
    [
        "llama",
        "mistral",
        "smollm3",
        "qwen2",
        "qwen2-moe",
        "mixtral",
        "olmoe",
        "qwen3",
        "qwen3.5",
        "qwen3.5-moe",
        "qwen3-next",
        "gemma2",
        "gemma3",
        "exaone4",
        "olmo2",
        "olmo3",
        "seed-oss",
        "glm",
        "glm4",
        "ernie4.5",
        "granite",
        "granite-moe",
        "granite-swash",
        "granite-swash-moe",
        "gemma",
        "helium",
    ],
)
def test_defaults_are_those_of_transformers(name: str) -> None:
    """Values of the fields that a config.json may leave out. A window that is off has no size there; bases of layers
    are made of the one of all.
    """
    [family] = [family for family in families.FAMILIES if family.name == name]
    config, derived = AutoConfig.for_model(_KINDS.get(name, name)), ("sliding_window", "layer_rope_theta")
    compared = [field for field in family.defaults if hasattr(config, field) and field not in derived]
    assert len(compared) >= 6
    assert {field: getattr(config, field) for field in compared} == {
        field: family.defaults[field] for field in compared
    }
