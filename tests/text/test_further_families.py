"""Chats of Seed-OSS, EXAONE 4, Granite 3 and 4, GLM-4 and GLM-Z1: replies told apart, and calls in a history."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from ondevice.text.chat_template import ChatTemplate
from ondevice.text.codec import encode_prompt
from ondevice.text.messages import ChatOptions, ToolCall, plain_messages
from ondevice.text.reply_parser import Parsed, ReplyParser, ResponseTemplate, begun_reply
from ondevice.text.reply_stream import ReplyStream
from ondevice.text.tagged_calls import tagged_calls
from ondevice.text.tokenizer import Tokenizer
from ondevice.text.untrusted_text import UntrustedText
from ondevice_export.response_templates import known_template
from ondevice_export.text_files import read_tokenizer, turn_ends
from tests.text import templates, tokenizers_made
from tests.text.conversations import ANSWERED, ASKED, CONVERSATIONS, WEATHER, Messages, call
from tests.text.tokenizers_made import of_bytes


class Family:
    """A family's tokenizer and templates."""

    def __init__(self, control: list[str], chat: str) -> None:
        self.tokenizer, self.chat = of_bytes(control), ChatTemplate(chat)
        self.template = ResponseTemplate(known_template(self.tokenizer, chat), self.tokenizer)

    def ids(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False)

    def rendered(self, messages: Any, **variables: Any) -> str:
        return self.chat.render(plain_messages(messages), **variables)

    def stream(self, prompt: str, tools: Any = (WEATHER,)) -> ReplyStream:
        begun = begun_reply(self.template, self.tokenizer, self.ids(prompt))
        assert begun is not None
        return ReplyStream(self.tokenizer, (), ReplyParser(self.template, begun, tools=tools))

    def parsed(self, reply: str, prompt: str = "", tools: Any = (WEATHER,)) -> Parsed:
        made = self.stream(prompt or self.rendered(ASKED), tools)
        return made.feed(self.ids(reply)).then(made.finish())


FAMILIES = {
    "seed-oss": Family(tokenizers_made.SEED_OSS, templates.SEED_OSS),
    "exaone-4": Family(tokenizers_made.EXAONE_4, templates.EXAONE_4),
    "granite-4": Family(tokenizers_made.GRANITE_4, templates.GRANITE_4),
    "granite-3.3": Family(tokenizers_made.GRANITE_3, templates.GRANITE_33),
    "granite-3.2": Family(tokenizers_made.GRANITE_3, templates.GRANITE_32),
    "granite-3.0": Family(tokenizers_made.GRANITE_3, templates.GRANITE_30),
    "glm-4": Family(tokenizers_made.GLM_4, templates.GLM_4),
    "glm-z1": Family(tokenizers_made.GLM_4, templates.GLM_Z1),
}

ARGUMENTS = '{"city": "Zürich", "days": 2}'
CALL, CLOCK = ToolCall("get_weather", {"city": "Zürich", "days": 2}), ToolCall("clock", {})
OBJECT, CLOCK_OBJECT = f'{{"name": "get_weather", "arguments": {ARGUMENTS}}}', '{"name": "clock", "arguments": {}}'
LISTED = f"<|tool_call|>[{OBJECT}, {CLOCK_OBJECT}]<|end_of_text|>"
SEED_CALL = (
    "<seed:tool_call>\n<function=get_weather>\n<parameter=city>Zürich</parameter>\n<parameter=days>2</parameter>\n"
    "</function>\n</seed:tool_call>"
)
SEED_CLOCK = "<seed:tool_call>\n<function=clock>\n</function>\n</seed:tool_call>"
SEED_PROMPT = "<seed:bos>user\nhi<seed:eos><seed:bos>assistant\n"
EXAONE_CALLS = f"<tool_call>{OBJECT}</tool_call>\n<tool_call>{CLOCK_OBJECT}</tool_call>[|endofturn|]"
EXAONE_THINKS = "[|user|]\nhi[|endofturn|]\n[|assistant|]\n<think>\n"
GRANITE_CALLS = f"<tool_call>\n{OBJECT}\n</tool_call>\n<tool_call>\n{CLOCK_OBJECT}\n</tool_call><|end_of_text|>"
GRANITE_CONTROLLED = '<|start_of_role|>assistant {"length": "short"}<|end_of_role|>'


