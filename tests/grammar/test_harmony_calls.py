"""Replies of gpt-oss that a grammar allows: messages with headers, an answer of a form, and calls."""

from __future__ import annotations

import random
from typing import Any

import pytest

from ondevice.grammar.matcher import Compiler, Matcher
from ondevice.grammar.response_format import ToolChoice, answer_grammar
from ondevice_export.response_templates import known_template
from tests.grammar.walks import (
    calls_and_text,
    compiler,
    end_ids,
    ids_in,
    ids_of,
    is_whole_reply,
    matcher,
    schema_format,
    walk,
)
from tests.text.conversations import CLOCK, WEATHER
from tests.text.tokenizers_made import harmony

TOKENIZER = harmony()
TEMPLATE = known_template(TOKENIZER)
ENDS = end_ids(TOKENIZER)


def ids(text: str) -> list[int]:
    return ids_of(TOKENIZER, text)


OPENED = ids("<|start|>user<|message|>hi<|end|><|start|>assistant")
NEXT = "<|end|><|start|>assistant"
THOUGHT = f"<|channel|>analysis<|message|>Hm, final.{NEXT}"
REMARK = f"<|channel|>commentary<|message|>I look.{NEXT}"
FINAL = "<|channel|>final<|message|>"
ARGUMENTS = '<|message|>{"city": "Zürich", "days": 2}'
WEATHER_CALL = f"<|channel|>commentary to=functions.get_weather <|constrain|>json{ARGUMENTS}"
SPELLINGS = [
    WEATHER_CALL,
    f"<|channel|>commentary to=functions.get_weather json{ARGUMENTS}",
    f" to=functions.get_weather<|channel|>commentary json{ARGUMENTS}",
    f" to=functions.get_weather<|channel|>commentary <|constrain|>json{ARGUMENTS}",
]
CLOCK_CALL = "<|channel|>commentary to=functions.clock <|constrain|>json<|message|>{}"
ONE: dict[str, Any] = {"type": "function", "function": {"name": "get_weather"}}


@pytest.fixture(scope="module")
def made() -> Compiler:
    return compiler(TOKENIZER)


def constraint(made: Compiler, response_format: Any = None, *, thinks: bool | None = None, **options: Any) -> Matcher:
    prompt_ids = options.pop("prompt_ids", OPENED)
    choice = ToolChoice.of(options.get("tool_choice"), options.get("tools"))
    found = made.constraint(answer_grammar(response_format), choice, thinks, prompt_ids)
    assert found is not None
    return found


def allowed(made: Compiler, texts: list[str], response_format: Any = None, **options: Any) -> list[bool]:
    return [is_whole_reply(TOKENIZER, constraint(made, response_format, **options), text) for text in texts]


