"""Chats of a bundle in gpt-oss's format: messages in one reply, calls, forms of the answer, and how much it thinks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import ondevice
from ondevice import Model, Reply, ToolCall
from ondevice.errors import UsageError
from tests.fixtures.chat_bundle import HARMONY, Script, write_chat_bundle
from tests.text.conversations import WEATHER

ASKED: list[dict[str, Any]] = [{"role": "user", "content": "Will it rain in Bern?"}]
NEXT = "<|end|><|start|>assistant"
THOUGHT = f"<|channel|>analysis<|message|>I need the weather.{NEXT}"
FINAL = "<|channel|>final<|message|>"
ARGUMENTS = '{"city": "Bern", "days": 2}'
CALL = f"<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{ARGUMENTS}<|call|>"


@pytest.fixture(scope="module")
def model(reference_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    bundle = write_chat_bundle(reference_bundle, tmp_path_factory.mktemp("harmony") / "chat", HARMONY)
    with ondevice.load(bundle, engine="simd", threads=1) as loaded:
        yield loaded


def say(model: Model, text: str, messages: list[dict[str, Any]], **options: Any) -> Reply:
    """The model's reply, which is this text."""
    chat = {name: options[name] for name in ("tools", "continue_final") if name in options}
    script = Script(text, len(model.encode(messages, **chat)), model.tokenizer)
    return model.generate(messages, logits_processors=[script], **options)


def prompt(model: Model, messages: list[dict[str, Any]], **options: Any) -> str:
    assert model.tokenizer is not None
    return model.tokenizer.decode(model.encode(messages, **options), keep_special=True)


def test_a_conversation_with_a_tool_and_thoughts(model: Model) -> None:
    options: dict[str, Any] = {"tools": [WEATHER]}
    remark = f"<|channel|>commentary<|message|>One moment.{NEXT}"
    reply = say(model, f"{THOUGHT}{remark}{CALL}", ASKED, **options)
    assert (reply.finish_reason, reply.text, reply.reasoning) == ("tool_calls", "One moment.", "I need the weather.")
    assert reply.tool_calls == (ToolCall("get_weather", {"city": "Bern", "days": 2}),)

    [call] = reply.tool_calls
    messages = [*ASKED, reply.message, {"role": "tool", "tool_call_id": call.id, "content": "rain<|end|>"}]
    assert prompt(model, messages, **options).endswith(
        "<|channel|>analysis<|message|>I need the weather.\n\nOne moment.<|end|>"
        f"<|start|>assistant to=functions.get_weather<|channel|>commentary json<|message|>{ARGUMENTS}<|call|>"
        '<|start|>functions.get_weather to=assistant<|channel|>commentary<|message|>"rain<|end|>"<|end|>'
        "<|start|>assistant"
    )
    answer = say(model, f"{THOUGHT}{FINAL} Yes, it will. <|return|>", messages, **options)
    assert (answer.text, answer.reasoning, answer.finish_reason) == ("Yes, it will.", "I need the weather.", "stop")


@pytest.mark.parametrize("length", range(1, 60, 4))
def test_a_reply_that_is_cut_off(model: Model, length: int) -> None:
    reply = say(model, f"{THOUGHT}{FINAL}Yes.<|return|>", ASKED, max_new_tokens=length)
    assert "I need the weather.".startswith(reply.reasoning)
    assert "Yes.".startswith(reply.text)


def test_an_answer_that_is_continued(model: Model) -> None:
    messages = [*ASKED, {"role": "assistant", "content": "Yes, "}]
    assert prompt(model, messages, continue_final=True).endswith(f"<|start|>assistant{FINAL}Yes, ")
    reply = say(model, "it will.<|return|>", messages, continue_final=True)
    assert (reply.text, reply.finish_reason) == ("it will.", "stop")
    form = {"type": "regex", "regex": "Yes, (no|it will)"}
    reply = model.generate(messages, response_format=form, continue_final=True, temperature=0.0)
    assert reply.text in ("no", "it will")


@pytest.mark.parametrize("continues", [False, True])
def test_an_answer_about_the_format_is_text(model: Model, continues: bool) -> None:
    """Its template refuses a message with the beginning of one in it."""
    assert model.tokenizer is not None
    spelled = f"It begins: <|start|>assistant{FINAL}Yes.<|return|>"

    def ids(text: str) -> list[int]:
        answer = {"role": "assistant", "content": text, "thinking": text}
        return model.encode([*ASKED, answer, *([] if continues else ASKED)], continue_final=continues)

    special = model.tokenizer.special_ids
    found, expected = ([token for token in ids(text) if token in special] for text in (spelled, "x"))
    assert found == expected
    assert spelled in model.tokenizer.decode(ids(spelled), keep_special=True)


@pytest.mark.parametrize("drafter", ["none", "auto"])
@pytest.mark.parametrize("thinking", [None, False, "high"])
def test_an_answer_of_a_form(model: Model, drafter: str, thinking: Any) -> None:
    form = {"type": "choice", "choice": ["it rains", "it does not"]}
    for seed in range(3):
        options: dict[str, Any] = {"temperature": 1.0, "seed": seed, "max_new_tokens": 200, "drafter": drafter}
        reply = model.generate(ASKED, response_format=form, thinking=thinking, **options)
        assert reply.text in form["choice"] or (reply.finish_reason == "length" and thinking is not False)
        assert thinking is not False or reply.reasoning == ""


def test_a_call_that_is_demanded(model: Model) -> None:
    clock = {"type": "function", "function": {"name": "clock"}}
    options: dict[str, Any] = {"tools": [clock], "tool_choice": "required", "thinking": False, "temperature": 1.0}
    for seed in range(3):
        reply = model.generate(ASKED, seed=seed, **options)
        assert ([call.name for call in reply.tool_calls], reply.text) == (["clock"], "")
        assert reply.finish_reason == "tool_calls"


def test_how_much_it_thinks(model: Model) -> None:
    for thinking, effort in ((None, "medium"), ("high", "high"), (False, "low")):
        assert f"Reasoning: {effort}\n" in prompt(model, ASKED, thinking=thinking)
    assert "Reasoning: low" in prompt(model, ASKED, template_options={"reasoning_effort": "low"})
    with pytest.raises(UsageError, match=r"thinking must be True, False, None or one of minimal, low, .*'much'"):
        model.encode(ASKED, thinking="much")
