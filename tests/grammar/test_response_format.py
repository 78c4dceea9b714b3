"""Values of `response_format`, the replies that each allows, and the errors for other values."""

from __future__ import annotations

import json
import random
import sys
from typing import Any

import jsonschema
import pytest

from ondevice.errors import GrammarError, MissingDependencyError, UsageError
from ondevice.grammar.matcher import Compiler
from ondevice.grammar.response_format import answer_grammar
from tests.grammar.schemas import random_schema
from tests.grammar.walks import compiler, end_ids, is_whole_reply, matcher, schema_format, walk
from tests.text.tokenizers_made import byte_level, gemma_chat

TOKENIZER = gemma_chat()
ENDS = end_ids(TOKENIZER)


def allowed(made: Compiler, response_format: Any, text: str) -> bool:
    return is_whole_reply(TOKENIZER, matcher(made, response_format), text)


OPEN: list[dict[str, Any]] = [
    {"additionalProperties": True},
    {"patternProperties": {"b": {}}},
    {"required": ["b"]},
    {"allOf": [{"required": ["b"]}]},
    {"anyOf": [{"properties": {"b": {}}}, {"properties": {"c": {}}}]},
]
"""Further keywords, with each of which an object may have properties that its schema does not name."""

CASES: list[tuple[Any, list[str], list[str]]] = [
    (
        {"type": "json_object"},
        ["{}", '{"a": [1, null, {"b": "c"}]}', '{"é\\n": "世"}'],
        ["[]", '"a"', '{"a" : 1}', "{"],
    ),
    (
        schema_format({"type": "object", "properties": {"a": {"type": "number"}}, "required": ["a"]}),
        ['{"a": 1}', '{"a": -0.5e3}', '{"a": 1, "other": true}'],
        ["{}", '{"a": "1"}', '{"a":1}'],
    ),
    (schema_format({"enum": ["a", 1, None, {"b": []}]}), ['"a"', "1", "null", '{"b": []}'], ["a", "2"]),
    (schema_format({"type": "array", "items": {"type": "boolean"}, "maxItems": 2}), ["[]", "[true, false]"], ["[1]"]),
    (schema_format({"type": "string", "pattern": "^[ab]+$"}), ['"ab"'], ['"c"', '""']),
    (schema_format({"type": "string"}), ['"\\n\\\\\\""', '"naïve 世"'], ['"\n"', '"a']),
    (schema_format({"type": "array", "uniqueItems": True}, strict=False), ["[1, 1]"], ["{}"]),
    (
        schema_format(
            {"type": "string", "pattern": "^(?=a)", "format": "password", "default": {"pattern": "(?=a)"}}, strict=False
        ),
        ['"b"'],
        ["b"],
    ),
    (
        schema_format(
            {"properties": {"a": {"properties": {"pattern": {"type": "null"}}}}, "type": "object"}, strict=False
        ),
        ["{}", '{"a": {"pattern": null}}'],
        ['{"b": 1}', '{"a": {"pattern": null, "b": 1}}'],
    ),
    *(
        (
            schema_format({"type": "object", "properties": {"a": {"type": "null"}}, **more}, strict=False),
            ['{"a": null, "b": 1}'],
            ["1"],
        )
        for more in OPEN
    ),
    *(
        (
            schema_format(
                {**form, "required": ["a"], "$defs": {"b": {"type": "object", "properties": {"b": {}}}}}, strict=False
            ),
            ['{"a": 1}'],
            ["1", "{}"],
        )
        for form in ({"$ref": "#/$defs/b"}, {"anyOf": [{"$ref": "#/$defs/b"}, {"type": "null"}], "type": "object"})
    ),
    (schema_format({"type": "string", "pattern": "^\\<\\0\\>$"}, strict=False), ['"b"'], ["b"]),
    *(
        (schema_format({"type": "string", "pattern": unread}, strict=False), ['"b"'], ["b"])
        for unread in ("a(^|b)", "^[^[]$", "a{,3}c", "a\\Z", "(")
    ),
    (schema_format({"type": "string", "pattern": "\\Aa|(^|,)b"}, strict=False), ['"a"', '",b"'], ['"c"', '"cb"']),
    (schema_format({"type": "object", "x-guidance": {"whitespace_flexible": True}}), ['{ "a" :1}'], ["[]"]),
    ({"type": "regex", "regex": "(yes|no)/[0-9]{2}"}, ["yes/01", "no/99"], ["yes/1", "maybe/11", "yes"]),
    ({"type": "regex", "regex": "a\nb\\/c"}, ["a\nb/c"], ["a b/c"]),
    ({"type": "choice", "choice": ['say "hi"', "a\\b"]}, ['say "hi"', "a\\b"], ["hi", "a"]),
    (
        {"type": "lark", "lark": 'start: item ("," item)*\nitem: /[a-z]+/ "=" /[0-9]/'},
        ["a=1", "b=2,c=3"],
        ["a", "a=1,"],
    ),
]


