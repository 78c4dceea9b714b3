"""Calls of all families but Gemma 4 and gpt-oss: what a choice wants, what a schema allows, and what parsers read."""

from __future__ import annotations

import random
from typing import Any

import pytest

from ondevice.errors import UsageError
from ondevice.grammar.matcher import Compiler, Matcher
from ondevice.grammar.response_format import ToolChoice, answer_grammar
from ondevice_export.response_templates import known_template
from tests.grammar.walks import (
    calls_and_text,
    compiler,
    end_ids,
    is_whole_reply,
    matcher,
    schema_format,
    walk,
)
from tests.grammar.walks import ids_of as ids
from tests.text.conversations import CLOCK, WEATHER
from tests.text.test_family_replies import LLAMA, MISTRAL, MISTRAL_11, THINKING
from tests.text.tokenizers_made import EXAONE_4, GLM_4, GRANITE_3, GRANITE_4, LFM, SEED_OSS, chat_with

CONTROL = {
    "qwen": THINKING, "llama": LLAMA, "mistral": MISTRAL, "mistral-11": MISTRAL_11, "lfm": LFM, "exaone": EXAONE_4,
    "granite-3": GRANITE_3, "granite-4": GRANITE_4, "seed": SEED_OSS, "glm": GLM_4,
}  # fmt: skip
TOKENIZERS = {name: chat_with([*control, "<eos>"]) for name, control in CONTROL.items()}
OPENINGS = {
    "qwen": "<tool_call>",
    "mistral": "[TOOL_CALLS]",
    "mistral-11": "[TOOL_CALLS]",
    "lfm": "<|tool_call_start|>",
    "exaone": "<tool_call>",
    "granite-3": "<|tool_call|>",
    "granite-4": "<tool_call>",
    "seed": "<seed:tool_call>",
}
CALLS = {
    "qwen": '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Zürich", "days": 2}}\n</tool_call>',
    "llama": '{"name": "get_weather", "parameters": {"city": "Zürich", "days": 2}}',
    "mistral": '[TOOL_CALLS] [{"name": "get_weather", "arguments": {"city": "Zürich", "days": 2}}]',
    "mistral-11": '[TOOL_CALLS]get_weather[ARGS]{"city": "Zürich", "days": 2}',
    "lfm": "<|tool_call_start|>[get_weather(city='Zürich', days=2)]<|tool_call_end|>",
    "exaone": '<tool_call>{"name": "get_weather", "arguments": {"city": "Zürich", "days": 2}}</tool_call>',
    "granite-3": '<|tool_call|>[{"name": "get_weather", "arguments": {"city": "Zürich", "days": 2}}]',
    "granite-4": '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Zürich", "days": 2}}\n</tool_call>',
    "seed": "<seed:tool_call>\n<function=get_weather>\n<parameter=city>Zürich</parameter>\n"
    "<parameter=days>2</parameter>\n</function>\n</seed:tool_call>",
    "glm": 'get_weather\n{"city": "Zürich", "days": 2}',
}
CLOCKS = {
    "qwen": '<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>',
    "llama": '{"name": "clock", "parameters": {}}',
    "mistral": '[TOOL_CALLS] [{"name": "clock", "arguments": {}}]',
    "mistral-11": "[TOOL_CALLS]clock[ARGS]{}",
    "lfm": "<|tool_call_start|>[clock()]<|tool_call_end|>",
    "exaone": '<tool_call>{"name": "clock", "arguments": {}}</tool_call>',
    "granite-3": '<|tool_call|>[{"name": "clock", "arguments": {}}]',
    "granite-4": '<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>',
    "seed": "<seed:tool_call>\n<function=clock>\n</function>\n</seed:tool_call>",
    "glm": "clock\n{}",
}
TWO_CALLS = {
    "qwen": f"{CALLS['qwen']}\n{CLOCKS['qwen']}",
    "mistral": CALLS["mistral"].replace("}}]", '}}, {"name": "clock", "arguments": {}}]'),
    "mistral-11": CALLS["mistral-11"] + CLOCKS["mistral-11"],
    "lfm": CALLS["lfm"].replace(")]", "), clock()]"),
    "exaone": f"{CALLS['exaone']}\n{CLOCKS['exaone']}",
    "granite-3": CALLS["granite-3"].replace("}}]", '}}, {"name": "clock", "arguments": {}}]'),
    "granite-4": f"{CALLS['granite-4']}\n{CLOCKS['granite-4']}",
    "seed": f"{CALLS['seed']}\n{CLOCKS['seed']}",
}
"""Llama and GLM-4 make one call at a time."""


