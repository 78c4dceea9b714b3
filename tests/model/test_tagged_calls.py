"""Calls between tags, from the declarations of tools to the reply, on a bundle whose template is Qwen3.5's."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import ondevice
from ondevice import Model, ToolCall
from tests.fixtures.chat_bundle import QWEN, Script, write_chat_bundle
from tests.text.conversations import ASKED, WEATHER
from tests.text.test_tagged_calls import block
from tests.text.tokenizers_made import qwen

THOUGHT = "Hm.\n</think>\n\n"
CALL = block("get_weather", city="2", days="2")
MADE = ToolCall("get_weather", {"city": "2", "days": 2})


@pytest.fixture(scope="module")
def model(reference_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    bundle = write_chat_bundle(reference_bundle, tmp_path_factory.mktemp("qwen") / "chat", QWEN)
    with ondevice.load(bundle, engine="simd", threads=1) as loaded:
        yield loaded


@pytest.mark.parametrize("choice", [None, "auto", "required"])
@pytest.mark.parametrize("thinking", [True, False])
def test_a_call_has_the_types_of_its_declaration(model: Model, choice: Any, thinking: bool) -> None:
    options: dict[str, Any] = {"tools": [WEATHER], "thinking": thinking}
    said = f"{THOUGHT if thinking else ''}{CALL}<|im_end|>"
    script = Script(said, len(model.encode(ASKED, **options)), qwen())
    reply = model.generate(ASKED, logits_processors=[script], tool_choice=choice, **options)
    assert (reply.text, reply.reasoning) == ("", "Hm." if thinking else "")
    assert reply.tool_calls == (MADE,)
    assert reply.finish_reason == "tool_calls"
    assert model.tokenizer is not None
    result = {"role": "tool", "tool_call_id": reply.tool_calls[0].id, "content": "rain"}
    prompt = model.tokenizer.decode(model.encode([*ASKED, reply.message, result], **options), keep_special=True)
    assert f"\n</think>\n\n{CALL}<|im_end|>\n<|im_start|>user\n<tool_response>\nrain\n</tool_response>" in prompt


def test_a_forced_call_is_between_tags(model: Model) -> None:
    choice = {"type": "function", "function": {"name": "get_weather"}}
    reply = model.generate(ASKED, tools=[WEATHER], tool_choice=choice, thinking=False, max_new_tokens=40, seed=1)
    assert model.tokenizer is not None
    text = model.tokenizer.decode(reply.token_ids, keep_special=True)
    assert text.startswith("<tool_call>\n<function=get_weather>\n<parameter=city>\n")
