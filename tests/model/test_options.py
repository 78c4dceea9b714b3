"""Options of a generation, from a caller or a bundle; others are refused in one line."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ondevice
from ondevice.errors import BundleCorruptError, BundleNotFoundError, PromptError, UsageError
from ondevice.options import GenerationDefaults, GenerationKeywords, GenerationOptions
from tests.fixtures.model_made import load_toy, write_bundle

VOCAB = 300


def read(directory: Path, **fields: Any) -> GenerationDefaults:
    (directory / "generation_config.json").write_text(json.dumps(fields))
    return GenerationDefaults.read(directory / "generation_config.json", VOCAB)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, GenerationDefaults()),
        ({"temperature": 0.5, "top_k": 3}, GenerationDefaults()),  # without do_sample: greedy
        ({"do_sample": True}, GenerationDefaults(temperature=1.0)),
        ({"do_sample": True, "temperature": None}, GenerationDefaults(temperature=1.0)),
        ({"do_sample": True, "top_k": 0, "top_p": None}, GenerationDefaults(temperature=1.0, top_k=0)),
        ({"do_sample": True, "top_k": 64, "top_p": 1}, GenerationDefaults(temperature=1.0, top_k=64, top_p=1.0)),
        ({"repetition_penalty": None, "eos_token_id": None, "suppress_tokens": None}, GenerationDefaults()),
        ({"eos_token_id": 7}, GenerationDefaults(eos_token_ids=(7,))),
        (
            {"eos_token_id": [0, 299], "suppress_tokens": [5]},
            GenerationDefaults(0.0, None, None, None, 1.0, (0, 299), (5,)),
        ),
    ],
)
def test_a_generation_config_is_read_as_transformers_reads_it(
    fields: dict[str, Any], expected: GenerationDefaults, tmp_path: Path
) -> None:
    assert read(tmp_path, **fields) == expected


@pytest.mark.parametrize(
    "fields",
    [
        {"do_sample": True, "top_k": True},
        {"do_sample": True, "top_k": "64"},
        {"do_sample": True, "temperature": "hot"},
        {"do_sample": True, "temperature": -1},
        {"do_sample": True, "temperature": 10**400},
        {"do_sample": True, "top_p": [0.9]},
        {"repetition_penalty": 0},
        {"repetition_penalty": {}},
        {"eos_token_id": "1"},
        {"eos_token_id": True},
        {"eos_token_id": [1, None]},
        {"eos_token_id": float("inf")},
        {"eos_token_id": VOCAB},
        {"suppress_tokens": 5.5},
        {"suppress_tokens": "all"},
        {"suppress_tokens": [-1]},
        {"suppress_tokens": [VOCAB]},
        {"suppress_tokens": [[1]]},
        {"suppress_tokens": {"a": 1}},
    ],
    ids=str,
)
def test_a_generation_config_that_makes_no_sense(fields: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(BundleCorruptError, match=r"generation_config\.json: .*export the bundle again") as caught:
        read(tmp_path, **fields)
    assert next(name for name in fields if name != "do_sample") in str(caught.value)


@pytest.mark.parametrize("content", ["", "[1]", "5", "null", '"x"', "[" * 100_000, '{"a":' * 100_000, "\0"])
def test_a_generation_config_that_is_no_object(content: str, tmp_path: Path) -> None:
    path = tmp_path / "generation_config.json"
    path.write_text(content)
    with pytest.raises(BundleCorruptError, match="is not a JSON object") as caught:
        GenerationDefaults.read(path, VOCAB)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"stop": 5}, "stop must be a string or a list of strings, not 5"),
        ({"stop": [5]}, "a stop string must be a non-empty string, not 5"),
        ({"stop": b"x"}, "a stop string must be a non-empty string"),
        ({"stop": np.array(5)}, r"stop must be a string or a list of strings, not array\(5\)"),
        ({"image_tokens": np.array([70, 140])}, "image_tokens must be one of 70, 140, 280, 560, 1120, not array"),
        ({"logits_processors": 5}, "logits_processors must be a list of functions, not 5"),
        ({"logits_processors": [5]}, r"logits_processors must be a list of functions, not \[5\]"),
        ({"logits_processors": lambda logits, context: logits}, "logits_processors must be a list of functions"),
        ({"on_prefill": 5}, "on_prefill must be a function, not 5"),
        ({"temperature": 10**400}, "temperature must be a finite number, not 1000"),
        ({"temperature": True}, "temperature must be a number, not True"),
        ({"drafter": 5}, "drafter must be one of auto, mtp, .*grammar, none, not 5"),
        ({"drafter": object()}, "drafter must be one of"),
        ({"draft_sampling": "greedy"}, "draft_sampling must be one of coupled, ratio"),
        ({"max_new_tokens": True}, "max_new_tokens must be a whole number"),
        ({"max_new_tokens": "5"}, "max_new_tokens must be a whole number"),
        ({"copies": -1}, "copies must be a whole number from 0 to 16, not -1"),
        ({"copies": 1 << 31}, "copies must be a whole number from 0 to 16, not 2147483648"),
    ],
)
def test_options_of_the_wrong_type(options: dict[str, Any], words: str, tmp_path: Path) -> None:
    with load_toy(write_bundle(tmp_path)) as model:
        with pytest.raises(UsageError, match=words) as caught:
            model.stream("abc", **options)
        assert len(str(caught.value)) < 250
        assert len(model.generate("abc", max_new_tokens=3).token_ids) == 3


def test_none_leaves_out_what_can_be_left_out(tmp_path: Path) -> None:
    options: dict[str, Any] = {"stop": None, "logits_processors": None, "on_prefill": None}
    with load_toy(write_bundle(tmp_path)) as model:
        expected = model.generate("abc", max_new_tokens=5).token_ids
        assert model.generate("abc", max_new_tokens=5, **options).token_ids == expected


def test_numbers_and_strings_may_be_numpy_s(tmp_path: Path) -> None:
    plain: dict[str, Any] = {"max_new_tokens": 5, "top_k": 3, "top_logprobs": 2, "num_assistant_tokens": 2, "seed": 1}
    ours: dict[str, Any] = {name: np.int64(value) for name, value in plain.items()}
    ours |= {"temperature": np.float32(1.0), "stop": np.array(["x", "y"])}
    with load_toy(write_bundle(tmp_path)) as model:
        found = model.generate(np.str_("abc"), **ours)
        expected = model.generate("abc", temperature=1.0, stop=["x", "y"], **plain)
        assert (found.text, found.logprobs) == (expected.text, expected.logprobs)
        with pytest.raises(PromptError, match="token ids, nothing else"):
            model.generate([True, False])


def test_a_processor_in_transformers_order_is_an_error_and_not_another_text(tmp_path: Path) -> None:
    with load_toy(write_bundle(tmp_path)) as model:
        with pytest.raises(UsageError, match=r"it is called with \(logits, context\)"):
            model.generate("abc", max_new_tokens=5, logits_processors=[lambda ids, scores: scores])
        assert len(model.generate("abc", max_new_tokens=3).token_ids) == 3


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"threads": "2"}, "threads must be a whole number from 1 to 256, not '2'"),
        ({"threads": True}, "threads must be a whole number"),
        ({"threads": 0}, "threads must be a whole number"),
        ({"threads": 100_000}, "threads must be a whole number from 1 to 256, not 100000"),
        ({"context_length": "9"}, "context_length must be a whole number of at least 2, not '9'"),
        ({"context_length": True}, "context_length must be a whole number"),
        ({"context_length": 9.0}, "context_length must be a whole number"),
        ({"max_sequences": 0}, "max_sequences must be a whole number"),
        ({"max_sequences": 17}, "max_sequences must be a whole number from 1 to 16, not 17"),
        ({"cache_bytes": -1}, "cache_bytes must be a whole number"),
        ({"on_prepare": 5}, "on_prepare must be a function, not 5"),
        ({"drafter": 5}, "drafter must be a name or a path, not 5"),
        ({"drafter": b"mtp"}, "drafter must be a name or a path, not b'mtp'"),
        ({"engine": ["simd"]}, "engine must be one of"),
        ({"kv_cache": None}, "kv_cache must be one of"),
    ],
    ids=str,
)
def test_options_of_a_model(
    options: dict[str, Any], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ondevice.machine.processors", lambda: 2)
    with pytest.raises(UsageError, match=re.escape(words)):
        ondevice.load(write_bundle(tmp_path), **options)


def test_a_later_drafter_that_is_neither_name_nor_path(tmp_path: Path) -> None:
    drafter: Any
    with load_toy(write_bundle(tmp_path)) as model:
        for drafter in (None, 5, b"mtp", ["mtp"]):
            with pytest.raises(UsageError, match="drafter must be a name or a path, not "):
                model.draft_with(drafter)


@pytest.mark.parametrize("path", [None, 5, b"bundle", ["bundle"]])
def test_a_bundle_that_is_no_path(path: Any) -> None:
    with pytest.raises(UsageError, match=r"a path is a string or a pathlib\.Path, not "):
        ondevice.load(path)


@pytest.mark.parametrize("path", ["", "a\0b", "\udcff"])
def test_a_bundle_of_an_impossible_name(path: str) -> None:
    with pytest.raises(BundleNotFoundError):
        ondevice.load(path)


def test_keywords_and_options_have_the_same_names() -> None:
    names = {field.name for field in dataclasses.fields(GenerationOptions) if field.init}
    assert GenerationKeywords.__annotations__.keys() == names


@pytest.mark.parametrize(("name", "hint"), [("foo", "."), ("temprature", ": did you mean temperature?")])
def test_an_unknown_option_is_answered_with_a_list(tmp_path: Path, name: str, hint: str) -> None:
    with load_toy(write_bundle(tmp_path)) as model, pytest.raises(UsageError) as raised:
        model.generate("x", **{name: 1})  # type: ignore[arg-type]
    assert str(raised.value).startswith(f"unknown option '{name}'{hint} There are ")


def test_an_option_of_generations_is_none_of_prompts(tmp_path: Path) -> None:
    other: Any = {"temperature": 0.0}
    expected = r"unknown option 'temperature'.* There are tools, thinking, "
    with load_toy(write_bundle(tmp_path)) as model:
        with pytest.raises(UsageError, match=expected):
            model.encode("text", **other)
        with pytest.raises(UsageError, match=expected):
            model.save_prefix("text", tmp_path / "prefix", **other)
