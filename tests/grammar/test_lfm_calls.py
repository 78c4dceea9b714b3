"""Calls of LFM2 as in Python: what the schema of a tool allows, and what the reply parser reads of them."""

from __future__ import annotations

from typing import Any

import jsonschema
import pytest

from ondevice.grammar.matcher import Compiler, Matcher
from ondevice.text.chat_template import ChatTemplate
from ondevice_export.response_templates import known_template
from tests.grammar.walks import (
    calls_and_text,
    compiler,
    drawn_calls,
    end_ids,
    function,
    ids_in,
    ids_of,
    is_whole_reply,
    matcher,
)
from tests.text.conversations import CLOCK, WEATHER, call
from tests.text.templates import LFM_25
from tests.text.tokenizers_made import LFM, THINK, chat_with

TOKENIZER = chat_with([*LFM, *THINK, "<eos>"])
TEMPLATE = known_template(TOKENIZER)
ENDS = end_ids(TOKENIZER)


@pytest.fixture(scope="module")
def made() -> Compiler:
    return compiler(TOKENIZER)


def block(calls: str) -> str:
    return f"<|tool_call_start|>[{calls}]<|tool_call_end|>"


def allowed(constraint: Matcher, text: str) -> bool:
    return is_whole_reply(TOKENIZER, constraint, text)


def of(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties}


SCHEMAS: list[tuple[Any, list[str], list[str]]] = [
    (None, [""], ["a=1", "1"]),
    ({"type": "object"}, ["", "a=1, b={\"c\": [None, true, 'x']}"], ["1", "a", "a=x", "a=1,b=2", '"a"=1']),
    ({"type": "object", "additionalProperties": {"type": "integer"}}, ["a=1, b=2"], ["a=True"]),
    (
        {**of(b={"type": "integer"}, A={"type": "boolean"}, c={"type": "null"}), "required": ["b"]},
        ["b=1", "b=1, A=True", "b=-3, A=false, c=None", "b=1, c=null"],
        ["", "A=True", "A=True, b=1", "b=1, ", "b=1.5", "b = 1", "b=1, d=2", "b='1'"],
    ),
    (
        of(a={"type": "string"}),
        ["a=''", "a='x \"y\"\n世'", "a='It's l'été'", r"a='It\'s'", 'a="It\'s"', r'a="\n\"é"'],
        ["a=x", "a='x", "a='x', b='y'", "a='x'1", r"a='\d'", 'a="\n"', "a='''x'''"],
    ),
    (of(a={"type": "string", "minLength": 1, "maxLength": 2}), ["a='世x'", 'a="x"'], ["a=''", "a='abc'", 'a="abc"']),
    (
        of(a={"type": "string", "pattern": "^(a|b/)+$"}, b={"type": "string", "pattern": "x"}),
        ["a='ab/'", 'a="ab/"', "b='-x-'", 'b="-x-"'],
        ["a='ac'", 'a="ac"', "b='y'", 'b="y"', "a='a'a'"],
    ),
    (of(a={"type": "string", "pattern": "^(?!b)."}), ["a='x'", 'a="x"'], ["a=1"]),
    (of(a={"type": "string", "minLength": "1", "maxLength": None, "pattern": 3}), ["a='x'", 'a="x"'], ["a=1"]),
    (
        of(a={"enum": ["x y", 2, None, ["z"], {"k": True}]}, b={"const": "it's"}, c={"enum": ["a\\b"]}),
        ["a='x y'", 'a="x y"', "a=2", "a=None", "a=null", "a=['z']", 'a={"k": True}', 'b="it\'s"', r'c="a\\b"'],
        ["a='x'", "a=3", "b='it's'", r"c='a\b'"],
    ),
    (
        of(a={"type": "array", "items": {"type": "integer"}, "minItems": 1, "maxItems": 2}),
        ["a=[1]", "a=[1, 2]"],
        ["a=[]", "a=[1,2]", "a=[1, 2, 3]", "a=[True]"],
    ),
    (of(a={"type": "array", "prefixItems": [{"type": "null"}, {}], "items": False}), ["a=[None, 1]"], ["a=[None]"]),
    (
        of(a={**of(b={"type": "integer"}, c={"type": "string"}), "required": ["c"]}),
        ["a={\"c\": 'x'}", 'a={"b": 1, "c": "x"}'],
        ["a={'c': 'x'}", 'a={"b": 1}', 'a={"c":"x"}', 'a={c: "x"}', "a=(c='x')"],
    ),
    (of(a={"type": "object"}), ["a={}", 'a={"x y": {}, "z": 1}'], ["a={x: 1}", "a=()"]),
    (of(a={"type": ["integer", "null"]}, b={"type": "boolean", "nullable": True}), ["a=None, b=None"], ["a=True"]),
    (
        {**of(tree={"$ref": "#/$defs/node"}), "$defs": {"node": of(left={"$ref": "#/$defs/node"}, n={"type": "null"})}},
        ['tree={"left": {"left": {}, "n": None}}'],
        ['tree={"left": 1}', "tree=(left={})"],
    ),
    ({"$ref": "#/$defs/a", "$defs": {"a": of(b={"type": "null"})}}, ["", "b=None"], ["b=1", '{"b": None}']),
    ({"anyOf": [of(a={"type": "null"}), of(b={"type": "null"})]}, ["", "a=None", "b=None"], ["a=None, b=None"]),
]