def test_an_answer_of_a_form_stands_in_the_final_message(made: Compiler) -> None:
    form = schema_format({"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]})
    answer = '{"a": 1}'
    good = [f"{FINAL}{answer}", f"{THOUGHT}{FINAL}{answer}", f"{THOUGHT}{THOUGHT}{FINAL}{answer}"]
    bad = [answer, f"{FINAL}Yes.", f"{THOUGHT}{answer}", f"{REMARK}{FINAL}{answer}", f"<|message|>{answer}"]
    assert allowed(made, good, form) == [True] * 3
    assert allowed(made, good, form, thinks=True) == [True] * 3
    assert allowed(made, good, form, thinks=False) == [True, False, False]
    assert allowed(made, bad, form) == [False] * 5


def test_a_prompt_that_opens_no_message_gets_the_answer_alone(made: Compiler) -> None:
    """A plain text, and an answer that is continued."""
    form = {"type": "choice", "choice": ["yes"]}
    for prompt_ids in (ids("def f(x):"), [*OPENED, *ids(FINAL)], [*OPENED, *ids(f"{THOUGHT}{FINAL}So")]):
        assert allowed(made, ["yes", f"{FINAL}yes", "no"], form, prompt_ids=prompt_ids) == [True, False, False]


def test_no_message_hides_in_a_thought(made: Compiler) -> None:
    found = constraint(made, {"type": "choice", "choice": ["yes"]})
    said = ids("<|channel|>analysis<|message|>Hm")
    assert found.take(said) == len(said)
    controls = [*ids("<|start|><|channel|><|message|><|call|><|return|><|end|>")]
    assert set(ids_in(found.mask([]))) & set(controls) == {*ids("<|end|>")}


def test_a_call_is_demanded(made: Compiler) -> None:
    tools = [WEATHER, CLOCK]
    for choice, other in (("required", True), (ONE, False)):
        options: dict[str, Any] = {"tool_choice": choice, "tools": tools}
        assert allowed(made, SPELLINGS, **options) == [True] * 4
        assert allowed(made, [f"{THOUGHT}{each}" for each in SPELLINGS], **options) == [True] * 4
        assert allowed(made, [CLOCK_CALL], **options) == [other]
        wrong = [
            f"{FINAL}Yes.", f"{REMARK}{WEATHER_CALL}", WEATHER_CALL[:-1], WEATHER_CALL.replace("2", '"x"'),
            WEATHER_CALL.replace("get_weather", "get_wether"), WEATHER_CALL.replace(" to=functions.get_weather", ""),
            f"{WEATHER_CALL}{WEATHER_CALL}", WEATHER_CALL.replace("<|message|>", ""),
        ]  # fmt: skip
        assert allowed(made, wrong, **options) == [False] * len(wrong)
    assert allowed(made, [f"{THOUGHT}{WEATHER_CALL}"], tool_choice="required", tools=tools, thinks=False) == [False]


def test_a_call_or_any_answer(made: Compiler) -> None:
    good = [
        f"{FINAL}Yes.", f"{THOUGHT}{REMARK}{THOUGHT}{FINAL}Yes, 1.", f"{THOUGHT}{REMARK}{WEATHER_CALL}",
        *SPELLINGS, CLOCK_CALL,
    ]  # fmt: skip
    bad = [
        "Yes.", "<|channel|>commentary to=functions.gone json<|message|>{}", WEATHER_CALL.replace("2", '"x"'),
        f"{FINAL}Yes.{NEXT}{CLOCK_CALL}",
    ]  # fmt: skip
    for thinks in (None, True, False):
        options: dict[str, Any] = {"tool_choice": "auto", "tools": [WEATHER, CLOCK], "thinks": thinks}
        assert allowed(made, good, **options) == [True] * len(good)
        assert allowed(made, bad, **options) == [False] * len(bad)


def test_no_call_where_none_is_wanted(made: Compiler) -> None:
    options: dict[str, Any] = {"tool_choice": "none", "tools": [WEATHER]}
    assert allowed(made, [f"{THOUGHT}{REMARK}{FINAL}Yes.", *SPELLINGS], **options) == [True, *[False] * 4]
    assert made.forbidden(ToolChoice.of("none", [WEATHER])) == []
    assert made.constraint(None, ToolChoice.of("none", None), None, OPENED) is None
    assert made.constraint(None, ToolChoice.of(None, [WEATHER]), None, OPENED) is None


def test_an_answer_of_a_form_or_a_call(made: Compiler) -> None:
    form = {"type": "choice", "choice": ["yes"]}
    texts = [f"{THOUGHT}{FINAL}yes", f"{THOUGHT}{WEATHER_CALL}", f"{FINAL}no", f"{REMARK}{WEATHER_CALL}"]
    for choice in ("auto", None):
        assert allowed(made, texts, form, tool_choice=choice, tools=[WEATHER]) == [True, True, False, False]
    assert allowed(made, texts, form, tool_choice="none", tools=[WEATHER]) == [True, False, False, False]


@pytest.mark.parametrize("choice", ["required", "auto", ONE], ids=str)
def test_whatever_is_drawn_is_read_back(made: Compiler, choice: Any) -> None:
    rng, called, answered = random.Random(5), 0, 0
    for _ in range(60):
        said = walk(matcher(made, tool_choice=choice, tools=[WEATHER], prompt_ids=OPENED), rng, ENDS)
        if said is None:
            continue
        calls, text = calls_and_text(TOKENIZER, TEMPLATE, said)
        called, answered = called + bool(calls), answered + (not calls)
        for name, arguments in calls:
            assert name == "get_weather"
            assert isinstance(arguments["city"], str)
        assert choice == "auto" or (len(calls) == 1 and text == "")
    assert called or choice == "auto"
    assert answered or choice != "auto"


def test_keys_of_a_call_are_forced(made: Compiler) -> None:
    """And drafted: the header after the channel's name, up to the first value."""
    found = constraint(made, tool_choice=ONE, tools=[WEATHER], thinks=False)
    said = ids("<|channel|>commentary to=functions.get_weather <|constrain|>")
    assert found.take(said) == len(said)
    forced: list[int] = []
    while (token := found.forced(forced)) is not None:
        forced.append(token)
    assert TOKENIZER.decode(forced, keep_special=True).startswith('json<|message|>{"city": "')