class Case(NamedTuple):
    family: str
    reply: str
    expected: Parsed
    prompt: str = ""


CASES = {
    "Seed's answer": Case("seed-oss", "Yes.<seed:eos>", Parsed("Yes.")),
    "Seed's thought": Case("seed-oss", "<seed:think>Hm.\n</seed:think>\nYes.<seed:eos>", Parsed("Yes.", "Hm.")),
    "Seed's thought with its budget": Case(
        "seed-oss",
        "<seed:think>Hm.\n<seed:cot_budget_reflect>I have used 9 tokens.</seed:cot_budget_reflect>\nSo."
        "</seed:think>Yes.<seed:eos>",
        Parsed("Yes.", "Hm.\nI have used 9 tokens.\nSo."),
    ),
    "Seed's thought without a budget": Case(
        "seed-oss",
        "None is left.</seed:cot_budget_reflect>\n</seed:think>Yes.<seed:eos>",
        Parsed("Yes.", "None is left."),
        f"{SEED_PROMPT}<seed:think><seed:cot_budget_reflect>",
    ),
    "Seed's calls": Case(
        "seed-oss",
        f"<seed:think>Hm.</seed:think>\nI look.\n{SEED_CALL}\n{SEED_CLOCK}<seed:eos>",
        Parsed("I look.", "Hm.", (CALL, CLOCK)),
    ),
    "Seed's call that is cut off": Case("seed-oss", SEED_CALL[:-30], Parsed(SEED_CALL[:-30])),
    "EXAONE's thought": Case("exaone-4", "Hm.\n</think>\n\nYes.[|endofturn|]", Parsed("Yes.", "Hm."), EXAONE_THINKS),
    "EXAONE's calls": Case("exaone-4", f"I look.\n{EXAONE_CALLS}", Parsed("I look.", "", (CALL, CLOCK))),
    "EXAONE's calls behind a thought": Case(
        "exaone-4", f"Hm.\n</think>\n\n{EXAONE_CALLS}", Parsed("", "Hm.", (CALL, CLOCK)), EXAONE_THINKS
    ),
    "Granite 4's calls": Case("granite-4", f"I look.\n{GRANITE_CALLS}", Parsed("I look.", "", (CALL, CLOCK))),
    "Granite 4's thought": Case("granite-4", "<think>Hm.</think>\nYes.<|end_of_text|>", Parsed("Yes.", "Hm.")),
    "Granite 3's calls": Case("granite-3.3", LISTED, Parsed("", "", (CALL, CLOCK))),
    "Granite 3's calls behind a text": Case("granite-3.0", f"I look.{LISTED}", Parsed("I look.", "", (CALL, CLOCK))),
    "Granite 3's call without a list": Case(
        "granite-3.0", f"<|tool_call|> {OBJECT}\n<|end_of_text|>", Parsed("", "", (CALL,))
    ),
    "Granite 3's call that is cut off": Case("granite-3.2", LISTED[:40], Parsed(LISTED[:40])),
    "Granite 3's answer to a prompt that wants a short one": Case(
        "granite-3.3", "Yes.<|end_of_text|>", Parsed("Yes."), f"hi<|end_of_text|>\n{GRANITE_CONTROLLED}"
    ),
    "Granite 3.3's thought": Case(
        "granite-3.3", "<think>Hm.</think>\n\n<response>Yes.</response><|end_of_text|>", Parsed("Yes.", "Hm.")
    ),
    "Granite 3.3's thought before an answer without marks": Case(
        "granite-3.3",
        "<think>Hm.</think> <resp>Yes.</response> No.<|end_of_text|>",
        Parsed("<resp>Yes.</response> No.", "Hm."),
    ),
    "Granite 3.3's answer that spells a thought": Case(
        "granite-3.3", "So: <think>Hm.</think><|end_of_text|>", Parsed("So: <think>Hm.</think>")
    ),
    "Granite 3.2's thought": Case(
        "granite-3.2",
        "Here is my thought process:\n\nHm.\n\nHere is my response:\n\nYes.<|end_of_text|>",
        Parsed("Yes.", "Hm."),
    ),
    "Granite 3.2's thought in other words": Case(
        "granite-3.2",
        "Here's my thought process: Here is mine. Here's my response: Here is",
        Parsed("Here is", "Here is mine."),
    ),
    "GLM's answer": Case("glm-4", "\nSure\n{}<|user|>", Parsed("Sure\n{}")),
    "GLM's answer without a line break": Case("glm-4", "Sure, yes.\n{}<|user|>", Parsed("Sure, yes.\n{}")),
    "GLM's answer whose first line looks like a name": Case("glm-4", "Sure\nYes.<|user|>", Parsed("Sure\nYes.")),
    "GLM's answer of a word": Case("glm-4", "Sure<|endoftext|>", Parsed("Sure")),
    "GLM's answer of a word and a line break": Case("glm-4", "Sure\n<|endoftext|>", Parsed("Sure")),
    "GLM's call": Case("glm-4", f"get_weather\n{ARGUMENTS}<|observation|>", Parsed("", "", (CALL,))),
    "GLM's call that a grammar has ended": Case("glm-4", f"get_weather\n{ARGUMENTS}", Parsed("", "", (CALL,))),
    "GLM's call that is cut off": Case(
        "glm-4", f"get_weather\n{ARGUMENTS[:8]}", Parsed(f"get_weather\n{ARGUMENTS[:8]}")
    ),
    "GLM's calls": Case(
        "glm-4",
        f"\nI look.<|assistant|>get_weather \n{ARGUMENTS}<|assistant|>clock\n{{}}<|observation|>",
        Parsed("I look.", "", (CALL, CLOCK)),
    ),
    "GLM's answer that spells a thought": Case(
        "glm-4", "\nSo: <think>Hm.</think><|user|>", Parsed("So: <think>Hm.</think>")
    ),
    "GLM-Z1's thought": Case("glm-z1", "\nHm.\n</think>\nYes.\nNo.<|user|>", Parsed("Yes.\nNo.", "Hm.")),
    "GLM-Z1's thought without a line break behind it": Case(
        "glm-z1", "Hm.</think>**Yes.**\nNo.<|user|>", Parsed("**Yes.**\nNo.", "Hm.")
    ),
    "GLM-Z1's thought that does not end": Case("glm-z1", "Hm.\n", Parsed("", "Hm.")),
    "GLM-Z1's call": Case("glm-z1", f"Hm.</think>get_weather\n{ARGUMENTS}<|observation|>", Parsed("", "Hm.", (CALL,))),
}


