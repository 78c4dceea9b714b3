"""Calls in Gemma's syntax: what the schema of a tool allows, what its reply parser reads, and what a choice wants."""

from __future__ import annotations

import json
import re
from typing import Any

import jsonschema
import pytest
from tokenizers import Tokenizer as Backend

from ondevice.errors import GrammarError, UsageError
from ondevice.grammar.matcher import Compiler, Matcher
from ondevice.grammar.response_format import ToolChoice
from ondevice.text.chat_template import ChatTemplate
from ondevice.text.tokenizer import Tokenizer
from ondevice_export.response_templates import GEMMA_4 as RESPONSES
from tests.grammar.walks import ENDS as END_TEXTS
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
from tests.text.conversations import CLOCK, WEATHER
from tests.text.templates import GEMMA_4
from tests.text.tokenizers_made import gemma_chat, gemma_like

TOKENIZER = gemma_chat()
ENDS = end_ids(TOKENIZER)
WEATHER_CALL = '<|tool_call>call:get_weather{city:<|"|>Zürich<|"|>,days:2}<tool_call|>'
CLOCK_CALL = "<|tool_call>call:clock{}<tool_call|>"
THOUGHT = "<|channel>thought\nhm <|turn> hm<channel|>"


def ids(text: str) -> list[int]:
    return ids_of(TOKENIZER, text)


def is_whole(constraint: Matcher, text: str) -> bool:
    return is_whole_reply(TOKENIZER, constraint, text)


def parsed(token_ids: list[int]) -> tuple[list[tuple[str, Any]], str]:
    return calls_and_text(TOKENIZER, RESPONSES, token_ids)


