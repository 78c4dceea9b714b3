"""Grammars that would cost too much are refused before they are compiled, or by llguidance's own limits."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from ondevice.errors import GrammarError
from ondevice.grammar import limits
from ondevice.grammar.matcher import Compiler, Matcher
from ondevice.grammar.reply_grammar import Parts, reply_grammar
from ondevice.grammar.response_format import ToolChoice, answer_grammar
from tests.grammar.walks import end_ids, ids_in, matcher, schema_format, walk
from tests.text.tokenizers_made import gemma_chat

TOKENIZER = gemma_chat()
ENDS = end_ids(TOKENIZER)
WORDS = [f"word {number:05}" for number in range(limits.MAX_WORDS)]
NINE = [{"type": "string", "pattern": f"[a-m]{{{number + 1}}}[n-z]"} for number in range(9)]
NESTED: dict[str, Any] = {}
for each in NINE:
    NESTED = {**each, "anyOf": [NESTED]} if NESTED else each


def forced_tokens(constraint: Matcher) -> list[int]:
    """The tokens that are forced one after another, taken."""
    tokens: list[int] = []
    while (token := constraint.forced([])) is not None:
        constraint.take([token])
        tokens.append(token)
    return tokens


def lark(text: str) -> dict[str, Any]:
    return {"type": "lark", "lark": text}


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        ({"type": "regex", "regex": "a" * 200_000}, "a regex of 200000 characters is too long"),
        ({"type": "choice", "choice": [*WORDS, "one more"]}, "choice has 10001 words"),
        ({"type": "choice", "choice": [word * 2 for word in WORDS]}, "a choice of .* is too long"),
        (lark("start: /" + "a" * 200_000 + "/"), "a grammar of .* is too long"),
        (schema_format({"enum": ["a" * 200_000]}), "a schema of .* is too long"),
        (schema_format({"enum": [[]] * 200_000}), "a schema of .* is too long"),
        (schema_format({"allOf": NINE}), "different patterns"),
        (schema_format({"properties": {"a": {"items": {"allOf": NINE}}}}), "different patterns"),
        (schema_format(NESTED), "different patterns"),
        (schema_format({"$defs": {"a": {"anyOf": NINE}}, "$ref": "#/$defs/a", "pattern": "x"}), "different patterns"),
        (schema_format({"type": "integer", "multipleOf": 10_007}), "multipleOf"),
        (schema_format({"type": "number", "multipleOf": 1.0007}), "multipleOf"),
        (schema_format({"type": "number", "multipleOf": 2**31}), "multipleOf"),
        (schema_format({"type": "integer", "multipleOf": 5**8}), "multipleOf"),
        (schema_format({"multipleOf": 101, "anyOf": [{"multipleOf": 103}]}), "multipleOf"),
        (schema_format({"pattern": r"\\d+", "maxLength": 2**31}), "maxLength beside patterns"),
        (
            schema_format({"allOf": [{"pattern": r"\\d+"}, {"minLength": -50_000, "maxLength": 60_000}]}),
            "maxLength beside patterns",
        ),
        (schema_format({"items": [{"format": "uri", "maxLength": 9_000}] * 6}), "maxLength beside patterns"),
        (schema_format({"const": -(2**63)}), "numbers from"),
        (schema_format({"enum": [{"a": [512 - 2**63]}]}), "numbers from"),
        (schema_format({"type": "integer", "minimum": -1e20, "maximum": -1e19}), "numbers from"),
        (lark('start: %json {"const": -9223372036854775807}'), "numbers from"),
        (lark('start: %json {"multipleOf": 1e999}'), "may not have the number inf"),
        (lark('start: %json {"multipleOf": NaN}'), "may not have the number nan"),
        (schema_format({"items": {"maximum": float("-inf")}}), "may not have the number -inf"),
        (lark("start: T\nT: /a/ & /b/ & /c/ & ~/d/ & /e/"), "operators"),
        (lark('start: T // "\nT: /a/ & "\\"" & /c/ & ~/d/ & /e/'), "operators"),
        (lark('start: %json\n{"allOf": ' + json.dumps(NINE) + "}"), "different patterns"),
    ],
)
def test_it_is_refused_before_it_is_compiled(wanted: Any, message: str) -> None:
    with pytest.raises(GrammarError, match=message):
        answer_grammar(wanted)


@pytest.mark.parametrize(
    "parameters",
    [
        {"type": "object", "properties": {"n": {"type": "integer", "multipleOf": 10_007}}},
        {"type": "object", "properties": {"n": {"enum": ["a" * 200_000]}}},
        {"type": "object", "properties": {"n": {"enum": [-(2**63)]}}},
        {"type": "object", "properties": {"n": {"type": "number", "multipleOf": float("inf")}}},
        {"type": "object", "properties": {"n": {"pattern": r"\\d+", "maxLength": 2**31}}},
    ],
)
def test_tools_are_limited_too(parameters: Any) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    with pytest.raises(GrammarError):
        reply_grammar(None, ToolChoice("required", [tool]), Parts(), {}, [])


@pytest.mark.parametrize(
    "wanted",
    [
        {"type": "choice", "choice": WORDS},
        schema_format({"type": "object", "properties": {f"p{n}": each for n, each in enumerate(NINE)}}),
        schema_format({"anyOf": NINE}),
        schema_format({"allOf": NINE[:2], "description": "x"}),
        schema_format({"type": "integer", "multipleOf": 86_400}),
        schema_format({"type": "number", "multipleOf": 0.01}),
        schema_format({"type": "integer", "minimum": limits.MIN_NUMBER, "maximum": limits.MIN_NUMBER}),
        schema_format({"enum": [limits.MIN_NUMBER, 2**63 - 1, 2**64]}),
        schema_format({"items": [{"pattern": r"\\d+", "maxLength": 10_000}, {"type": "string", "maxLength": 2**31}]}),
        lark('start: "&~&" /[&~]&/ x~2 .. 3 x ~ 4 // & ~ & ~\nx: "a" # & & & &\n'),
        lark("start: T\nT: /[a-f]+/ & /.{2,4}/ & ~/abc/"),
    ],
)
def test_it_is_possible(made: Compiler, wanted: Any) -> None:
    assert ids_in(matcher(made, wanted).mask([]))


def test_words_that_begin_alike(made: Compiler) -> None:
    wanted = {"type": "choice", "choice": ["yes", "yes, please", "no"]}
    for text, whole in (("yes", True), ("yes, please", True), ("yes,", False), ("no", True), ("not", False)):
        constraint, reply = matcher(made, wanted), TOKENIZER.encode(text, add_special_tokens=False)
        allowed = constraint.allows(reply) and constraint.take(reply) == len(reply)
        assert (allowed and (constraint.finished or constraint.allows([ENDS[0]]))) == whole, text


@pytest.mark.parametrize(
    "wanted",
    [
        {"type": "regex", "regex": "(a{1000}){1000}"},
        {"type": "regex", "regex": "x(a{1000}){1000}"},
        lark("start: T0\n" + "\n".join(f"T{n}: T{n + 1} T{n + 1}" for n in range(40)) + '\nT40: "ab"'),
        schema_format({"anyOf": [{"properties": {f"{number}": {}}} for number in range(2000)]}),
        lark("start: " + " | ".join(f"r{n}" for n in range(6000)) + "".join(f'\nr{n}: "a" "b"?' for n in range(6000))),
        schema_format({"allOf": [{"anyOf": [{"properties": {f"{m} {n}": {}}} for m in range(9)]} for n in range(9)]}),
    ],
)
def test_the_library_refuses_what_is_too_large_in_one_line(made: Compiler, wanted: Any) -> None:
    with pytest.raises(GrammarError) as caught:
        forced_tokens(matcher(made, wanted))
    assert "\n" not in str(caught.value)
    assert "<" not in str(caught.value)
    assert walk(matcher(made, {"type": "regex", "regex": "[a-z]{3}"}), random.Random(1), ENDS) is not None


def test_tokens_of_a_long_forced_text_are_made_once(made: Compiler, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "".join(random.Random(1).choices("abc def", k=3000))
    constraint = matcher(made, {"type": "choice", "choice": [text]})
    inner, made_lists = constraint._made(), []

    class Counting:
        def __init__(self, inner: Any) -> None:
            self._inner = inner

        def __getattr__(self, name: str) -> Any:
            if name == "compute_ff_tokens":
                made_lists.append(name)
            return getattr(self._inner, name)

        def deep_copy(self) -> Counting:
            return Counting(self._inner.deep_copy())

    monkeypatch.setattr(constraint, "_made", lambda: Counting(inner))
    reply = forced_tokens(constraint)
    assert constraint.finished
    assert TOKENIZER.decode(reply) == text
    assert reply == TOKENIZER.encode(text, add_special_tokens=False)
    assert len(made_lists) < 10 < len(reply)
