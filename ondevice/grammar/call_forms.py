"""The forms in which models write tool calls, told by the tokenizer's control tokens, and their grammars.

Gemma 4 has a syntax of its own, `gemma_calls`. Qwen writes a JSON object between two control tokens, or, where its chat
template says so, `tagged_calls`; Llama 3 nothing but a JSON object. Mistral writes a list of such objects after a
control token, and its models since 2025 the name and the arguments of each call after one of their own. gpt-oss writes
one call as a message of its own, which ends a reply. LFM2 writes a list between two control tokens, of calls as in
Python, `python_calls`. Granite 3 writes a list of objects as Mistral does, Granite 4 objects as Qwen does, and EXAONE 4
the same without line breaks; Seed-OSS writes `tagged_calls`, and GLM-4 a name in front of the first line break and the
arguments after it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from ondevice.grammar.gemma_calls import CALL, CallTokens, GemmaCalls
from ondevice.grammar.python_calls import PythonCalls
from ondevice.grammar.response_format import SPACING, lenient, quoted
from ondevice.grammar.tagged_calls import InlineTaggedCalls, TaggedCalls

_QWEN = "<tool_call>", "</tool_call>"
_MISTRAL, _ARGUMENTS = ("[INST]", "[TOOL_CALLS]"), "[ARGS]"
_LLAMA = "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"
_LFM = "<|tool_call_start|>", "<|tool_call_end|>"
_HARMONY = "<|channel|>", "<|constrain|>", "<|message|>"
_EXAONE = ("[|tool|]", *_QWEN)
_SEED = "<seed:tool_call>", "</seed:tool_call>"
_GRANITE_3 = "<|start_of_role|>", "<|tool_call|>"
_GLM = "[gMASK]", "<|assistant|>", "<|observation|>"
_OPENINGS = CALL[0], _QWEN[0], _MISTRAL[1], _LFM[0], _SEED[0], _GRANITE_3[1]


class CallForm(NamedTuple):
    """How one call, and several, are written.

    call : Lark expression of one call
    several : Lark expression of one or more, by the rule `call` or the further rules
    rules : further Lark rules
    """

    call: str
    several: str
    rules: str


def call_opening(control_ids: Mapping[str, int]) -> int | None:
    """The control token that opens a call; None if calls begin with none, or the model makes none."""
    return next((control_ids[text] for text in _OPENINGS if text in control_ids), None)


def call_form(
    control_ids: Mapping[str, int], tools: Iterable[Mapping[str, Any]], *, tags: bool = False
) -> CallForm | None:
    """The form of the calls of these tools; None if the model has no known form.

    Args:
        control_ids: ids of the tokenizer's control tokens by their text.
        tools: checked declarations in OpenAI's form.
        tags: whether the chat template writes calls between tags.

    Raises:
        GrammarError: a tool's schema is invalid.
    """
    made = next((form for tokens, form in _FORMS if control_ids.keys() >= set(tokens)), None)
    made = _tagged if made is _qwen and tags else made
    return None if made is None else made(control_ids, tools)


def _gemma(control_ids: Mapping[str, int], tools: Iterable[Mapping[str, Any]]) -> CallForm:
    rules = GemmaCalls(tools, CallTokens(*(control_ids[text] for text in CALL)))
    return CallForm(rules.start, "call+", rules.text)


def _qwen(control_ids: Mapping[str, int], tools: Iterable[Mapping[str, Any]]) -> CallForm:
    opening, closing = (f"<[{control_ids[text]}]>" for text in _QWEN)
    call = _json_calls(tools, "arguments", f'{opening} "\\n"', f'"\\n" {closing}')
    return CallForm(call, 'call ("\\n" call)*', "")


def _tagged(control_ids: Mapping[str, int], tools: Iterable[Mapping[str, Any]]) -> CallForm:
    return _tags_between(control_ids, _QWEN, TaggedCalls(tools))


def _tags_between(control_ids: Mapping[str, int], marks: Iterable[str], rules: TaggedCalls) -> CallForm:
    """Calls as tags between the control tokens `marks`: the opening one, a line break, `rules`, the closing one."""
    opening, closing = (f"<[{control_ids[text]}]>" for text in marks)
    return CallForm(f'{opening} "\\n" {rules.start} {closing}', 'call ("\\n" call)*', rules.text)


def _exaone(control_ids: Mapping[str, int], tools: Iterable[Mapping[str, Any]]) -> CallForm:
    opening, closing = (f"<[{control_ids[text]}]>" for text in _QWEN)
    return CallForm(_json_calls(tools, "arguments", opening, closing), 'call ("\\n" call)*', "")


def _seed(control_ids: Mapping[str, int], tools: Iterable[Mapping[str, Any]]) -> CallForm:
    return _tags_between(control_ids, _SEED, InlineTaggedCalls(tools))


def _llama(control_ids: Mapping[str, int], tools: Iterable[Mapping[str, Any]]) -> CallForm:
    return CallForm(_json_calls(tools, "parameters", "", ""), "call", "")


def _mistral(control_ids: Mapping[str, int], tools: Iterable[Mapping[str, Any]]) -> CallForm:
    opening = f"<[{control_ids[_MISTRAL[1]]}]>"
    if _ARGUMENTS in control_ids:
        calls = [f"{opening} {quoted(name)} <[{control_ids[_ARGUMENTS]}]> {held}" for name, held in _arguments(tools)]
        return CallForm(" | ".join(calls), "call+", "")
    return _listed(tools, f'{opening} " "?')


def _granite_3(control_ids: Mapping[str, int], tools: Iterable[Mapping[str, Any]]) -> CallForm:
    return _listed(tools, f"<[{control_ids[_GRANITE_3[1]]}]>")


def _listed(tools: Iterable[Mapping[str, Any]], opening: str) -> CallForm:
    """A list of JSON objects after a Lark expression."""
    begun, listed = f'{opening} "["', f"listed: {_json_calls(tools, 'arguments', '', '')}"
    return CallForm(f'{begun} listed "]"', f'{begun} listed (", " listed)* "]"', listed)


def _lfm(control_ids: Mapping[str, int], tools: Iterable[Mapping[str, Any]]) -> CallForm:
    opening, closing = (f"<[{control_ids[text]}]>" for text in _LFM)
    rules = PythonCalls(tools)
    begun, ended = f'{opening} "[" {rules.start}', f'"]" {closing}'
    return CallForm(f"{begun} {ended}", f'{begun} (", " {rules.start})* {ended}', rules.text)


def _json_calls(tools: Iterable[Mapping[str, Any]], key: str, before: str, after: str) -> str:
    """Calls as JSON objects with the function's name and its arguments under `key`, between two Lark expressions."""
    calls = []
    for name, arguments in _arguments(tools):
        opening = f'"name": {json.dumps(name)}, "{key}": '
        # apart from its first character, which an answer in JSON begins with too: the lexer reads the longest text
        calls.append(f'({before} "{{" {quoted(opening)} {arguments} "}}" {after})')
    return " | ".join(calls)


