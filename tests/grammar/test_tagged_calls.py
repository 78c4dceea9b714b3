"""Calls between tags: what the schema of a tool allows, and what the reply parser reads of them."""

from __future__ import annotations

import random
from typing import Any

import jsonschema
import pytest

from ondevice.errors import GrammarError
from ondevice.grammar.matcher import Compiler, Matcher
from ondevice.grammar.response_format import ToolChoice
from ondevice.text.chat_template import ChatTemplate
from ondevice.text.reply_parser import ReplyParser, ResponseTemplate
from ondevice.text.reply_stream import ReplyStream
from ondevice.text.tokenizer import Tokenizer
from ondevice_export.response_templates import known_template
from tests.grammar.walks import (
    compiler,
    drawn_calls,
    end_ids,
    function,
    ids_in,
    ids_of,
    is_whole_reply,
    matcher,
    schema_format,
)
from tests.text.conversations import CLOCK, WEATHER, call
from tests.text.templates import LFM_25, QWEN_TAGGED
from tests.text.templates import SEED_OSS as SEED_TEMPLATE
from tests.text.test_tagged_calls import block
from tests.text.tokenizers_made import QWEN, SEED_OSS, chat_with

TOKENIZER = chat_with([*QWEN, "<eos>"])
TEMPLATE = ResponseTemplate(known_template(TOKENIZER), TOKENIZER)
ENDS = end_ids(TOKENIZER)


@pytest.fixture(scope="module")
def made() -> Compiler:
    return compiler(TOKENIZER, tags=ChatTemplate(QWEN_TAGGED).tags)


def of(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties}


def allowed(constraint: Matcher, text: str) -> bool:
    return is_whole_reply(TOKENIZER, constraint, text)


def read(token_ids: list[int], tools: list[Any]) -> list[tuple[str, Any]]:
    stream = ReplyStream(TOKENIZER, parser=ReplyParser(TEMPLATE, tools=tools))
    found = stream.feed(token_ids).then(stream.finish())
    assert found.text == ""
    return [(each.name, each.arguments) for each in found.tool_calls]