SCHEMAS: list[tuple[Any, list[str], list[str]]] = [
    (None, ["{}"], ["{a:1}"]),
    ({"type": "object"}, ["{}", '{a:1,b:[{c:<|"|>x<|"|>},null,true]}'], ["{a:}", '{"a":1}', "{a:x}"]),
    ({"type": "object", "properties": {}}, ["{}"], ["{a:1}"]),
    ({"type": "object", "additionalProperties": {"type": "integer"}}, ["{a:1,b:2}"], ["{a:true}"]),
    ({"type": "object", "additionalProperties": False}, ["{}"], ["{a:1}"]),
    (
        {"properties": {"b": {"type": "integer"}, "A": {"type": "boolean"}, "c": {"type": "null"}}, "required": ["b"]},
        ["{b:1}", "{A:true,b:1}", "{b:1,c:null}", "{A:false,b:-3,c:null}"],
        ["{}", "{A:true}", "{b:1,A:true}", "{b:1,}", "{b:1,d:2}", "{b:1.5}", "{b: 1}"],
    ),
    (
        {"properties": {"a": {"type": "integer"}, "b": {"type": "integer"}, "c": {"type": "integer"}}},
        ["{}", "{a:1}", "{c:1}", "{a:1,c:3}", "{b:2,c:3}", "{a:1,b:2,c:3}"],
        ["{,c:1}", "{c:1,a:1}", "{a:1,,c:1}"],
    ),
    (
        {"properties": {"a": {"type": "string"}}},
        ['{a:<|"|>x {"y":1}, <b>\n世<|"|>}', '{a:<|"|><|"|>}'],
        ['{a:"x"}', "{a:x}"],
    ),
    (
        {"properties": {"a": {"type": "string", "minLength": 1, "maxLength": 2}}},
        ['{a:<|"|>世x<|"|>}'],
        ['{a:<|"|><|"|>}', '{a:<|"|>abc<|"|>}'],
    ),
    (
        {"properties": {"a": {"type": "string", "pattern": "^(a|b/)+$"}, "b": {"type": "string", "pattern": "x"}}},
        ['{a:<|"|>ab/<|"|>}', '{b:<|"|>-x-<|"|>}'],
        ['{a:<|"|>ac<|"|>}', '{b:<|"|>y<|"|>}'],
    ),
    (
        {"properties": {"a": {"enum": ["x y", 2, None, ["z"], {"k": True}]}, "b": {"const": 'q"'}}},
        ['{a:<|"|>x y<|"|>}', "{a:2}", "{a:null}", '{a:[<|"|>z<|"|>]}', "{a:{k:true}}", '{b:<|"|>q"<|"|>}'],
        ['{a:<|"|>x<|"|>}', "{a:3}", '{b:<|"|>q<|"|>}'],
    ),
    (
        {"properties": {"a": {"type": "array", "items": {"type": "integer"}, "minItems": 1, "maxItems": 2}}},
        ["{a:[1]}", "{a:[1,2]}"],
        ["{a:[]}", "{a:[1,2,3]}", "{a:[true]}"],
    ),
    ({"properties": {"a": {"type": "array", "maxItems": 0}}}, ["{a:[]}"], ["{a:[1]}"]),
    (
        {
            "properties": {
                "a": {"type": "array", "prefixItems": [{"type": "integer"}, {"type": "null"}], "items": False}
            }
        },
        ["{a:[1,null]}"],
        ["{a:[1]}", "{a:[1,null,1]}"],
    ),
    (
        {
            "properties": {
                "a": {"type": "array", "prefixItems": [{"type": "integer"}, {"type": "null"}], "maxItems": 2},
                "b": {"type": "array", "prefixItems": [{"type": "null"}], "minItems": 2, "maxItems": 3},
                "c": {"type": "array", "prefixItems": [{"type": "null"}], "maxItems": 0},
            }
        },
        ["{a:[1,null]}", "{b:[null,1]}", "{b:[null,1,2]}", "{c:[]}"],
        ["{a:[1]}", "{a:[1,null,1]}", "{b:[null]}", "{b:[null,1,2,3]}", "{c:[null]}"],
    ),
    ({"properties": {"a": {"type": "integer", "minimum": 3, "maximum": 12}}}, ["{a:3}", "{a:12}"], ["{a:2}", "{a:13}"]),
    ({"properties": {"a": {"type": "number"}}}, ["{a:1}", "{a:-0.5}"], ["{a:.5}"]),
    ({"properties": {"a": {"type": ["integer", "null"]}}}, ["{a:1}", "{a:null}"], ["{a:true}"]),
    ({"properties": {"a": {"type": "integer", "nullable": True}}}, ["{a:1}", "{a:null}"], ["{a:true}"]),
    ({"properties": {"a": {"anyOf": [{"type": "integer"}, {"type": "boolean"}]}}}, ["{a:1}", "{a:true}"], ["{a:null}"]),
    ({"properties": {"a": {"allOf": [{"type": "null"}]}, "b": {"allOf": [{}, {}]}}}, ["{a:null}", "{b:1}"], ["{a:1}"]),
    (
        {
            "properties": {"tree": {"$ref": "#/$defs/node"}},
            "$defs": {"node": {"properties": {"left": {"$ref": "#/$defs/node"}, "n": {"type": "integer"}}}},
        },
        ["{tree:{left:{left:{n:1}},n:2}}"],
        ["{tree:{left:1}}"],
    ),
    (  # as zod-to-json-schema refers to a schema that it has written before
        {
            "properties": {
                "a": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
                "b": {"$ref": "#/properties/a/anyOf/0"},
                "c": {"$ref": "#/$defs/x%20%C3%A9"},
            },
            "$defs": {"x é": {"type": "boolean"}},
        },
        ["{b:1}", "{c:true}"],
        ["{b:null}", "{c:1}"],
    ),
    (
        {
            "properties": {
                "a": {"type": "string", "pattern": "^$|^\\d+$"},
                "b": {"type": "string", "pattern": "^a\\\\$"},
            }
        },
        ['{a:<|"|><|"|>}', '{a:<|"|>12<|"|>}', '{b:<|"|>a\\<|"|>}'],
        ['{a:<|"|>x<|"|>}', '{a:<|"|>٣<|"|>}', '{b:<|"|>a<|"|>}'],
    ),
    (
        {"properties": {"a": {"type": "string", "pattern": "^(?!b)."}, "b": {"type": "string", "pattern": "(^a$)|b"}}},
        ['{a:<|"|>x<|"|>}', '{b:<|"|>a<|"|>}'],
        ["{a:1}"],
    ),
    (
        {"properties": {"a": {"type": "string", "pattern": "^[^[]*$"}, "b": {"type": "string", "pattern": "a{,3}"}}},
        ['{a:<|"|>x<|"|>}', '{b:<|"|>b<|"|>}'],
        ["{a:1}"],
    ),
    (
        {"properties": {"a": {"type": "string", "pattern": "^^a|b$$"}, "b": {"type": "string", "pattern": "(?i)^c"}}},
        ['{a:<|"|>ac<|"|>}', '{a:<|"|>cb<|"|>}', '{b:<|"|>Cd<|"|>}'],
        ['{a:<|"|>cac<|"|>}'],
    ),
    (
        {"$ref": "#/$defs/a", "$defs": {"a": {"type": "object", "properties": {"b": {"type": "null"}}}}},
        ["{}", "{b:null}"],
        ["{b:1}", "{c:null}"],
    ),
    (
        {
            "type": "object",
            "properties": {"a": {"type": "null"}, "b": {"type": "null"}},
            "anyOf": [{"required": ["a"]}, {"required": ["b"]}],
        },
        ["{a:null}", "{a:null,b:null}"],
        ["{c:null}", "null", "[]", "1"],
    ),
    (
        {
            "anyOf": [{"$ref": "#/$defs/a"}, {"type": "null"}],
            "$defs": {"a": {"oneOf": [{"properties": {"b": {"$ref": "#/$defs/a"}}}, {"type": "string"}]}},
        },
        ["{}", "{b:{b:{}}}", '{b:<|"|>x<|"|>}'],
        ["null", '<|"|>x<|"|>', "{b:null}"],
    ),
    ({"properties": {"a": True, "b": {"uniqueItems": True}}}, ["{a:[1,1],b:[1,1]}"], ["{c:1}"]),
    (
        {"properties": {"a": {"type": [{}, ["null"]]}, "b": {"type": "integer"}}, "required": [["a"], {}, "b"]},
        ["{b:1}", "{a:[null],b:1}"],
        ["{}", "{a:1}"],
    ),
]