@pytest.mark.parametrize(("response_format", "good", "bad"), CASES, ids=str)
def test_an_answer_has_the_form(made: Compiler, response_format: Any, good: list[str], bad: list[str]) -> None:
    assert [text for text in good if not allowed(made, response_format, text)] == []
    assert [text for text in bad if allowed(made, response_format, text)] == []


@pytest.mark.parametrize("tokenizer", [gemma_chat, byte_level], ids=["byte fallback", "byte level"])
def test_whatever_is_drawn_keeps_to_the_schema(tokenizer: Any) -> None:
    """Also where a tokenizer has none of Gemma's further control tokens."""
    own = tokenizer()
    made, ends = compiler(own), end_ids(own)
    found = 0
    for seed in range(60):
        rng = random.Random(seed)
        schema = random_schema(rng)
        ids = walk(matcher(made, schema_format(schema)), rng, ends)
        if ids is None:
            continue
        found += 1
        text = own.decode(ids, keep_special=True)
        jsonschema.validate(json.loads(text), schema)
    assert found > 30, "most walks found no end, so little was tested"


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ("json", "response_format must be"),
        ({}, "with a type of text, json_object, json_schema, regex, choice, lark"),
        ({"type": "xml"}, "not {'type': 'xml'}"),
        ({"type": ["regex"]}, "response_format must be"),
        ({"type": "json_object", "schema": {}}, "has the fields type, and not 'schema'"),
        ({"type": "json_schema"}, "needs the field json_schema"),
        ({"type": "json_schema", "json_schema": {"name": "x"}}, "json_schema needs the field schema"),
        ({"type": "json_schema", "json_schema": 3}, "json_schema must be"),
        (schema_format([]), "schema must be an object, not \\[\\]"),
        (schema_format({}, strict="yes"), "strict must be true or false"),
        (schema_format({"enum": [{1, 2}]}), "is not JSON"),
        ({"type": "regex", "regex": ""}, "regex must be a string that is not empty"),
        ({"type": "choice", "choice": []}, "choice must be a list of strings"),
        ({"type": "choice", "choice": ["a", 3]}, "not one with 3"),
        ({"type": "lark", "lark": 1}, "lark must be a string"),
    ],
    ids=str,
)
def test_a_wrong_option_is_named(wrong: Any, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        answer_grammar(wrong)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (schema_format({"type": "foo"}), "Invalid type: foo"),
        (schema_format({"not": {}}), 'Unimplemented keys: \\["not"\\]: leave it out, or set strict to false'),
        (schema_format({"type": "string", "pattern": "(?=a)"}), "look-around.*: leave it out, or set strict to false"),
        (schema_format({"type": "string", "pattern": "^[^[]$"}), "unclosed .*: leave it out, or set strict to false"),
        (schema_format({"patternProperties": {"a(^|b)": {}}}, strict=False), "lookarounds .*: leave it out$"),
        (schema_format({"type": "integer", "minimum": 3, "maximum": 1}), "Unsatisfiable"),
        (schema_format({"$ref": "#/$defs/gone"}), "gone"),
        (schema_format({"type": "string", "pattern": "("}), "regex parse error: \\( error: unclosed group"),
        ({"type": "regex", "regex": "("}, "unclosed group"),
        ({"type": "lark", "lark": "start: gone"}, 'unknown name: "gone"'),
        ({"type": "lark", "lark": "begin: /a/"}, "no start rule found"),
        ({"type": "regex", "regex": "\ud83d"}, "surrogate"),
        (schema_format({"type": "number", "minimum": "ä" * 60}), "cannot be compiled"),  # the library panics
    ],
    ids=ascii,
)
def test_a_grammar_that_cannot_be_compiled_is_one_line(made: Compiler, wrong: Any, said: str) -> None:
    with pytest.raises(GrammarError, match=said) as caught:
        matcher(made, wrong)
    assert "\n" not in str(caught.value)


def test_what_only_the_tokenizer_can_tell_is_said_at_the_first_token(made: Compiler) -> None:
    constraint = matcher(made, {"type": "lark", "lark": "start: <|gone|>"})
    with pytest.raises(GrammarError, match=r'unknown special token: "<\|gone\|>"$'):
        constraint.mask([])


@pytest.mark.parametrize("schema", [{"$ref": "#"}, {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}])
def test_a_schema_without_any_text_says_so_at_the_first_token(made: Compiler, schema: Any) -> None:
    constraint = matcher(made, schema_format(schema))
    with pytest.raises(GrammarError, match=r"allows no text here, as a schema that is only a reference to itself$"):
        constraint.mask([])


def test_without_the_package_one_line_says_what_to_install(made: Compiler, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(MissingDependencyError, match=r"pip install 'ondevice-runtime\[grammar\]'"):
        matcher(made, {"type": "json_object"})
