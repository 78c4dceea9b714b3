"""Chats with tools and thoughts, from messages to a reply and on, on a bundle whose template is Gemma 4's."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import ondevice
from ondevice import Model, Reply, ToolCall
from tests.conftest import ENGINES
from tests.fixtures.chat_bundle import Script, write_chat_bundle
from tests.text.conversations import WEATHER

ASKED: list[dict[str, Any]] = [{"role": "user", "content": "Will it rain in Bern?"}]
CALL = '<|tool_call>call:get_weather{city:<|"|>Bern<|"|>,days:2}<tool_call|>'
THOUGHT = "<|channel>thought\nI need the weather.\n<channel|>"


@pytest.fixture(scope="module")
def bundle(reference_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chat_bundle(reference_bundle, tmp_path_factory.mktemp("chat") / "chat")


@pytest.fixture(scope="module", params=ENGINES)
def model(bundle: Path, request: pytest.FixtureRequest) -> Iterator[Model]:
    with ondevice.load(bundle, engine=request.param, threads=1) as loaded:
        yield loaded


def say(model: Model, text: str, messages: list[dict[str, Any]], **options: Any) -> Reply:
    """The model's reply, which is this text."""
    chat = {name: options[name] for name in ("tools", "thinking") if name in options}
    script = Script(text, len(model.encode(messages, **chat)))
    return model.generate(messages, logits_processors=[script], **options)


def test_a_conversation_with_a_tool_and_thoughts(model: Model) -> None:
    options: dict[str, Any] = {"tools": [WEATHER], "thinking": True}
    reply = say(model, f"{THOUGHT}{CALL}<|tool_response>", ASKED, **options)
    assert reply.finish_reason == "tool_calls"
    assert reply.text == ""
    assert reply.reasoning == "I need the weather."
    assert reply.tool_calls == (ToolCall("get_weather", {"city": "Bern", "days": 2}),)

    [call] = reply.tool_calls
    messages = [*ASKED, reply.message, {"role": "tool", "tool_call_id": call.id, "content": "rain<turn|>"}]
    assert model.tokenizer is not None
    prompt = model.tokenizer.decode(model.encode(messages, **options), keep_special=True)
    assert prompt.endswith("<|channel>thought\n")  # the reply begins inside a thought
    assert f'{CALL}<|tool_response>response:get_weather{{value:<|"|>rain<turn|><|"|>}}<tool_response|>' in prompt

    answer = say(model, "It says rain.\n<channel|> Yes, it will. <turn|>", messages, **options)
    assert (answer.text, answer.reasoning, answer.finish_reason) == ("Yes, it will.", "It says rain.", "stop")
    assert answer.message == {"role": "assistant", "content": "Yes, it will.", "reasoning_content": "It says rain."}


@pytest.mark.parametrize("drafter", ["none", "mtp", "ngram", "medusa", "blockwise", "auto"])
def test_steps_add_up_to_the_reply_whoever_drafts(model: Model, drafter: str) -> None:
    text = f"{THOUGHT}One moment. {CALL}<|tool_response>"
    script = Script(text, len(model.encode(ASKED)))
    with model.stream(ASKED, logits_processors=[script], drafter=drafter) as generation:
        steps = list(generation)
    reply = Reply.of(steps, generation.stats)
    assert (reply.text, reply.reasoning) == ("One moment.", "I need the weather.")
    assert reply.tool_calls == (ToolCall("get_weather", {"city": "Bern", "days": 2}),)
    assert reply.token_ids == tuple(script.token_ids)
    assert [step.finish_reason for step in steps][-1] == "tool_calls"


@pytest.mark.parametrize("length", [1, 8, 30])
def test_a_call_that_is_cut_off_is_text(model: Model, length: int) -> None:
    reply = say(model, f"{CALL}<|tool_response>", ASKED, max_new_tokens=length)
    assert reply.finish_reason == "length"
    assert reply.tool_calls == ()
    assert CALL.startswith(reply.text)


def test_a_stop_string_leaves_calls_alone(model: Model) -> None:
    reply = say(model, f"{CALL}one\ntwo<turn|>", ASKED, stop=["\n", "Bern"])
    assert reply.tool_calls == (ToolCall("get_weather", {"city": "Bern", "days": 2}),)
    assert (reply.text, reply.finish_reason) == ("one", "stop")


@pytest.mark.parametrize("drafter", ["none", "ngram"])
def test_a_reply_may_end_behind_its_first_call(model: Model, drafter: str) -> None:
    """Whatever is drafted after it, which neither the reply nor its statistics contain."""
    said = f"{THOUGHT}One moment.{CALL}"
    script = Script(f"{said}{CALL}<turn|>", len(model.encode(ASKED)))
    options: dict[str, Any] = {"drafter": drafter, "parallel_tool_calls": False, "stop": "moment.More"}
    if drafter != "none":  # the same text once before, so that drafts go on after the call
        model.generate(ASKED, logits_processors=[script])
        options |= {"num_assistant_tokens": 16, "num_assistant_tokens_schedule": "constant"}
    reply = model.generate(ASKED, logits_processors=[script], **options)
    assert reply.tool_calls == (ToolCall("get_weather", {"city": "Bern", "days": 2}),)
    assert (reply.text, reply.finish_reason, reply.stop_string) == ("One moment.", "tool_calls", None)
    expected = Script(said, 0).token_ids
    assert reply.token_ids == tuple(script.token_ids[: len(expected)])
    assert reply.stats.new_tokens == len(reply.token_ids)
    assert (reply.stats.num_draft_tokens > 0) == (drafter != "none")


def test_text_that_begins_no_reply_is_not_parsed(model: Model) -> None:
    script = Script(" a <|channel>thought\nb <turn|>", len(model.encode("def f")))
    reply = model.generate("def f", logits_processors=[script])
    assert (reply.text, reply.reasoning) == (" a thought\nb ", "")