SCHEMAS: list[tuple[Any, list[dict[str, str]], list[dict[str, str]]]] = [
    (None, [{}], [{"a": "1"}]),
    ({"type": "object"}, [{}, {"a": "any\ntext"}, {"a": "1", "b-c": "[2]"}], [{"a": "</parameter>"}, {"a b": "1"}]),
    ({"type": "object", "additionalProperties": {"type": "integer"}}, [{"a": "1"}, {}], [{"a": "x"}, {"a": "True"}]),
    ({"type": "object", "additionalProperties": False}, [{}], [{"a": "1"}]),
    (
        {**of(b={"type": "integer"}, A={"type": "boolean"}, c={"type": "null"}), "required": ["b"]},
        [{"b": "1"}, {"b": "-3", "A": "True"}, {"b": "1", "A": "false", "c": "None"}, {"b": "1", "c": "null"}],
        [{}, {"A": "True"}, {"A": "True", "b": "1"}, {"b": "1.5"}, {"b": "1", "d": "2"}, {"b": "'1'"}, {"b": ""}],
    ),
    (
        of(a={"type": "string"}, b={"type": "string"}),
        [{"a": ""}, {"a": "x \"y\"\n\n<b>世</b>\n", "b": "\n"}, {"b": "</parameter\n</function>"}],
        [{"a": "x</parameter>y"}, {"b": "", "a": ""}],
    ),
    (of(a={"type": "string", "minLength": 1, "maxLength": 2}), [{"a": "世x"}, {"a": "x"}], [{"a": ""}, {"a": "abc"}]),
    (of(a={"type": "string", "maxLength": 20_000}), [{"a": "x"}, {"a": "<b>" * 99}], [{"a": "</parameter>"}]),
    (of(a={"type": "string", "pattern": "^(a|b/)+$"}), [{"a": "ab/"}], [{"a": "ac"}, {"a": ""}]),
    (of(a={"type": "string", "pattern": "^(?!b)."}), [{"a": "x"}], [{"c": "x"}]),
    (
        of(a={"enum": ["x y", 2, None, ["z"], {"k": True}]}, b={"const": "it's"}),
        [{"a": "x y", "b": "it's"}, {"a": "2"}, {"a": "None"}, {"a": "null"}, {"a": '["z"]'}, {"a": '{"k": true}'}],
        [{"a": "x"}, {"a": "3"}, {"b": '"it\'s"'}, {"a": '"x y"'}],
    ),
    (
        of(a={"type": "array", "items": {"type": "string"}, "minItems": 1, "maxItems": 2}),
        [{"a": '["x"]'}, {"a": '["x", "</parameter>"]'}],
        [{"a": "[]"}, {"a": '["x","y"]'}, {"a": "['x']"}, {"a": "[1]"}],
    ),
    (
        of(a={**of(b={"type": "integer"}, c={"type": "boolean"}), "required": ["c"]}),
        [{"a": '{"b": 1, "c": true}'}],
        [{"a": '{"c": True}'}, {"a": '{"b": 1}'}, {"a": "x"}],
    ),
    (of(a={"type": "object"}), [{"a": '{"x y": {}, "z": [null, 1.5, "q"]}'}], [{"a": "{x: 1}"}, {"a": "[]"}]),
    (of(a={"type": ["integer", "null"]}), [{"a": "1"}, {"a": "None"}], [{"a": "x"}]),
    (
        of(a={"anyOf": [{"type": "string", "pattern": "^x+$"}, {"type": "integer"}]}),
        [{"a": "xx"}, {"a": "7"}],
        [{"a": "y"}],
    ),
    (of(a={"type": "string", "enum": ["C", "F"], "nullable": True}), [{"a": "C"}, {"a": "null"}], [{"a": "K"}]),
    (of(a={"type": "integer", "minimum": 1, "maximum": 20}), [{"a": "20"}], [{"a": "21"}, {"a": "0"}]),
    (
        {**of(tree={"$ref": "#/$defs/node"}), "$defs": {"node": of(left={"$ref": "#/$defs/node"}, n={"type": "null"})}},
        [{"tree": '{"left": {"left": {}, "n": null}}'}],
        [{"tree": '{"left": 1}'}],
    ),
    (
        {**of(a={"$ref": "#/$defs/a"}), "$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}, {"type": "integer"}]}}},
        [{"a": "1"}],
        [{"a": "x"}],
    ),
    ({"$ref": "#/$defs/a", "$defs": {"a": of(b={"type": "null"})}}, [{}, {"b": "None"}], [{"b": "1"}]),
    ({"anyOf": [of(a={"type": "null"}), of(b={"type": "null"})]}, [{}, {"a": "null"}], [{"a": "null", "b": "null"}]),
]  # fmt: skip


@pytest.mark.parametrize(("parameters", "good", "bad"), SCHEMAS, ids=str)
def test_arguments_keep_to_the_declaration(
    made: Compiler, parameters: Any, good: list[dict[str, str]], bad: list[dict[str, str]]
) -> None:
    def is_call(arguments: dict[str, str]) -> bool:
        return allowed(matcher(made, tool_choice="required", tools=[tool]), block("f", **arguments))

    tool = function(parameters)
    assert [each for each in good if not is_call(each)] == []
    assert [each for each in bad if is_call(each)] == []
    for each in good:
        [(name, arguments)] = read(ids_of(TOKENIZER, block("f", **each)), [tool])
        assert (name, list(arguments)) == ("f", list(each))


def test_a_value_is_any_text_without_the_tag_behind_it(made: Compiler) -> None:
    rng, tag = random.Random(1), "</parameter>"
    tool = function({**of(a={"type": "string"}), "required": ["a"]})
    for _ in range(200):
        cuts = (rng.randrange(len(tag) + 1) for _ in range(rng.randrange(9)))
        text = "".join(rng.choice([tag[:cut], tag[cut:], "<", "x", "\n"]) for cut in cuts)
        said = block("f", a=text)
        assert allowed(matcher(made, tool_choice="required", tools=[tool]), said) == (tag not in text)
        if tag not in text:
            assert read(ids_of(TOKENIZER, said), [tool]) == [("f", {"a": text})]


def test_whatever_is_drawn_is_a_call_that_keeps_to_the_schema(made: Compiler) -> None:
    found = 0
    for schema, said in drawn_calls(made, ENDS, 120):
        found += 1
        [(name, arguments)] = read(said, [function(schema)])
        assert name == "f"
        jsonschema.validate(arguments, schema)
        assert list(arguments) == [each for each in schema["properties"] if each in arguments]
    assert found > 12, "too few walks found an end"


def test_a_call_is_written_as_the_template_writes_it(made: Compiler) -> None:
    arguments = {"city": "Zürich,\nit's", "days": None, "units": "C"}
    said = {"role": "assistant", "content": "", "tool_calls": [call("get_weather", arguments), call("clock", {})]}
    text = ChatTemplate(QWEN_TAGGED).render([{"role": "user", "content": "?"}, said], add_generation_prompt=False)
    written = text[text.index("<tool_call>") : text.rindex("<|im_end|>")]
    assert allowed(matcher(made, tool_choice="required", tools=[WEATHER, CLOCK]), written)


CLOCKS = block("clock")
CALLS = f"{CLOCKS}\n{block('get_weather', city='Bern')}"


@pytest.mark.parametrize(
    ("choice", "good", "bad"),
    [
        (
            "auto",
            ["", "Hello.", CALLS, f"I look. {CLOCKS}", f"<think>Hm.</think>{CALLS}"],
            [block("gone"), "<tool_call>\n</tool_call>", "Hi<tool_call>\n<function=clock>", block("get_weather")],
        ),
        ("required", [CALLS, CLOCKS], ["", "Hello.", f"Hi {CALLS}", f"{CLOCKS}{CLOCKS}", f"{CALLS}So."]),
        ({"type": "function", "function": {"name": "clock"}}, [CLOCKS], [CALLS, f"{CLOCKS}\n{CLOCKS}"]),
    ],
    ids=["auto", "required", "one"],
)  # fmt: skip
def test_what_a_choice_of_tools_allows(made: Compiler, choice: Any, good: list[str], bad: list[str]) -> None:
    def is_reply(text: str) -> bool:
        return allowed(matcher(made, tool_choice=choice, tools=[WEATHER, CLOCK]), text)

    assert [text for text in good if not is_reply(text)] == []
    assert [text for text in bad if is_reply(text)] == []
    assert made.forbidden(ToolChoice.of("none", [CLOCK])) == ids_of(TOKENIZER, "<tool_call>")


def test_an_answer_of_a_form_or_calls(made: Compiler) -> None:
    form = schema_format(of(a={"type": "integer"}))
    for choice in ("auto", None):
        for text in ('{"a": 1}', CALLS):
            assert allowed(matcher(made, form, tool_choice=choice, tools=[WEATHER, CLOCK]), text)
        assert not allowed(matcher(made, form, tool_choice=choice, tools=[WEATHER]), "Yes.")


@pytest.mark.parametrize("required", [True, False])
def test_a_prompt_may_have_begun_the_thoughts_or_ended_them(made: Compiler, required: bool) -> None:
    form = None if required else {"type": "choice", "choice": ["yes"]}
    options: dict[str, Any] = {"tool_choice": "required" if required else None, "tools": [WEATHER, CLOCK]}
    for thinking, prompt, before in (
        (True, "<think>\n", "Hm.\n</think>\n\n"),
        (None, "<think>\n", "Hm.\n</think>\n\n"),
        (False, "<think>\n\n</think>\n\n", ""),
    ):
        options |= {"thinking": thinking, "prompt_ids": ids_of(TOKENIZER, f"<|im_start|>assistant\n{prompt}")}
        for text in (CALLS,) if required else (CALLS, "yes"):
            assert allowed(matcher(made, form, **options), f"{before}{text}")
            assert not allowed(matcher(made, form, **options), f"{before}Hm.{text}")


def test_names_and_keys_of_a_call_are_forced(made: Compiler) -> None:
    """And drafted, up to the first value; no control token is allowed in a value."""
    found = matcher(made, tool_choice={"type": "function", "function": {"name": "get_weather"}}, tools=[WEATHER])
    forced: list[int] = []
    while (token := found.forced(forced)) is not None:
        forced.append(token)
    assert TOKENIZER.decode(forced, keep_special=True) == ("<tool_call>\n<function=get_weather>\n<parameter=city>\n")
    said = [*forced, *ids_of(TOKENIZER, "a")]
    assert found.take(said) == len(said)
    assert not set(ids_in(found.mask([]))) & set(TOKENIZER.control_texts)


def test_a_reference_that_leads_nowhere(made: Compiler) -> None:
    with pytest.raises(GrammarError, match="which \\$ref names"):
        matcher(made, tool_choice="required", tools=[function(of(a={"$ref": "#/gone"}))])


def test_large_declarations_stay_small(made: Compiler) -> None:
    """Each reference leads to one rule: written out they would be 250,000 alternatives."""
    several = {"anyOf": [{"type": "null"}] * 500}
    properties = {f"p{n}": {"anyOf": [{"$ref": "#/$defs/a"}]} for n in range(500)}
    tool = function({**of(**properties), "$defs": {"a": several}})
    assert allowed(matcher(made, tool_choice="required", tools=[tool]), block("f", p7="null"))


def test_the_chat_template_tells_which_calls_a_model_makes() -> None:
    assert ChatTemplate(QWEN_TAGGED).tags
    assert not ChatTemplate(LFM_25).tags
    plain = compiler(TOKENIZER)
    written = '<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>'
    assert allowed(matcher(plain, tool_choice="required", tools=[CLOCK]), written)
    assert not allowed(matcher(plain, tool_choice="required", tools=[CLOCK]), CLOCKS)


def seed_block(name: str, **values: str) -> str:
    written = "".join(f"<parameter={key}>{value}</parameter>\n" for key, value in values.items())
    return f"<seed:tool_call>\n<function={name}>\n{written}</function>\n</seed:tool_call>"


@pytest.fixture(scope="module")
def seed() -> tuple[Tokenizer, Compiler]:
    tokenizer = chat_with([*SEED_OSS, "<eos>"])
    return tokenizer, compiler(tokenizer)


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        ({"type": "string"}, ["", "x\n\n<b>", "x</parameter"], ["\n", "\nx", "x</parameter>y"]),
        ({"type": "string", "maxLength": 2}, ["x\n", "世x"], ["\nx", "abc"]),
        ({"type": ["integer", "null"]}, ["1", "None", "null"], ["x", "\n1"]),
        ({"enum": ["x y", 2, ["z"]]}, ["x y", "2", '["z"]'], ["x", '"x y"']),
        ({"type": "array", "items": {"type": "string"}}, ['["\\n"]', "[]"], ["['x']", "x"]),
    ],
    ids=str,
)
def test_seeds_values_stand_in_the_line_of_their_tags(
    seed: tuple[Tokenizer, Compiler], schema: Any, good: list[str], bad: list[str]
) -> None:
    tokenizer, made = seed
    tool = function({**of(a=schema), "required": ["a"]})

    def is_call(value: str) -> bool:
        found = matcher(made, tool_choice="required", tools=[tool])
        return is_whole_reply(tokenizer, found, seed_block("f", a=value))

    assert [each for each in good if not is_call(each)] == []
    assert [each for each in bad if is_call(each)] == []
    template = ResponseTemplate(known_template(tokenizer), tokenizer)
    for each in good:
        stream = ReplyStream(tokenizer, parser=ReplyParser(template, tools=[tool]))
        found = stream.feed(ids_of(tokenizer, seed_block("f", a=each))).then(stream.finish())
        [made_call] = found.tool_calls
        if schema.get("type") == "string":
            assert made_call.arguments == {"a": each}