@pytest.mark.parametrize(("parameters", "good", "bad"), SCHEMAS, ids=str)
def test_arguments_keep_to_the_declaration(made: Compiler, parameters: Any, good: list[str], bad: list[str]) -> None:
    def is_call(arguments: str) -> bool:
        constraint = matcher(made, tool_choice="required", tools=[function(parameters)])
        return allowed(constraint, block(f"f({arguments})"))

    assert [each for each in good if not is_call(each)] == []
    assert [each for each in bad if is_call(each)] == []
    for each in good:
        calls, text = calls_and_text(TOKENIZER, TEMPLATE, ids_of(TOKENIZER, block(f"f({each})")))
        assert (len(calls), text) == (1, "")


def test_whatever_is_drawn_is_a_call_that_keeps_to_the_schema(made: Compiler) -> None:
    found = 0
    for schema, said in drawn_calls(made, ENDS, 80):
        found += 1
        calls, text = calls_and_text(TOKENIZER, TEMPLATE, said)
        assert text == ""
        [(name, arguments)] = calls
        assert name == "f"
        jsonschema.validate(arguments, schema)
        assert list(arguments) == [each for each in schema["properties"] if each in arguments]
    assert found > 12, "too few walks found an end"


def test_a_call_is_written_as_the_template_writes_it(made: Compiler) -> None:
    arguments = {"city": "Zürich, it's", "days": 3, "units": "C"}
    said = {"role": "assistant", "content": "", "tool_calls": [call("get_weather", arguments), call("clock", {})]}
    text = ChatTemplate(LFM_25).render([{"role": "user", "content": "?"}, said], add_generation_prompt=False)
    written = text[text.index("<|tool_call_start|>") : text.rindex("<|im_end|>")]
    assert allowed(matcher(made, tool_choice="required", tools=[WEATHER, CLOCK]), written)


CALLS = block("clock(), get_weather(city='Bern')")


@pytest.mark.parametrize(
    ("choice", "good", "bad"),
    [
        (
            "auto",
            ["", "Hello.", CALLS, f"I look. {block('clock()')}{CALLS}Well", f"<think>Hm.</think>{CALLS}"],
            [block("gone()"), block(""), "Hi<|tool_call_start|>[clock(", block("clock(1)")],
        ),
        ("required", [CALLS, block("clock()")], ["", "Hello.", f"Hi {CALLS}", CALLS * 2, f"{CALLS}So."]),
        ({"type": "function", "function": {"name": "clock"}}, [block("clock()")], [CALLS, block("clock(), clock()")]),
    ],
    ids=["auto", "required", "one"],
)
def test_what_a_choice_of_tools_allows(made: Compiler, choice: Any, good: list[str], bad: list[str]) -> None:
    def is_reply(text: str) -> bool:
        return allowed(matcher(made, tool_choice=choice, tools=[WEATHER, CLOCK]), text)

    assert [text for text in good if not is_reply(text)] == []
    assert [text for text in bad if is_reply(text)] == []


def test_thoughts_come_before_what_is_limited(made: Compiler) -> None:
    answer = {"type": "choice", "choice": ["yes"]}
    for text in ("yes", CALLS):
        options: dict[str, Any] = {"tools": [WEATHER, CLOCK], "thinking": True}
        assert allowed(matcher(made, answer, **options), text)
        assert allowed(matcher(made, answer, **options), f"<think>Hm.</think>\n\n{text}")
        assert not allowed(matcher(made, answer, tools=[WEATHER, CLOCK]), f"<think>Hm.</think>\n\n{text}")


def test_names_and_keys_of_a_call_are_forced(made: Compiler) -> None:
    """And drafted, up to the first value; no control token is allowed in a string."""
    found = matcher(made, tool_choice={"type": "function", "function": {"name": "get_weather"}}, tools=[WEATHER])
    forced: list[int] = []
    while (token := found.forced(forced)) is not None:
        forced.append(token)
    assert TOKENIZER.decode(forced, keep_special=True) == "<|tool_call_start|>[get_weather(city="
    said = [*forced, *ids_of(TOKENIZER, "'a")]
    assert found.take(said) == len(said)
    assert not set(ids_in(found.mask([]))) & set(TOKENIZER.control_texts)