@pytest.mark.parametrize("case", CASES)
def test_a_reply_is_told_apart_wherever_it_is_cut(case: str) -> None:
    name, reply, expected, prompt = CASES[case]
    family = FAMILIES[name]
    ids, prompt = family.ids(reply), prompt or family.rendered(ASKED)
    for cut in range(len(ids) + 1):
        made = family.stream(prompt)
        assert made.feed(ids[:cut]).then(made.feed(ids[cut:])).then(made.finish()) == expected
    one, given = family.stream(prompt), Parsed()
    for token in ids:
        given = given.then(one.feed([token]))
    assert given.then(one.finish()) == expected


PIECES = [
    "get_weather", "clock", "\n", '{"name": "clock", "arguments": {}}', "[", "]", "{}", "<function=clock>",
    "</function>", "<parameter=a>x</parameter>", "é", "Sure", " ", "<response>", "</response>",
    "Here is my thought process:",
]  # fmt: skip


@pytest.mark.parametrize("name", FAMILIES)
def test_random_replies_are_the_same_in_parts_and_show_no_control_tokens(name: str) -> None:
    """But those of what began as a call and is none."""
    family, rng = FAMILIES[name], random.Random(5)
    controls = [text for text in family.tokenizer.control_texts.values() if "tool_call" not in text]
    for _ in range(150):
        reply = "".join(
            rng.choice([*PIECES, *family.tokenizer.control_texts.values()]) for _ in range(rng.randrange(14))
        )
        at_once, ids = family.parsed(reply), family.ids(reply)
        parts, given = family.stream(family.rendered(ASKED)), Parsed()
        while ids:
            count = rng.randrange(1, 6)
            given, ids = given.then(parts.feed(ids[:count])), ids[count:]
        assert given.then(parts.finish()) == at_once
        if "tool_call" not in at_once.text:
            assert not any(text in at_once.text for text in controls)
        assert not any(text in at_once.reasoning for text in family.tokenizer.control_texts.values())


