"""Chats of a model in gpt-oss's format over all APIs: thoughts, remarks, calls, and how much it thinks."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import ondevice
from ondevice import Generation, Model, Prompt
from tests.fixtures.chat_bundle import HARMONY, Script, write_chat_bundle
from tests.server.conftest import CHAT_OPTIONS
from tests.server.served import Served, serving
from tests.text.conversations import WEATHER

ASKED = [{"role": "user", "content": "Will it rain in Bern?"}]
NEXT = "<|end|><|start|>assistant"
SAID = (
    f"<|channel|>analysis<|message|>I need the weather.{NEXT}<|channel|>commentary<|message|>One moment.{NEXT}"
    '<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{"city": "Bern"}<|call|>'
)
CHAT = "/v1/chat/completions"


class Harmony(NamedTuple):
    """A server whose model says `SAID`.

    prompts : the texts of the prompts that it got
    """

    served: Served
    prompts: list[str]


@pytest.fixture(scope="module")
def model_and_server(
    reference_bundle: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Model, Served]]:
    bundle = write_chat_bundle(reference_bundle, tmp_path_factory.mktemp("harmony") / "chat", HARMONY)
    with ondevice.load(bundle, engine="simd", threads=1) as model, serving(bundle, lambda: model) as served:
        yield model, served
        served.wait_until_idle()


@pytest.fixture
def harmony(model_and_server: tuple[Model, Served], monkeypatch: pytest.MonkeyPatch) -> Harmony:
    model, served = model_and_server
    prompts: list[str] = []
    stream: Callable[..., Generation] = model.stream

    def say(prompt: Prompt, **options: Any) -> Generation:
        ids = model.encode(prompt, **{name: options[name] for name in CHAT_OPTIONS if name in options})
        assert model.tokenizer is not None
        prompts.append(model.tokenizer.decode(ids, keep_special=True))
        return stream(prompt, logits_processors=[Script(SAID, len(ids), model.tokenizer)], **options)

    monkeypatch.setattr(model, "stream", say)
    return Harmony(served, prompts)


def test_a_chat_completion(harmony: Harmony) -> None:
    [choice] = harmony.served.post(CHAT, messages=ASKED, tools=[WEATHER]).body["choices"]
    message = choice["message"]
    assert (choice["finish_reason"], message["content"]) == ("tool_calls", "One moment.")
    assert message["reasoning_content"] == "I need the weather."
    [call] = message["tool_calls"]
    assert (call["function"]["name"], json.loads(call["function"]["arguments"])) == ("get_weather", {"city": "Bern"})

    result = {"role": "tool", "tool_call_id": call["id"], "content": "rain<|end|>"}
    assert harmony.served.post(CHAT, messages=[*ASKED, message, result], tools=[WEATHER]).status == 200
    assert harmony.prompts[-1].endswith(
        "<|channel|>analysis<|message|>I need the weather.\n\nOne moment.<|end|>"
        '<|start|>assistant to=functions.get_weather<|channel|>commentary json<|message|>{"city": "Bern"}<|call|>'
        '<|start|>functions.get_weather to=assistant<|channel|>commentary<|message|>"rain<|end|>"<|end|>'
        "<|start|>assistant"
    )


@pytest.mark.parametrize("limit", [3, 9, 20, 40, 60, 80])
def test_a_stream_that_a_limit_cuts_shows_nothing_of_the_form(harmony: Harmony, limit: int) -> None:
    chunks = harmony.served.messages(CHAT, messages=ASKED, max_tokens=limit, stream=True)
    deltas = [choice["delta"] for chunk in chunks for choice in chunk["choices"]]
    text, thoughts = ("".join(each.get(name) or "" for each in deltas) for name in ("content", "reasoning_content"))
    assert "I need the weather.".startswith(thoughts)
    assert '{"city": "Bern"}'.startswith(text.removeprefix("One moment.").strip()) or "One moment.".startswith(text)


ASKING: dict[str, tuple[dict[str, Any], Callable[[str], dict[str, Any]]]] = {
    CHAT: ({"messages": ASKED}, lambda effort: {"reasoning_effort": effort}),
    "/v1/responses": ({"input": "Will it rain?"}, lambda effort: {"reasoning": {"effort": effort}}),
    "/v1/messages": (
        {"messages": ASKED, "max_tokens": 99},
        lambda effort: {"thinking": {"type": "adaptive"}, "output_config": {"effort": effort}},
    ),
    "/api/chat": ({"messages": ASKED, "stream": False}, lambda effort: {"think": effort}),
    "/api/generate": ({"prompt": "Will it rain?", "stream": False}, lambda effort: {"think": effort}),
}


@pytest.mark.parametrize("path", ASKING)
def test_how_much_it_thinks(harmony: Harmony, path: str) -> None:
    asked, fields = ASKING[path]
    for effort, expected in (("low", "low"), ("high", "high"), ("max", "high"), (None, "medium")):
        answer = harmony.served.post(path, **asked, **(fields(effort) if effort else {}))
        assert answer.status == 200, answer.body
        assert f"\nReasoning: {expected}\n" in harmony.prompts[-1]


def test_thinking_that_is_switched_off(harmony: Harmony) -> None:
    for path, fields in (
        (CHAT, {"reasoning_effort": "none"}),
        (CHAT, {"chat_template_kwargs": {"enable_thinking": False}}),
        ("/api/chat", {"think": False, "stream": False}),
    ):
        assert harmony.served.post(path, messages=ASKED, **fields).status == 200
        assert "\nReasoning: low\n" in harmony.prompts[-1]
    both = {"reasoning_effort": "low", "chat_template_kwargs": {"reasoning_effort": "high"}}
    assert harmony.served.post(CHAT, messages=ASKED, **both).status == 200
    assert "\nReasoning: high\n" in harmony.prompts[-1]


def test_what_the_model_can_do(harmony: Harmony) -> None:
    assert {"tools", "thinking"} <= {*harmony.served.post("/api/show", model="").body["capabilities"]}