@pytest.fixture(scope="module", params=TOKENIZERS)
def model(request: pytest.FixtureRequest) -> tuple[str, Compiler]:
    name = str(request.param)
    return name, compiler(TOKENIZERS[name])


def is_whole(name: str, constraint: Matcher, text: str) -> bool:
    return is_whole_reply(TOKENIZERS[name], constraint, text)


def parsed(name: str, token_ids: list[int]) -> tuple[list[tuple[str, Any]], str]:
    return calls_and_text(TOKENIZERS[name], known_template(TOKENIZERS[name]), token_ids)


def test_a_required_call_is_one_of_the_tools(model: tuple[str, Compiler]) -> None:
    name, made = model
    options: dict[str, Any] = {"tool_choice": "required", "tools": [WEATHER, CLOCK]}
    for text in (CALLS[name], CLOCKS[name]):
        assert is_whole(name, matcher(made, **options), text)
    wrong = CALLS[name].replace("get_weather", "get_wether")
    for text in ("Yes.", wrong, CALLS[name].replace("2", '"two"'), CALLS[name][:-1]):
        assert not is_whole(name, matcher(made, **options), text)
    twice = TWO_CALLS.get(name, f"{CALLS[name]}\n{CLOCKS[name]}")
    assert is_whole(name, matcher(made, **options), twice) == (name in TWO_CALLS)
    if name in TWO_CALLS:
        called = [("get_weather", {"city": "Zürich", "days": 2}), ("clock", {})]
        assert parsed(name, ids(TOKENIZERS[name], twice)) == (called, "")


def test_random_calls_are_read_back(model: tuple[str, Compiler]) -> None:
    name, made = model
    rng, found = random.Random(3), 0
    for _ in range(40):
        constraint = matcher(
            made, tool_choice={"type": "function", "function": {"name": "get_weather"}}, tools=[WEATHER]
        )
        said = walk(constraint, rng, end_ids(TOKENIZERS[name]))
        if said is not None:
            found += 1
            calls, text = parsed(name, said)
            assert [call for call, _ in calls] == ["get_weather"]
            assert isinstance(calls[0][1]["city"], str)
            assert text == ""
    assert found or name == "seed"  # whose texts end seldom: `test_tagged_calls` draws others


