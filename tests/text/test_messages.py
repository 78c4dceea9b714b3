"""Messages as clients send them: every template renders them as transformers does, and what is malformed is named."""

import json
import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ondevice.errors import PromptError, UsageError
from ondevice.text.chat_template import ChatTemplate
from ondevice.text.media_parts import Image
from ondevice.text.messages import ChatOptions, begun_answer, plain_messages, plain_tools
from tests.text.conversations import ASKED, CALLED, CONVERSATIONS, Messages, call
from tests.text.templates import DEEPSEEK, GEMMA, GEMMA_4, GEMMA_4_LARGE, GEMMA_4_PLAIN_SYSTEM

TEMPLATES = {"gemma-4": GEMMA_4, "gemma-4-large": GEMMA_4_LARGE}
if given := os.environ.get("ONDEVICE_TEMPLATES"):  # a directory of templates, the published ones for instance
    TEMPLATES |= {path.name: path.read_text("utf-8") for path in sorted(Path(given).glob("*.jinja*"))}


def rendered(source: str, messages: Any, **variables: Any) -> str:
    return ChatTemplate(source, {"bos_token": "<bos>"}).render(plain_messages(messages), **variables)


@pytest.mark.needs("oracle")
@pytest.mark.parametrize("source", TEMPLATES.values(), ids=TEMPLATES)
@pytest.mark.parametrize("conversation", CONVERSATIONS)
def test_it_renders_as_transformers_does(source, conversation):
    from transformers.utils.chat_template_utils import render_jinja_template

    messages, variables = CONVERSATIONS[conversation]
    rendering: Any = render_jinja_template(
        [messages], chat_template=source, add_generation_prompt=True, bos_token="<bos>", **variables
    )
    assert rendered(source, messages, **variables) == rendering[0][0]


def test_the_two_templates_differ():
    assert GEMMA_4 != GEMMA_4_LARGE
    assert rendered(GEMMA_4_LARGE, [{"role": "user", "content": "x"}]).endswith("<|channel>thought\n<channel|>")


@pytest.mark.parametrize("arguments", ['{"city": "Bern", "days": 1}', {"city": "Bern", "days": 1}])
def test_arguments_may_be_a_string_of_json(arguments):
    said: Messages = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "tool_calls": [call("get_weather", arguments)]},
    ]
    assert 'call:get_weather{city:<|"|>Bern<|"|>,days:1}' in rendered(GEMMA_4, said)
    assert said[1]["tool_calls"][0]["function"]["arguments"] == arguments  # the caller's own stay as they are


def test_no_arguments_may_be_an_empty_string():
    said = [{"role": "user", "content": "x"}, {"role": "assistant", "tool_calls": [call("clock", "")]}]
    assert "call:clock{}" in rendered(GEMMA_4, said)


def test_a_template_that_reads_strings_only_gets_strings():
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    text = rendered(GEMMA, [{"role": "user", "content": parts}, CALLED[1]])
    assert text == "<bos><|turn>user\none\ntwo<turn|>\n<|turn>model\n<turn|>\n<|turn>model\n"


def test_a_template_that_leaves_out_what_is_no_string_gets_strings():
    source = "{% for message in messages %}{{ message.content if message.content is string else '' }}{% endfor %}"
    assert rendered(source, [{"role": "user", "content": [{"type": "text", "text": "one"}]}]) == "one"


def test_a_template_that_reads_the_parts_of_some_roles_gets_strings_of_the_others():
    parts = [{"type": "text", "text": " one"}, {"type": "text", "text": "two "}]
    text = rendered(GEMMA_4_PLAIN_SYSTEM, [{"role": "system", "content": parts}, {"role": "user", "content": parts}])
    assert text.startswith("<bos><|turn>system\none\ntwo<turn|>\n<|turn>user\nonetwo<turn|>")


@pytest.mark.needs("oracle")
@pytest.mark.parametrize("arguments", [{"city": "Zürich", "days": [1, None]}, '{"city": "Zürich", "days": [1, null]}'])
@pytest.mark.parametrize("nothing", [None, "", []])
def test_a_template_that_joins_arguments_gets_a_string(arguments, nothing):
    from transformers.utils.chat_template_utils import render_jinja_template

    def chat(arguments: Any, nothing: str | list[Any] | None = None) -> Messages:
        said = {"role": "assistant", "content": nothing, "tool_calls": [call("f", arguments), call("clock", "{}")]}
        return [*ASKED, said, {"role": "tool", "tool_call_id": "call_1", "content": "rain"}]

    text = json.dumps({"city": "Zürich", "days": [1, None]}, ensure_ascii=False)
    rendering: Any = render_jinja_template([chat(text)], chat_template=DEEPSEEK, bos_token="<bos>")
    assert rendered(DEEPSEEK, chat(arguments, nothing)) == rendering[0][0]
    assert "<|call|>function<|sep|>f" in rendering[0][0]


