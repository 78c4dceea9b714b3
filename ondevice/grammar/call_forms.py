"""The forms in which models write tool calls, told by the tokenizer's control tokens, and their grammars.

Gemma 4 has a syntax of its own, `gemma_calls`. Qwen writes a JSON object between two control tokens, Llama 3 nothing
but a JSON object.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from ondevice.grammar.gemma_calls import CALL, CallRules, CallTokens
from ondevice.grammar.response_format import SPACING, lenient, quoted

_QWEN = "<tool_call>", "</tool_call>"
_LLAMA = "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"


class CallForm(NamedTuple):
    """How one call, and several, are written.

    call : Lark expression of a call
    several : Lark expression of one or more of the rule `call`
    rules : further Lark rules
    """

    call: str
    several: str
    rules: str


def call_opening(control_ids: Mapping[str, int]) -> int | None:
    """The control token that opens a call; None if calls begin with none, or the model makes none."""
    return next((control_ids[text] for text in (CALL[0], _QWEN[0]) if text in control_ids), None)


def call_form(control_ids: Mapping[str, int], tools: Iterable[Mapping[str, Any]]) -> CallForm | None:
    """The form of the calls of these tools; None if the model has no known form.

    Args:
        control_ids: ids of the tokenizer's control tokens by their text.
        tools: checked declarations in OpenAI's form.

    Raises:
        GrammarError: a tool's schema is invalid.
    """
    if control_ids.keys() >= set(CALL):
        rules = CallRules(tools, CallTokens(*(control_ids[text] for text in CALL)))
        return CallForm(rules.start, "call+", rules.text)
    if control_ids.keys() >= set(_QWEN):
        opening, closing = (f"<[{control_ids[text]}]>" for text in _QWEN)
        return CallForm(
            _json_calls(tools, "arguments", f'{opening} "\\n"', f'"\\n" {closing}'), 'call ("\\n" call)*', ""
        )
    if control_ids.keys() >= set(_LLAMA):
        return CallForm(_json_calls(tools, "parameters", "", ""), "call", "")
    return None


def _json_calls(tools: Iterable[Mapping[str, Any]], key: str, before: str, after: str) -> str:
    """Calls as JSON objects with the function's name and its arguments under `key`, between two Lark expressions."""
    calls = []
    for function in (tool["function"] for tool in tools):
        schema = function.get("parameters") or {"properties": {}, "additionalProperties": False}
        held = lenient(schema if isinstance(schema, Mapping) else {}, SPACING)
        opening = f'"name": {json.dumps(function["name"])}, "{key}": '
        arguments = f"%json {json.dumps({**held, 'type': 'object'})}"
        # apart from its first character, which an answer in JSON begins with too: the lexer reads the longest text
        calls.append(f'({before} "{{" {quoted(opening)} {arguments} "}}" {after})')
    return " | ".join(calls)