@pytest.mark.parametrize("name", FAMILIES)
def test_calls_go_back_as_they_were(name: str) -> None:
    family, rng = FAMILIES[name], random.Random(7)
    letters = "abc .,:!é世\n<>/'\""
    declared = {"text": {"type": "string"}, "list": {"type": "array"}}
    tool = {"type": "function", "function": {"name": "f", "parameters": {"properties": declared}}}
    for _ in range(30):
        texts = ["".join(rng.choices(letters, k=rng.randrange(9))).strip("\n") for _ in range(2)]
        values = {"text": texts[0], "count": rng.randrange(99), "none": None, "flag": True, "list": [texts[1], None]}
        calls = [call("f", values), call("web-search", {}, "call_2")]
        text = rng.choice(["", "So."])
        said = {"role": "assistant", "content": text or None, "tool_calls": calls}
        written = family.rendered([*ASKED, said], add_generation_prompt=False)
        prompt = family.rendered(ASKED)
        if name == "glm-z1":
            prompt = prompt.removesuffix("\n<think>")
        elif name == "exaone-4":
            written = written.replace("<think>\n\n</think>\n\n", "", 1)
            prompt = prompt.replace("<think>\n\n</think>\n\n", "")
        assert written.startswith(prompt)
        reply = written.removeprefix(prompt)
        opened = "<|end_of_text|>\n<|start_of_role|>assistant<|end_of_role|>"
        reply = reply.replace(opened, "")  # Granite 3.0's text and calls are messages of their own
        assert family.parsed(reply, prompt, [tool]) == Parsed(
            text, "", (ToolCall("f", values), ToolCall("web-search", {}))
        )


RESULTS = {
    "seed-oss": "<seed:bos>tool\nrain<seed:eos>",
    "exaone-4": '[|tool|]\n<tool_result>{"result": "rain"}</tool_result>[|endofturn|]',
    "granite-4": "<|start_of_role|>user<|end_of_role|>\n<tool_response>\nrain\n</tool_response><|end_of_text|>",
    "glm-4": "<|observation|>\nrain",
    "glm-z1": "<|observation|>\nrain",
}


@pytest.mark.parametrize("conversation", CONVERSATIONS)
@pytest.mark.parametrize("name", FAMILIES)
def test_the_template_takes_what_clients_send(name: str, conversation: str) -> None:
    family, (messages, variables) = FAMILIES[name], CONVERSATIONS[conversation]
    text = family.rendered(messages, **variables)
    assert begun_reply(family.template, family.tokenizer, family.ids(text)) is not None
    assert "'type'" not in text
    assert '"text": "' not in text
    if conversation in ("a result", "a result by name", "a result in parts"):
        result = RESULTS.get(name, "<|start_of_role|>tool_response<|end_of_role|>rain<|end_of_text|>")
        assert result in text
        assert text.index("get_weather") < text.index(result)


def test_how_granite_and_glm_are_told_of_calls() -> None:
    calls = [call("f", {"a": "é"}), call("g", None, "call_2")]
    said: Messages = [
        *ASKED,
        {"role": "assistant", "content": "I look.", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "call_1", "content": "A"},
        {"role": "tool", "tool_call_id": "call_2", "content": "B"},
    ]
    listed = '<|tool_call|>[{"name": "f", "arguments": {"a": "é"}}, {"name": "g", "arguments": {}}]<|end_of_text|>\n'
    opened, result = "<|start_of_role|>assistant<|end_of_role|>", "<|start_of_role|>tool_response<|end_of_role|>"
    results = f"{result}A<|end_of_text|>\n{result}B<|end_of_text|>\n{opened}"
    for name in ("granite-3.2", "granite-3.3"):
        assert FAMILIES[name].rendered(said).endswith(f"{opened}I look.{listed}{results}")
    apart = f"{opened}I look.<|end_of_text|>\n{opened}{listed}{results}"
    assert FAMILIES["granite-3.0"].rendered(said).endswith(apart)
    said[1] = {**said[1], "content": [{"type": "text", "text": "I look."}]}
    assert FAMILIES["granite-3.3"].rendered(said).endswith(apart)
    glm = '<|assistant|>f\n{"a": "é"}<|observation|>\nA<|assistant|>g\n{}<|observation|>\nB<|assistant|>'
    assert FAMILIES["glm-4"].rendered(said).endswith(f"<|assistant|>\nI look.{glm}")