def test_calls_are_allowed_beside_text_of_a_form(model: tuple[str, Compiler]) -> None:
    name, made = model
    form = schema_format({"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]})
    for choice in ("auto", None):
        for text in ('{"a": 1}', CALLS[name]):
            assert is_whole(name, matcher(made, form, tool_choice=choice, tools=[WEATHER]), text)
        assert not is_whole(name, matcher(made, form, tool_choice=choice, tools=[WEATHER]), "Yes.")


def test_a_call_in_free_text(model: tuple[str, Compiler]) -> None:
    """Calls of Llama and GLM-4 begin with no token of their own, so nothing is constrained there."""
    name, made = model
    choice = ToolChoice.of("auto", [WEATHER, CLOCK])
    constraint = made.constraint(None, choice, False, [2])
    if name in ("llama", "glm"):
        assert constraint is None
        assert made.forbidden(ToolChoice.of("none", [WEATHER])) == []
        return
    assert constraint is not None
    assert is_whole(name, constraint, f"I look.\n{TWO_CALLS[name]}")
    assert made.forbidden(ToolChoice.of("none", [WEATHER])) == ids(TOKENIZERS[name], OPENINGS[name])


def test_a_thought_comes_before_a_call(model: tuple[str, Compiler]) -> None:
    name, made = model
    if name == "seed":
        begun = ids(TOKENIZERS[name], "<seed:bos>assistant\n<seed:think><seed:cot_budget_reflect>")
        said = f"None.</seed:cot_budget_reflect></seed:think>\n{CALLS[name]}"
        options: dict[str, Any] = {"tool_choice": "required", "tools": [WEATHER]}
        assert is_whole(name, matcher(made, **options, prompt_ids=begun), said)
        thought = f"<seed:think>Hm.</seed:think>\n{CALLS[name]}"
        assert is_whole(name, matcher(made, **options, thinking=True), thought)
        assert not is_whole(name, matcher(made, **options, thinking=False), thought)
    if name not in ("qwen", "exaone", "granite-4"):
        return
    options = {"tool_choice": "required", "tools": [WEATHER], "thinking": True}
    assert is_whole(name, matcher(made, **options), f"<think>\nHm.\n</think>\n\n{CALLS[name]}")
    begun = ids(TOKENIZERS[name], "<|im_start|>assistant\n<think>\n")
    assert is_whole(name, matcher(made, **options, prompt_ids=begun), f"Hm.\n</think>\n\n{CALLS[name]}")


PARAMETERS: dict[str, Any] = {
    "what cannot be enforced": {
        "type": "object",
        "properties": {
            "tags": {"type": "array", "items": {"type": "boolean"}, "uniqueItems": True, "minItems": 2, "maxItems": 2},
            "name": {
                "anyOf": [{"type": "null"}, {"type": "string", "pattern": "^(?!a)b", "format": "path", "maxLength": 1}]
            },
        },
        "required": ["tags", "name"],
    },
    "no type": {"properties": {"name": {"enum": ["a"]}}},
    "a root elsewhere": {"$ref": "#/$defs/a", "$defs": {"a": {"properties": {"tags": {"type": "null"}}}}},
    "no schema": [],
    "no schema either": ["a"],
}


@pytest.mark.parametrize("parameters", PARAMETERS.values(), ids=PARAMETERS)
def test_every_declaration_can_be_called(model: tuple[str, Compiler], parameters: Any) -> None:
    """With arguments that are an object, though not all of the schema is enforced."""
    name, made = model
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    found = 0
    for seed in range(12):
        constraint = matcher(made, tool_choice={"type": "function", "function": {"name": "f"}}, tools=[tool])
        said = walk(constraint, random.Random(seed), end_ids(TOKENIZERS[name]))
        if said is not None:
            found += 1
            calls, _ = parsed(name, said)
            assert [call for call, _ in calls] == ["f"]
            if isinstance(parameters, dict):
                assert set(calls[0][1]) <= {"tags", "name"}
    assert found


def test_a_model_without_a_form_of_calls() -> None:
    made = compiler(chat_with(["<|user|>", "<eos>"]))
    only = made.constraint(
        answer_grammar({"type": "choice", "choice": ["a"]}), ToolChoice.of(None, [WEATHER]), False, [2]
    )
    assert only is not None
    assert only.allows(ids(chat_with(["<|user|>", "<eos>"]), "a"))
    with pytest.raises(UsageError, match="as Gemma 4, Qwen, Llama 3 or Mistral does"):
        matcher(made, tool_choice="required", tools=[WEATHER])


def test_glm_begins_an_answer_with_a_line_break(model: tuple[str, Compiler]) -> None:
    """Where the prompt opens a message, and after thoughts that it begins; not where it begins the answer."""
    name, made = model
    if name != "glm":
        return
    form = schema_format({"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]})
    answer, call = '{"a": 1}', CALLS[name]
    for prompt, good, bad in (
        ("<|assistant|>", [f"\n{answer}", call], [answer, f"\n{call}", f"</think>\n{answer}"]),
        (
            "<|assistant|>\n<think>",
            [f"\nHm. </x>\n</think>\n{answer}", f"</think>{call}"],
            [f"\n{answer}", call, f"Hm.</think>{answer}"],
        ),
        ("<|assistant|>\nSo, ", [answer], [f"\n{answer}"]),
    ):
        options: dict[str, Any] = {"tools": [WEATHER], "prompt_ids": ids(TOKENIZERS[name], prompt)}
        assert [each for each in good if not is_whole(name, matcher(made, form, **options), each)] == []
        assert [each for each in bad if is_whole(name, matcher(made, form, **options), each)] == []