def _harmony(control_ids: Mapping[str, int], tools: Iterable[Mapping[str, Any]]) -> CallForm:
    """Calls after `<|start|>assistant`: the function's name before or after the channel, as its own template writes
    it, and as the models do.
    """
    channel, constrain, message = (f"<[{control_ids[text]}]>" for text in _HARMONY)
    calls = []
    for name, held in _arguments(tools):
        to = f" to=functions.{name}"
        before, behind = f'{quoted(to)} {channel} "commentary "', f"{channel} {quoted(f'commentary{to} ')}"
        calls.append(f'({before} | {behind}) ({constrain} "json" | "json") {message} {held}')
    return CallForm(" | ".join(calls), "call", "")


def _glm(control_ids: Mapping[str, int], tools: Iterable[Mapping[str, Any]]) -> CallForm:
    calls = (f'{quoted(name)} "\\n" {held}' for name, held in _arguments(tools))
    return CallForm(" | ".join(calls), "call", "")


def _arguments(tools: Iterable[Mapping[str, Any]]) -> Iterator[tuple[str, str]]:
    """The name of each function, and a Lark expression of its arguments as a JSON object."""
    for function in (tool["function"] for tool in tools):
        schema = function.get("parameters") or {"properties": {}, "additionalProperties": False}
        held = lenient(schema if isinstance(schema, Mapping) else {}, SPACING)
        yield function["name"], f"%json {json.dumps({**held, 'type': 'object'})}"


_FORMS: tuple[tuple[Sequence[str], Callable[[Mapping[str, int], Iterable[Mapping[str, Any]]], CallForm]], ...] = (
    (CALL, _gemma),
    (_EXAONE, _exaone),
    (_QWEN, _qwen),
    (_LLAMA, _llama),
    (_MISTRAL, _mistral),
    (_LFM, _lfm),
    (_HARMONY, _harmony),
    (_SEED, _seed),
    (_GRANITE_3, _granite_3),
    (_GLM, _glm),
)
"""The control tokens of each form, and the function that writes it."""