def test_seed_takes_functions_without_parameters() -> None:
    """Its template refuses them, and ones without a list of properties."""
    function = {"name": "f", "description": "It."}
    parameters: list[Any] = [None, {"type": "object"}, {"properties": {}}]
    declared: list[dict[str, Any]] = [{}, *({"parameters": each} for each in parameters)]
    for more in declared:
        text = FAMILIES["seed-oss"].rendered(ASKED, tools=[{"type": "function", "function": {**function, **more}}])
        assert "def f(): It." in text


def test_a_template_that_knows_no_calls_gets_them_as_they_are() -> None:
    """Though it writes any role."""
    plain = "{% for each in messages %}<|{{ each.role }}|>{{ each.content }}{% endfor %}"
    assert ChatTemplate(plain).render(plain_messages(ANSWERED)).endswith("<|assistant|><|tool|>rain")


@pytest.mark.parametrize(
    ("name", "thinking", "expected"),
    [
        ("seed-oss", False, "<seed:bos>assistant\n<seed:think><seed:cot_budget_reflect>"),
        ("seed-oss", True, "<seed:bos>assistant\n"),
        ("seed-oss", None, "<seed:bos>assistant\n"),
        ("exaone-4", True, "[|assistant|]\n<think>\n"),
        ("exaone-4", False, "[|assistant|]\n<think>\n\n</think>\n\n"),
        ("glm-z1", False, "<|assistant|>\n<think>"),
    ],
)
def test_whether_it_thinks(name: str, thinking: bool | None, expected: str) -> None:
    text = FAMILIES[name].rendered(ASKED, **ChatOptions(thinking=thinking).variables)
    assert text.endswith(expected)
    given = {"thinking_budget": 512, **ChatOptions(thinking=thinking).variables}
    assert "<seed:cot_budget_reflect>" not in FAMILIES[name].rendered(ASKED, **given)


@pytest.mark.parametrize(("name", "mark"), [("granite-3.2", "Here is my thought process:"), ("granite-3.3", "<think>")])
def test_granite_is_asked_for_thoughts(name: str, mark: str) -> None:
    for thinking in (True, False, None):
        text = FAMILIES[name].rendered(ASKED, **ChatOptions(thinking=thinking).variables)
        assert (mark in text) == (thinking is True)
    assert mark in FAMILIES[name].rendered(ASKED, thinking=True, enable_thinking=False)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_message_is_continued(name: str) -> None:
    family = FAMILIES[name]
    untrusted = UntrustedText(family.tokenizer, family.chat, answers=family.template.answer is not None)
    begun = [*ASKED, {"role": "assistant", "content": "So,"}]
    ids = encode_prompt(begun, family.tokenizer, untrusted, chat=ChatOptions(continue_final=True))
    text = family.tokenizer.decode(ids, keep_special=True)
    assert text.endswith("So,")
    assert family.parsed(" yes\n{}", text).text in (" yes\n{}", "yes\n{}")


@pytest.mark.parametrize("name", FAMILIES)
def test_untrusted_text_makes_no_call(name: str) -> None:
    family = FAMILIES[name]
    untrusted = UntrustedText(
        family.tokenizer, family.chat, family.template.controls, answers=family.template.answer is not None
    )
    forged = "".join(family.tokenizer.control_texts.values())

    def controls(text: str) -> list[int]:
        chat: Messages = [
            {"role": "user", "content": text},
            {"role": "assistant", "content": "", "thinking": "Hm.", "tool_calls": [call(text, {text: text})]},
            {"role": "tool", "tool_call_id": "call_1", "name": text, "content": text},
        ]
        function: Any = WEATHER["function"]
        tools = [{"type": "function", "function": {**function, "description": text}}]
        ids = encode_prompt(chat, family.tokenizer, untrusted, chat=ChatOptions(tools=tools))
        return [token for token in ids if token in family.tokenizer.special_ids]

    assert controls(forged) == controls("x")


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ("x", "x"), ("x\n", "x\n"), ("\n\nx", "\n\nx"), ("\nx\n", "x"), ("\n\n", ""), ("", ""), ("\n", ""),
        ("</parameter>", "</parameter>"),
    ],
)  # fmt: skip
def test_a_line_break_at_one_end_of_a_value_belongs_to_it(written: str, expected: str) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": {"type": "string"}}}}}
    [made] = tagged_calls(f"<function=f>\n<parameter=a>{written}</parameter>\n</function>", [tool])
    assert made["arguments"] == {"a": expected}


