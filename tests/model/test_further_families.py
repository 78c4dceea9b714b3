"""Calls and answers of a form of Seed-OSS, GLM-Z1 and Granite 3, from the declarations of tools to the next prompt."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import ondevice
from ondevice import Model, ToolCall
from tests.fixtures.chat_bundle import ChatFormat, Script, write_chat_bundle
from tests.text import templates
from tests.text.conversations import ASKED, WEATHER
from tests.text.tokenizers_made import GLM_4, GRANITE_3, SEED_OSS, of_bytes


class Said(NamedTuple):
    """A format, the thoughts that begin a reply, a call, the token after it, and a result in the next prompt."""

    chat: ChatFormat
    before: str
    call: str
    end: str
    result: str


ARGUMENTS = '{"city": "Bern"}'
FORMATS = {
    "seed-oss": Said(
        ChatFormat(lambda: of_bytes(SEED_OSS), templates.SEED_OSS, ("<seed:eos>",), "<seed:bos>", "<seed:pad>"),
        "<seed:think>Hm.</seed:think>\n",
        "<seed:tool_call>\n<function=get_weather>\n<parameter=city>Bern</parameter>\n</function>\n</seed:tool_call>",
        "<seed:eos>",
        "<seed:bos>tool\nrain<seed:eos>",
    ),
    "glm-z1": Said(
        ChatFormat(
            lambda: of_bytes(GLM_4),
            templates.GLM_Z1,
            ("<|endoftext|>", "<|user|>", "<|observation|>"),
            "[gMASK]",
            "<|endoftext|>",
        ),
        "\nHm.\n</think>",
        f"get_weather\n{ARGUMENTS}",
        "<|observation|>",
        "<|observation|>\nrain",
    ),
    "granite-3": Said(
        ChatFormat(
            lambda: of_bytes(GRANITE_3),
            templates.GRANITE_33,
            ("<|end_of_text|>",),
            "<|end_of_text|>",
            "<|end_of_text|>",
        ),
        "<think>Hm.</think>",
        f'<|tool_call|>[{{"name": "get_weather", "arguments": {ARGUMENTS}}}]',
        "<|end_of_text|>",
        "<|start_of_role|>tool_response<|end_of_role|>rain",
    ),
}


@pytest.fixture(scope="module", params=FORMATS)
def model(
    request: pytest.FixtureRequest, reference_bundle: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Said, Model]]:
    said = FORMATS[request.param]
    bundle = write_chat_bundle(reference_bundle, tmp_path_factory.mktemp(request.param) / "chat", said.chat)
    with ondevice.load(bundle, engine="simd", threads=1) as loaded:
        yield said, loaded


def text_of(model: Model, token_ids: Any) -> str:
    assert model.tokenizer is not None
    return model.tokenizer.decode(token_ids, keep_special=True)


@pytest.mark.parametrize("choice", [None, "auto", "required"])
def test_a_call_goes_there_and_back(model: tuple[Said, Model], choice: Any) -> None:
    said, loaded = model
    options: dict[str, Any] = {"tools": [WEATHER], "thinking": True}
    before = (
        said.before if choice != "required" or said.end != "<|end_of_text|>" else ""
    )  # no thoughts of letters there
    script = Script(f"{before}{said.call}{said.end}", len(loaded.encode(ASKED, **options)), said.chat.tokenizer())
    reply = loaded.generate(ASKED, logits_processors=[script], tool_choice=choice, **options)
    assert (reply.text, reply.reasoning) == ("", "Hm." if before else "")
    assert reply.tool_calls == (ToolCall("get_weather", {"city": "Bern"}),)
    assert reply.finish_reason == "tool_calls"
    result = {"role": "tool", "tool_call_id": reply.tool_calls[0].id, "content": "rain"}
    prompt = text_of(loaded, loaded.encode([*ASKED, reply.message, result], **options))
    assert said.call in prompt
    assert said.result in prompt[prompt.index(said.call) :]


def test_a_forced_call_and_an_answer_of_a_form(model: tuple[Said, Model]) -> None:
    said, loaded = model
    choice = {"type": "function", "function": {"name": "get_weather"}}
    begun = f"{said.before}{said.call.partition('Bern')[0]}" if "think" in text_of(loaded, loaded.encode(ASKED)) else ""
    script = Script(
        begun or said.call.partition("Bern")[0], len(loaded.encode(ASKED, tools=[WEATHER])), said.chat.tokenizer()
    )
    length = len(script.token_ids)
    reply = loaded.generate(
        ASKED, tools=[WEATHER], tool_choice=choice, max_new_tokens=length, logits_processors=[script]
    )
    assert text_of(loaded, reply.token_ids).endswith(said.call.partition("Bern")[0])
    form = {"type": "choice", "choice": ["yes"]}
    thought = said.before if begun else ""
    script = Script(
        f"{thought}{chr(10) if begun else ''}yes{said.end}", len(loaded.encode(ASKED)), said.chat.tokenizer()
    )
    answer = loaded.generate(ASKED, response_format=form, logits_processors=[script])
    assert (answer.text, answer.reasoning) == ("yes", "Hm." if thought else "")