def test_whatever_is_drawn_for_seed_is_a_call_that_keeps_to_the_schema(seed: tuple[Tokenizer, Compiler]) -> None:
    tokenizer, made = seed
    template, found = ResponseTemplate(known_template(tokenizer), tokenizer), 0
    for schema, said in drawn_calls(made, end_ids(tokenizer), 120):
        found += 1
        stream = ReplyStream(tokenizer, parser=ReplyParser(template, tools=[function(schema)]))
        parts = stream.feed(said).then(stream.finish())
        [made_call] = parts.tool_calls
        assert (made_call.name, parts.text) == ("f", "")
        jsonschema.validate(made_call.arguments, schema)
    assert found > 12, "too few walks found an end"


def test_seeds_call_is_written_as_its_template_writes_it(seed: tuple[Tokenizer, Compiler]) -> None:
    tokenizer, made = seed
    calls = [call("get_weather", {"city": "Zürich,\nit's", "days": None, "units": "C"}), call("clock", {})]
    said = {"role": "assistant", "content": "", "tool_calls": calls}
    text = ChatTemplate(SEED_TEMPLATE).render([{"role": "user", "content": "?"}, said], add_generation_prompt=False)
    written = text[text.index("<seed:tool_call>") : text.rindex("<seed:eos>")]
    assert is_whole_reply(tokenizer, matcher(made, tool_choice="required", tools=[WEATHER, CLOCK]), written)