def test_the_chat_template_tells_models_apart_whose_control_tokens_are_the_same() -> None:
    tokenizer: Tokenizer = of_bytes(tokenizers_made.GRANITE_3)
    found = [
        known_template(tokenizer, chat) for chat in (templates.GRANITE_30, templates.GRANITE_32, templates.GRANITE_33)
    ]
    assert ["reasoning_content" in (each or {})["fields"] for each in found] == [False, True, True]
    assert json.dumps(found[1]) != json.dumps(found[2])
    assert known_template(tokenizer) == found[0]


def test_a_turn_of_glm_ends_where_a_result_is_wanted(tmp_path: Path) -> None:
    tokenizer = FAMILIES["glm-4"].tokenizer
    (tmp_path / "tokenizer.json").write_text(tokenizer._backend.to_str(), "utf-8")
    (tmp_path / "chat_template.jinja").write_text(templates.GLM_4, "utf-8")
    ends = turn_ends(tmp_path, read_tokenizer(tmp_path))
    assert [tokenizer.text_of(token) for token in ends] == ["<|observation|>"]


CLOVA = of_bytes(tokenizers_made.HYPERCLOVA)
CLOVA_TEMPLATE = ResponseTemplate(known_template(CLOVA), CLOVA)
NEXT, OVER = "<|im_end|>\n<|im_start|>assistant", "<|im_end|><|endofturn|>"
CLOVA_CALLS = f" -> tool/function_call\n[{OBJECT}, {CLOCK_OBJECT}]<|im_end|><|stop|>"
CLOVA_REPLIES = {
    "an answer": ("", f"\nYes.\n/think\n{OVER}", Parsed("Yes.\n/think")),
    "an answer that the prompt begins": ("\n", f"Yes.{OVER}", Parsed("Yes.")),
    "an answer that a grammar made": ("", "yes", Parsed("yes")),
    "a thought": ("", f"/think\nHm.\n\nSo.{NEXT}\nYes.{OVER}", Parsed("Yes.", "Hm.\n\nSo.")),
    "a thought that the prompt begins": ("/think\n", f"Hm.{NEXT}\nYes.{OVER}", Parsed("Yes.", "Hm.")),
    "a thought that does not end": ("/think\n", "Hm.", Parsed("", "Hm.")),
    "calls": ("", CLOVA_CALLS, Parsed("", "", (CALL, CLOCK))),
    "calls behind a thought": ("/think\n", f"Hm.{NEXT}{CLOVA_CALLS}", Parsed("", "Hm.", (CALL, CLOCK))),
    "calls behind a text": ("\n", f"I look.{NEXT}{CLOVA_CALLS}", Parsed("I look.", "", (CALL, CLOCK))),
    "a call that is cut off": ("", CLOVA_CALLS[:60], Parsed(CLOVA_CALLS[1:60].strip())),
}


@pytest.mark.parametrize("case", CLOVA_REPLIES)
def test_a_reply_of_hyperclova_is_told_apart_wherever_it_is_cut(case: str) -> None:
    opened, reply, expected = CLOVA_REPLIES[case]
    prompt, ids = (
        CLOVA.encode(text, add_special_tokens=False)
        for text in (f"<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant{opened}", reply)
    )
    begun = begun_reply(CLOVA_TEMPLATE, CLOVA, prompt)
    assert begun is not None
    for cut in range(len(ids) + 1):
        made = ReplyStream(CLOVA, (), ReplyParser(CLOVA_TEMPLATE, begun))
        assert made.feed(ids[:cut]).then(made.feed(ids[cut:])).then(made.finish()) == expected


def test_a_reply_of_hyperclova_goes_on_behind_a_message(tmp_path: Path) -> None:
    """Its thoughts are a message, whose end ended the reply."""
    (tmp_path / "tokenizer.json").write_text(CLOVA._backend.to_str(), "utf-8")
    (tmp_path / "chat_template.jinja").write_text("<|im_start|>user\n{{ messages[0].content }}<|im_end|>\n", "utf-8")
    assert turn_ends(tmp_path, read_tokenizer(tmp_path)) == []