@pytest.mark.parametrize(("parameters", "good", "bad"), SCHEMAS, ids=str)
def test_arguments_keep_to_the_declaration(made: Compiler, parameters: Any, good: list[str], bad: list[str]) -> None:
    def is_call(arguments: str) -> bool:
        constraint = matcher(made, tool_choice="required", tools=[function(parameters)])
        return is_whole(constraint, f"<|tool_call>call:f{arguments}<tool_call|>")

    assert [each for each in good if not is_call(each)] == []
    assert [each for each in bad if is_call(each)] == []


def test_whatever_is_drawn_is_a_call_that_keeps_to_the_schema(made: Compiler) -> None:
    found = 0
    for schema, said in drawn_calls(made, ENDS, 80):
        found += 1
        calls, text = parsed(said)
        assert text == ""
        [(name, arguments)] = calls
        assert name == "f"
        jsonschema.validate(arguments, schema)
        assert list(arguments) == sorted(arguments, key=str.lower)
    assert found > 12, "too few walks found an end"


def test_a_call_is_written_as_the_template_writes_it(made: Compiler) -> None:
    arguments = {"city": "Zürich <b>", "units": "C", "days": 3}
    asked: list[dict[str, Any]] = [{"role": "user", "content": "?"}]
    called = {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"function": {"name": "get_weather", "arguments": arguments}}],
    }
    text = ChatTemplate(GEMMA_4).render([*asked, called])
    call = text[text.index("<|tool_call>") : text.index("<tool_call|>") + len("<tool_call|>")]
    assert is_whole(matcher(made, tool_choice="required", tools=[WEATHER]), call)


@pytest.mark.parametrize(
    ("choice", "good", "bad"),
    [
        (
            "auto",
            ["", "Hello.", WEATHER_CALL, f"I look. {CLOCK_CALL}{WEATHER_CALL}Well", f"{THOUGHT}Hi.{CLOCK_CALL}"],
            ["<|tool_call>call:gone{}<tool_call|>", "<|tool_call>", "Hi<|tool_call>call:clock{a}"],
        ),
        (
            "required",
            [WEATHER_CALL, f"{CLOCK_CALL}{WEATHER_CALL}"],
            ["", "Hello.", f"Hi {CLOCK_CALL}", f"{THOUGHT}{CLOCK_CALL}"],
        ),
        ({"type": "function", "function": {"name": "clock"}}, [CLOCK_CALL], [WEATHER_CALL, CLOCK_CALL * 2, ""]),
    ],
    ids=["auto", "required", "one"],
)  # fmt: skip
def test_what_a_choice_of_tools_allows(made: Compiler, choice: Any, good: list[str], bad: list[str]) -> None:
    def allowed(text: str) -> bool:
        return is_whole(matcher(made, tool_choice=choice, tools=[WEATHER, CLOCK]), text)

    assert [text for text in good if not allowed(text)] == []
    assert [text for text in bad if allowed(text)] == []