def test_thoughts_go_by_all_their_names():
    for name in ("reasoning_content", "reasoning", "thinking"):
        [_, said] = plain_messages([{"role": "user", "content": "x"}, {"role": "assistant", "content": "y", name: "z"}])
        assert said["reasoning_content"] == said["thinking"] == "z"
    given = {"role": "assistant", "content": "y", "thinking": None, "reasoning_content": None, "reasoning": "z"}
    [said] = plain_messages([given])
    assert said["reasoning_content"] == said["thinking"] == "z"


USER = {"role": "user", "content": "x"}
DEEP: list[Any] = []
for _ in range(100_000):
    DEEP = [DEEP]


@pytest.mark.parametrize(
    ("messages", "complaint"),
    [
        ([], "no messages"),
        (["hello"], "message 1 is not a mapping"),
        ([{"content": "x"}], "message 1 has the role None"),
        ([{"role": "user", "content": "x"}, {"role": "bot", "content": "x"}], "message 2 has the role 'bot'"),
        ([{"role": np.array([1, 2]), "content": "x"}], "message 1 has the role array([1, 2])"),
        ([{"role": "user", "content": [{"type": np.array([1, 2])}]}], "message 1 has a part of the type array([1, 2])"),
        ([{"role": "user"}], "message 1 needs a string"),
        ([{"role": "user", "content": None}], "message 1 needs a string"),
        ([{"role": "user", "content": None, "tool_calls": [call("f", {})]}], "message 1 needs a string"),
        ([USER, {"role": "assistant", "content": None}], "message 2 needs a string"),
        ([{"role": "user", "content": ["x"]}], "message 1 needs a string"),
        (
            [{"role": "user", "content": [{"type": "film"}]}],
            "a part of the type 'film': parts are text, image, audio and video",
        ),
        ([{"role": "user", "content": [{"type": "text"}]}], "message 1 has a text part whose 'text' is None"),
        ([USER, {"role": "assistant", "tool_calls": "f"}], "message 2 needs a list as its 'tool_calls'"),
        ([USER, {"role": "assistant", "tool_calls": ["f"]}], "message 2, tool call 1 is no"),
        ([USER, {"role": "assistant", "tool_calls": [call("f", "{")]}], "tool call 1 has arguments that are no JSON"),
        ([USER, {"role": "assistant", "tool_calls": [call("f", "[1]")]}], "arguments that are no JSON object: [1]"),
        ([USER, {"role": "assistant", "tool_calls": [call("f", "[" * 10**5)]}], "arguments that are no JSON"),
        (
            [USER, {"role": "tool", "tool_call_id": ["x"], "content": ""}],
            "message 2 needs a string as its 'tool_call_id'",
        ),
        ([USER, {"role": "tool", "tool_call_id": "x", "content": ""}], "message 2 answers the tool call 'x', which no"),
        (
            [{"role": "user", "content": 10**5000}],
            "message 1 needs a string as its 'content', or a list of parts, not 'a ",
        ),
        ([{**USER, "extra": {1, 2}}], "message 1 holds {1, 2}, which is not JSON"),
        ([{**USER, "extra": DEEP}], "message 1 holds too many lists in each other"),
    ],
)
def test_a_bad_message_is_named(messages, complaint):
    with pytest.raises(PromptError, match=re.escape(complaint)):
        plain_messages(messages)


@pytest.mark.parametrize(
    ("tools", "complaint"),
    [
        ([{"name": "clock"}], "tool 1 is no"),
        ([{"type": "function", "function": {"name": 5}}], "tool 1 is no"),
        ([{"type": "function", "function": {"name": "f", "parameters": b"{}"}}], "tool 1 holds b'{}', which is not"),
        (
            [{"type": "function", "function": {"name": 'a"b<|tool_call>'}}],
            "tool 1 has a function name that is not 1 to",
        ),
        ([{"type": "function", "function": {"name": "a" * 129}}], "tool 1 has a function name that is not 1 to"),
    ],
)
def test_a_bad_declaration_is_named(tools, complaint):
    with pytest.raises(PromptError, match=re.escape(complaint)):
        plain_tools(tools)


@pytest.mark.parametrize("tools", ["clock", {"type": "function"}, 5, np.zeros(3)], ids=str)
def test_tools_are_a_list(tools):
    with pytest.raises(UsageError, match="tools must be a list of declarations, not"):
        ChatOptions(tools)


def test_a_begun_answer_is_the_text_of_its_parts():
    parts = [{"type": "text", "text": "a"}, Image(b""), {"type": "image", "image": b""}, {"type": "text", "text": "b"}]
    assert begun_answer([{"role": "assistant", "content": parts}]) == "ab"


def test_a_template_sees_plain_values_only():
    class Text(str):
        def harm(self) -> str:
            return "done"

    [message] = plain_messages([{"role": "user", "content": Text("x")}])
    assert type(message["content"]) is str
    assert json.dumps(message)
