"""Replies under a grammar, from real models: they have its form, and they are the plain ones whoever drafts."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest

import ondevice
from ondevice import GrammarError, Model, Reply, UsageError
from ondevice.generate.controller import FixedLength, RoundPlan
from ondevice.generate.drafters.ngram import NgramDrafter
from ondevice.generate.drafters.protocol import Drafter
from tests.fixtures.chat_bundle import write_chat_bundle
from tests.fixtures.model_made import model_over, write_bundle
from tests.fixtures.toy_engine import ToyEngine
from tests.grammar.walks import schema_format
from tests.text.conversations import CLOCK, WEATHER

PROMPT = "def person():\n    return "
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["alpha", "beta"]}, "minItems": 1, "maxItems": 3},
        "address": {
            "type": "object",
            "properties": {
                "street": {"type": "string", "maxLength": 8},
                "zip": {"pattern": "^[0-9]{5}$", "type": "string"},
            },
            "required": ["street", "zip"],
            "additionalProperties": False,
        },
    },
    "required": ["name", "age", "tags", "address"],
    "additionalProperties": False,
}
FORMATS: dict[str, dict[str, Any]] = {
    "schema": schema_format(SCHEMA),
    "object": {"type": "json_object"},
    "regex": {"type": "regex", "regex": r"(\d{1,3}\.){3}\d{1,3} (up|down)"},
    "choice": {"type": "choice", "choice": ["positive", "negative", "neither of the two"]},
    "lark": {"type": "lark", "lark": 'start: "SELECT " name ("," name){0,4} " FROM " name ";"\nname: /[a-z_]{1,9}/'},
}
DRAFTERS = ("mtp", "ngram", "medusa", "blockwise", "grammar", "auto")
ASKED: list[dict[str, Any]] = [{"role": "user", "content": "Will it rain in Bern?"}]


def check(name: str, text: str) -> None:
    if name in ("schema", "object"):
        jsonschema.validate(json.loads(text), SCHEMA if name == "schema" else {"type": "object"})
    elif name == "choice":
        assert text in FORMATS["choice"]["choice"]
    else:
        pattern = {"regex": FORMATS["regex"].get("regex", ""), "lark": r"SELECT [a-z_]+(,[a-z_]+)* FROM [a-z_]+;"}[name]
        assert re.fullmatch(pattern, text)


@pytest.fixture(scope="module")
def plain(reference_model: Model) -> dict[tuple[str, float], Reply]:
    return {
        (name, temperature): generate(reference_model, name, temperature, drafter="none")
        for name in FORMATS
        for temperature in (0.0, 1.0)
    }


def generate(model: Model, name: str, temperature: float, **options: Any) -> Reply:
    options = {"max_new_tokens": 90, "temperature": temperature, "seed": 7, **options}
    return model.generate(PROMPT, response_format=FORMATS[name], **options)


@pytest.mark.parametrize("name", FORMATS)
def test_a_reply_has_its_form(plain: dict[tuple[str, float], Reply], name: str) -> None:
    for temperature in (0.0, 1.0):
        reply = plain[name, temperature]
        if name != "object" or reply.finish_reason == "stop":  # this model need not find an end of an object
            assert reply.finish_reason == "stop"
            check(name, reply.text)


@pytest.mark.parametrize("schedule", ["constant", "auto"])
@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("temperature", [0.0, 1.0], ids=["greedy", "seeded"])
def test_drafts_change_nothing(
    reference_model: Model, plain: dict[tuple[str, float], Reply], temperature: float, drafter: str, schedule: Any
) -> None:
    for name in FORMATS:
        reply = generate(reference_model, name, temperature, drafter=drafter, num_assistant_tokens_schedule=schedule)
        assert reply.token_ids == plain[name, temperature].token_ids, name
        assert (reply.text, reply.finish_reason) == (
            plain[name, temperature].text,
            plain[name, temperature].finish_reason,
        )
        found = reply.stats.by_source.get("grammar")
        if found is not None:
            assert found.num_accepted_tokens == found.num_draft_tokens, "what is forced is always taken"


def test_what_is_forced_costs_no_forward(reference_model: Model, plain: dict[tuple[str, float], Reply]) -> None:
    options: dict[str, Any] = {"num_assistant_tokens_schedule": "constant", "num_assistant_tokens": 6}
    for temperature in (0.0, 1.0):
        reply = generate(reference_model, "schema", temperature, drafter="grammar", **options)
        assert reply.stats.target_forwards < 0.6 * plain["schema", temperature].stats.target_forwards


@pytest.mark.parametrize("tokens", range(1, 9))
def test_fewer_tokens_are_drafted_than_were_forecast(
    reference_model: Model, monkeypatch: pytest.MonkeyPatch, tokens: int
) -> None:
    """As on a busy machine: the length of a draft follows from measured times. A grammar must find back from there."""
    plan = FixedLength.plan

    def forecasting(self: FixedLength, drafters: Sequence[Drafter], limit: int, other_rows: int = 0) -> RoundPlan:
        drafters[0].forecast(limit)
        return plan(self, drafters, limit, other_rows)

    monkeypatch.setattr(FixedLength, "plan", forecasting)
    assert reference_model.tokenizer is not None
    said = reference_model.tokenizer.encode("é \U0001f600 after it")
    form = {"type": "lark", "lark": "start: <[" + "]> <[".join(map(str, said)) + "]>"}
    options: dict[str, Any] = {"num_assistant_tokens_schedule": "constant", "num_assistant_tokens": tokens}
    reply = reference_model.generate(PROMPT, response_format=form, drafter="grammar", **options)
    assert list(reply.token_ids) == said


def test_a_reply_that_is_cut_off_came_as_far_as_it_did(
    reference_model: Model, plain: dict[tuple[str, float], Reply]
) -> None:
    whole = plain["schema", 1.0]
    for most in (1, 2, 3, 5, 8, 13, 21, 34):
        reply = generate(reference_model, "schema", 1.0, max_new_tokens=most, num_assistant_tokens_schedule="heuristic")
        assert reply.token_ids == whole.token_ids[:most]
        assert reply.finish_reason == "length"
        assert whole.text.startswith(reply.text.rstrip("\N{REPLACEMENT CHARACTER}"))


def test_grammars_beside_each_other_and_none_change_nothing(
    reference_model: Model, plain: dict[tuple[str, float], Reply]
) -> None:
    free = reference_model.generate(PROMPT, max_new_tokens=40, temperature=0.0, drafter="none")
    for _ in range(2):
        with ThreadPoolExecutor(4) as pool:
            replies = {
                (name, temperature): pool.submit(generate, reference_model, name, temperature)
                for name in ("schema", "regex", "choice")
                for temperature in (0.0, 1.0)
            }
            beside = pool.submit(reference_model.generate, PROMPT, max_new_tokens=40, temperature=0.0)
            for key, coming in replies.items():
                assert coming.result().token_ids == plain[key].token_ids
            assert beside.result().token_ids == free.token_ids


def test_a_sequence_goes_on_with_another_grammar(reference_model: Model) -> None:
    first = generate(reference_model, "schema", 0.0)
    longer = [*reference_model.encode(PROMPT), *first.token_ids, 20, 21]
    options: dict[str, Any] = {"max_new_tokens": 30, "temperature": 0.0, "response_format": FORMATS["regex"]}
    reply = reference_model.generate(longer, **options)
    assert reply.stats.cached_tokens > 0
    reference_model.forget()
    assert reference_model.generate(longer, drafter="none", **options).token_ids == reply.token_ids
    check("regex", reply.text)


def test_an_application_s_drafter_and_processor_keep_to_the_grammar(reference_model: Model) -> None:
    def shun_digits(logits: np.ndarray, context: Any) -> np.ndarray:
        logits[:500] -= 20.0
        return logits

    options: dict[str, Any] = {"logits_processors": [shun_digits], "num_assistant_tokens_schedule": "constant"}
    drafted = generate(reference_model, "schema", 1.0, drafter=NgramDrafter(), num_assistant_tokens=4, **options)
    without = generate(reference_model, "schema", 1.0, drafter="none", logits_processors=[shun_digits])
    assert drafted.token_ids == without.token_ids


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("sampling", ["coupled", "ratio"])
def test_a_draft_model_keeps_to_the_grammar(
    reference_model: Model, reference_bundle: Path, plain: Any, sampling: Any, temperature: float
) -> None:
    """The model itself drafts, so that its drafts are good ones."""
    options: dict[str, Any] = {"drafter": str(reference_bundle), "draft_sampling": sampling}
    options |= {"num_assistant_tokens_schedule": "constant", "num_assistant_tokens": 4}
    reply = generate(reference_model, "schema", temperature, **options)
    check("schema", reply.text)
    assert reply.stats.accepted
    if sampling == "coupled" or temperature == 0:
        assert reply.token_ids == plain["schema", temperature].token_ids


def test_a_grammar_drafter_needs_a_grammar(reference_model: Model) -> None:
    with pytest.raises(UsageError, match="give a response_format"):
        reference_model.stream(PROMPT, drafter="grammar")


def test_an_answer_of_a_form_cannot_ignore_its_end(reference_model: Model) -> None:
    with pytest.raises(UsageError, match="ignore_eos excludes the tokens that end an answer of this form"):
        reference_model.stream(PROMPT, ignore_eos=True, response_format={"type": "json_object"})


def test_without_a_tokenizer_there_is_no_grammar(tmp_path: Path) -> None:
    model = model_over(ToyEngine(), write_bundle(tmp_path / "toy", tokenizer=False, template=False))
    with pytest.raises(UsageError, match="a grammar needs a tokenizer, and this bundle has none"):
        model.stream([4, 5], response_format={"type": "json_object"})


def test_a_tokenizer_that_llguidance_cannot_read_is_said_to_be_one(tmp_path: Path) -> None:
    """One of whole words, which has no bytes."""
    model = model_over(ToyEngine(), write_bundle(tmp_path / "toy"))
    with pytest.raises(GrammarError, match="llguidance cannot read this bundle's tokenizer: "):
        model.generate("ab", response_format={"type": "json_object"})
    assert model.generate("ab", max_new_tokens=3).finish_reason == "length"


@pytest.fixture(scope="module")
def chat_model(reference_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    bundle = write_chat_bundle(reference_bundle, tmp_path_factory.mktemp("grammar") / "chat")
    with ondevice.load(bundle, threads=1) as loaded:
        yield loaded


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_required_call_is_one_that_can_be_made(chat_model: Model, temperature: float, drafter: str) -> None:
    """A bundle whose model says noise under this tokenizer."""
    parameters = {
        "type": "object",
        "properties": {
            "city": {"type": "string", "maxLength": 9},
            "units": {"enum": ["C", "F"]},
            "days": {"type": "integer", "maximum": 9, "minimum": 1},
        },
        "required": ["city", "units"],
    }  # fmt: skip
    tool = {"type": "function", "function": {"name": "get_weather", "parameters": parameters}}
    options: dict[str, Any] = {"tools": [tool, CLOCK], "temperature": temperature, "seed": 3, "max_new_tokens": 120}
    options["tool_choice"] = {"type": "function", "function": {"name": "get_weather"}}
    expected = chat_model.generate(ASKED, drafter="none", **options)
    reply = chat_model.generate(ASKED, drafter=drafter, num_assistant_tokens_schedule="heuristic", **options)
    assert reply.token_ids == expected.token_ids
    assert (reply.text, reply.finish_reason) == ("", "tool_calls")
    [call] = reply.tool_calls
    assert call.name == "get_weather"
    jsonschema.validate(call.arguments, parameters)


def test_where_no_function_may_be_called_none_is(chat_model: Model) -> None:
    tokenizer = chat_model.tokenizer
    assert tokenizer is not None
    [opening] = [token_id for token_id, text in tokenizer.control_texts.items() if text == "<|tool_call>"]

    def eager(logits: np.ndarray, context: Any) -> np.ndarray:
        logits[opening] += 1e4
        return logits

    options: dict[str, Any] = {
        "tools": [WEATHER],
        "logits_processors": [eager],
        "max_new_tokens": 20,
        "temperature": 1.0,
    }
    assert opening in chat_model.generate(ASKED, **options).token_ids
    assert opening not in chat_model.generate(ASKED, tool_choice="none", **options).token_ids
    called = chat_model.generate(ASKED, **{**options, "tool_choice": "auto", "max_new_tokens": 80})
    assert called.token_ids[0] == opening
    assert tokenizer.decode(called.token_ids, keep_special=True).startswith("<|tool_call>call:get_weather{city:")