def test_thoughts_come_before_what_is_limited(made: Compiler) -> None:
    answer = {"type": "choice", "choice": ["yes"]}

    def allowed(text: str, **about: Any) -> bool:
        return is_whole(matcher(made, answer, **about), text)

    assert allowed("yes", thinking=True)
    assert allowed(f"{THOUGHT}yes", thinking=True)
    assert not allowed(f"{THOUGHT}no", thinking=True)
    assert not allowed(f"{THOUGHT}yes")
    begun = ids("<|turn>model\n<|channel>thought\n")
    assert allowed("hm<channel|>yes", prompt_ids=begun, thinking=True)
    assert not allowed("yes", prompt_ids=begun, thinking=True)
    closed = [*begun, *ids("<channel|>")]
    assert allowed("yes", prompt_ids=closed)
    required: dict[str, Any] = {"tool_choice": "required", "tools": [CLOCK]}
    assert is_whole(matcher(made, thinking=True, **required), f"{THOUGHT}{CLOCK_CALL}")
    for choice in ("auto", None):
        either: dict[str, Any] = {"thinking": True, "tool_choice": choice, "tools": [CLOCK]}
        assert [allowed(text, **either) for text in ("yes", CLOCK_CALL, f"{THOUGHT}{CLOCK_CALL}", "no")] == [
            True, True, True, False,
        ]  # fmt: skip
    assert not allowed(CLOCK_CALL, tool_choice="none", tools=[CLOCK])


def test_control_tokens_stay_out_of_strings_though_the_tokenizer_does_not_call_them_special() -> None:
    whole = json.loads(TOKENIZER._backend.to_str())
    for token in whole["added_tokens"]:
        token["special"] = token["content"] in ("<bos>", *END_TEXTS)
    plain = Tokenizer(Backend.from_str(json.dumps(whole)), 2)
    assert len(plain.special_ids) < len(TOKENIZER.special_ids)
    constraint = matcher(compiler(plain), tool_choice="required", tools=[WEATHER])
    controls = set(TOKENIZER.control_texts)
    said = ids('<|tool_call>call:get_weather{city:<|"|>a')
    assert constraint.take(said) == len(said)
    assert set(ids_in(constraint.mask([]))) & controls == set(ids('<|"|>'))


@pytest.mark.parametrize(
    ("choice", "tools", "said"),
    [
        ("always", [CLOCK], "tool_choice must be auto, none, required or"),
        ("auto", None, "tool_choice='auto' needs tools"),
        ("required", [], "needs tools"),
        ({"type": "function"}, [CLOCK], "must be auto"),
        ({"type": "function", "function": {"name": "gone"}}, [CLOCK, WEATHER], "'gone', and .*: clock, get_weather"),
        (3, [CLOCK], "must be auto"),
    ],
    ids=str,
)  # fmt: skip
def test_a_wrong_choice_is_named(choice: Any, tools: Any, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        ToolChoice.of(choice, tools)


def test_a_model_that_knows_no_calls_says_so() -> None:
    made = compiler(gemma_like())
    with pytest.raises(UsageError, match="this tokenizer has none of their control tokens"):
        matcher(made, tool_choice="auto", tools=[CLOCK])
    assert made.forbidden(ToolChoice.of("none", None)) == []


def test_a_reply_may_be_calls_where_functions_may_be_called() -> None:
    for choice, expected in ((None, True), ("auto", True), ("required", True), ("none", False)):
        assert ToolChoice.of(choice, [CLOCK]).allows_calls == expected
    assert not ToolChoice.of(None, None).allows_calls


def test_a_schema_that_is_nested_too_deep_is_named(made: Compiler) -> None:
    deep: Any = {"type": "integer"}
    for _ in range(300):
        deep = {"items": deep, "type": "array"}
    with pytest.raises(GrammarError, match="too many objects in each other"):
        matcher(made, tool_choice="auto", tools=[function({"properties": {"a": deep}})])


@pytest.mark.parametrize("reference", ["#/$defs/gone", "#/required/1", "#/required/a", "#/title/0"])
def test_a_reference_that_leads_nowhere_is_named(made: Compiler, reference: str) -> None:
    parameters = {"title": "x", "required": ["a"], "properties": {"a": {"$ref": reference}}}
    with pytest.raises(GrammarError, match=f"no {re.escape(repr(reference))}, which"):
        matcher(made, tool_choice="auto", tools=[function(parameters)])
