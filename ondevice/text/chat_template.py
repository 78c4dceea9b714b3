"""Chat template of a bundle: renders messages as the prompt text that the model was trained on."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from ondevice.errors import BundleCorruptError, PromptError, reason
from ondevice.text.messages import (
    BUDGET,
    DEVELOPER,
    EFFORT,
    READ_THOUGHTS,
    ROLES,
    SYSTEM_ROLES,
    THINKING,
    THINKING_TOO,
    Message,
)
from ondevice.text.tagged_calls import FUNCTION

PART = {"type": "text", "text": "xyz"}
PRINTED = (repr(PART), json.dumps(PART))
"""A message's part as templates print it that do not know parts."""

ASKED: Message = {"role": "user", "content": "x"}
SHORT_ID, NEXT_ID, LONG_ID = "000000000", "000000001", "call_000000000000000000000000"
"""Ids of calls: Mistral's templates take those of nine letters or digits only."""

DECLARED = {"name": "x", "parameters": {"type": "object", "properties": {}}}
"""A function, declared without a description."""

CallStyle = tuple[str | None, Any]
"""Content and arguments of a message with a tool call and without text."""

CALL_STYLES: tuple[CallStyle, ...] = ((None, {"x": "x"}), (None, '{"x": "x"}'), ("", {"x": "x"}), ("", '{"x": "x"}'))
"""A template is given the first that it takes without printing Python's repr: some join arguments as a text, and
some write calls only where there is no content.
"""


class CallRoles(NamedTuple):
    """How a template without `tool_calls` is told of calls and results: as messages with roles of their own.

    known : a text by which a template shows that it knows them
    call, result : roles
    opening : text in front of the calls
    each : whether a message is one call, its name the field `metadata`; else it is a list of all
    """

    known: str
    call: str
    result: str
    opening: str = ""
    each: bool = False


CALL_ROLES = (
    CallRoles("assistant_tool_call", "assistant_tool_call", "tool_response"),
    CallRoles("metadata", "assistant", "observation", each=True),
    CallRoles("<|tool_call|>", "assistant", "tool_response", opening="<|tool_call|>"),
)
"""Granite 3.0's, GLM-4's, and those of Granite 3.1 to 3.3, whose templates write any role."""


class ChatTemplate:
    """A bundle's `chat_template.jinja`, rendered as transformers renders it.

    Messages reach the template unchanged: it is the template that drops, for example, the thoughts of earlier turns.
    It is compiled for the first rendering: that and importing jinja2 would be a tenth of the time to the first token of
    a process whose prompt is plain text.

    Args:
        source: Jinja source text.
        special_tokens: text of special tokens by variable name, such as `bos_token`.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str] | None = None) -> None:
        self._source = source
        self._special_tokens = dict(special_tokens or {})

    @classmethod
    def from_file(cls, path: str | Path, special_tokens: Mapping[str, str] | None = None) -> ChatTemplate:
        """Read a template.

        Raises:
            BundleCorruptError: the file cannot be read.
        """
        try:
            source = Path(path).read_text("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise BundleCorruptError(f"cannot read {path} ({error}): export the bundle again") from error
        return cls(source, special_tokens)

    def render(self, messages: Sequence[Message], *, add_generation_prompt: bool = True, **variables: Any) -> str:
        """The prompt text, control tokens and `<bos>` included: encode it without adding special tokens.

        Args:
            messages: as `plain_messages` makes them, oldest first.
            add_generation_prompt: open the model's turn at the end.
            variables: further variables of this template, such as `enable_thinking` and `tools`.

        Raises:
            PromptError: the template refuses the messages, or exceeds a limit.
            BundleCorruptError: the template is not Jinja.
        """
        if any(each.get("tool_calls") or each["role"] == "tool" for each in messages) and self._call_roles is not None:
            single = _with_single_calls(messages) if self._call_roles.each else messages
            messages = [*_with_roles(single, self._call_roles)]
        if any(len(message.get("tool_calls") or ()) > 1 for message in messages) and self._takes_single_calls_only:
            messages = _with_single_calls(messages)
        if any(each["role"] == DEVELOPER for each in messages) and self._takes_no_developer:
            messages = [{**each, "role": "system"} if each["role"] == DEVELOPER else each for each in messages]
        if any(each["role"] in SYSTEM_ROLES for each in messages[1:]) and self._takes_first_instructions_only:
            messages = _with_joined_instructions(messages)
        understood = [self._understood(message) for message in messages]
        if any("tool_calls" in each or "tool_call_id" in each for each in messages) and self._takes_short_ids_only:
            understood = [_with_short_ids(message) for message in understood]
        # None, not undefined: templates ask `tools is not none`.
        known = {"tools": None, "documents": None, **self._special_tokens, **self._understood_variables(variables)}
        render = self._compiled
        try:
            return render(messages=understood, add_generation_prompt=add_generation_prompt, **known)
        except Exception as error:  # a template can make Python raise anything
            raise PromptError(f"the chat template refuses these messages: {reason(error)}") from error

    @property
    def tags(self) -> bool:
        """Whether calls are written between tags, as Qwen3-Coder's: its source says so, which need not be compiled."""
        return FUNCTION in self._source

    def _understood(self, message: Message) -> Message:
        """The message with its content as a string, if the template supports no other form, and its calls likewise."""
        content = message.get("content", "")
        if isinstance(content, list) and message["role"] not in self._roles_with_parts:
            if any(part.get("type") != "text" for part in content):
                raise PromptError("this bundle's chat template has no place for pictures and sounds: leave them out")
            message = {**message, "content": "\n".join(part["text"] for part in content)}
        return self._with_calls(message) if message.get("tool_calls") else message

    def _understood_variables(self, variables: Mapping[str, Any]) -> Mapping[str, Any]:
        """The variables, with an effort or a budget for a template that cannot leave thoughts out, whether the model
        thinks by all names, and with the descriptions and defaults of functions as it can write them.
        """
        if THINKING in variables and THINKING not in self._source:
            if variables[THINKING] is False:
                variables = {EFFORT: "low", BUDGET: 0, **variables}
            variables = {THINKING_TOO: variables[THINKING], **variables}
        functions = [tool["function"] for tool in variables.get("tools") or ()]
        if any(each.get("description") is None for each in functions) and self._needs_descriptions:
            functions = [{**each, "description": each.get("description") or ""} for each in functions]
        if any("properties" not in (each.get("parameters") or {}) for each in functions) and self._needs_properties:
            functions = [{**each, "parameters": _with_properties(each.get("parameters"))} for each in functions]
        if functions:
            tools = zip(variables["tools"], functions, strict=True)
            variables = {**variables, "tools": [{**tool, "function": function} for tool, function in tools]}
        changed = [_with_texts_as_defaults(tool) for tool in variables.get("tools") or ()]
        if changed != (variables.get("tools") or []) and self._takes_texts_as_defaults_only:
            variables = {**variables, "tools": changed}
        return variables

    def _with_calls(self, message: Message) -> Message:
        empty, arguments = self._call_style
        content, thoughts = message.get("content"), message.get(READ_THOUGHTS[0])
        if thoughts and content and isinstance(content, str) and self._takes_thoughts_or_content:
            message = {**message, "content": "", **dict.fromkeys(READ_THOUGHTS, f"{thoughts}\n\n{content}")}
        if not message.get("content"):
            message = {**message, "content": empty}
        if isinstance(arguments, str):
            message = {**message, "tool_calls": [_with_text(call) for call in message["tool_calls"]]}
        return message

    @cached_property
    def written(self) -> str:
        """Text that the template writes by itself: its source, and what it joins, as by `'<|' + role + '|>'`."""
        tried = (self._tried_role(*said) for said in (("user", [PART]), ("system", "x"), ("tool", "x")))
        return "\n".join([self._source, *(text or "" for text in tried)])

    @cached_property
    def _roles_with_parts(self) -> frozenset[str]:
        """Roles whose messages may have parts: Gemma 4's templates print Python's repr of a system message's. SmolLM3's
        writes nothing where a content is not a string.
        """
        tried = {role: self._tried_role(role, [PART]) or "" for role in ROLES}
        return frozenset(
            role for role, text in tried.items() if PART["text"] in text and not any(each in text for each in PRINTED)
        )

    @cached_property
    def _call_style(self) -> CallStyle:
        for style in CALL_STYLES:
            text = self._tried(_called(style))
            if text is not None and "None" not in text and "{'x'" not in text:
                return style
        return "", {}

    @cached_property
    def _call_roles(self) -> CallRoles | None:
        """The roles of calls and results; None where the template writes calls by itself, or knows no such role."""
        [asked, called] = _called(self._call_style)
        call = called["tool_calls"][0]
        named = {**called, "tool_calls": [{**call, "function": {**call["function"], "name": "xyz"}}]}
        if "xyz" in (self._tried([asked, named]) or "xyz"):
            return None
        for roles in (each for each in CALL_ROLES if each.known in self._source):
            text = self._tried([asked, *_with_roles([named, {"role": "tool", "content": "abc"}], roles)]) or ""
            if "xyz" in text and "abc" in text:
                return roles
        return None

    @cached_property
    def _takes_short_ids_only(self) -> bool:
        short, long = (self._tried(_called(self._call_style, call_id)) for call_id in (SHORT_ID, LONG_ID))
        return short is not None and long is None

    @cached_property
    def _takes_single_calls_only(self) -> bool:
        """Whether the template refuses a message with two calls, or leaves out the second: Llama's and gpt-oss's."""
        [asked, called] = _called(self._call_style)
        calls = called["tool_calls"]
        further = {**calls[0], "id": NEXT_ID, "function": {**calls[0]["function"], "name": "xyz"}}
        one, two = (self._tried([asked, {**called, "tool_calls": [*some, further]}]) for some in ((), calls))
        return one is not None and "xyz" in one and (two is None or "xyz" not in two)

    @cached_property
    def _takes_no_developer(self) -> bool:
        """Whether the template leaves out or refuses a developer's message, and takes one of the system: Qwen's do."""
        system, developer = (self._tried_role(role, "xyz") or "" for role in ("system", DEVELOPER))
        return "xyz" in system and "xyz" not in developer

    @cached_property
    def _takes_first_instructions_only(self) -> bool:
        """Whether the template leaves out or refuses a system message that is not the first of all."""
        earlier, later = ({"role": "system", "content": content} for content in ("x", "xyz"))
        asked = {"role": "user", "content": "abc"}
        second, first = (self._tried([*some, later, asked]) for some in ([earlier], []))
        left_out = second is None or ("abc" in second and "xyz" not in second)
        return left_out and first is not None and "xyz" in first

    @cached_property
    def _takes_thoughts_or_content(self) -> bool:
        """Whether the template refuses a message with a call that has both thoughts and content, as gpt-oss's does."""
        [asked, called] = _called(self._call_style)
        thoughts = dict.fromkeys(READ_THOUGHTS, "x")
        content, either, both = (
            self._tried([asked, {**called, **more}])
            for more in ({"content": "x"}, thoughts, {"content": "x", **thoughts})
        )
        return content is not None and either is not None and both is None

    @cached_property
    def _needs_descriptions(self) -> bool:
        """Whether the template refuses a function without a description, as gpt-oss's does."""
        without, empty = (
            self._tried([ASKED], tools=[{"type": "function", "function": {**DECLARED, **more}}])
            for more in ({}, {"description": ""})
        )
        return without is None and empty is not None

    @cached_property
    def _needs_properties(self) -> bool:
        """Whether the template refuses a function whose parameters have no list of properties, as Seed-OSS's does."""
        function = {**DECLARED, "description": ""}
        without, empty = (
            self._tried([ASKED], tools=[{"type": "function", "function": {**function, "parameters": parameters}}])
            for parameters in ({"type": "object"}, DECLARED["parameters"])
        )
        return without is None and empty is not None

    @cached_property
    def _takes_texts_as_defaults_only(self) -> bool:
        """Whether the template refuses a default of an enumeration that is not text, as gpt-oss's does."""
        number, text = (
            self._tried([ASKED], tools=[{"type": "function", "function": _with_parameter(enum=[1], default=default)}])
            for default in (1, "1")
        )
        return number is None and text is not None

    def _tried_role(self, role: str, content: Any) -> str | None:
        """A rendered conversation with a message of this role."""
        message: Message = {"role": role, "content": content}
        if role == "tool":
            return self._tried([*_called(self._call_style), {**message, "tool_call_id": SHORT_ID, "name": "x"}])
        before, behind = [ASKED] * (role == "assistant"), [ASKED] * (role in SYSTEM_ROLES)
        return self._tried([*before, message, *behind])

    def _tried(self, messages: Sequence[Message], tools: Any = None) -> str | None:
        """The rendered messages; None if the template refuses them."""
        render = self._compiled
        try:
            return render(messages=messages, tools=tools, documents=None, **self._special_tokens)
        except Exception:  # as above
            return None

    @cached_property
    def _compiled(self) -> Callable[..., str]:
        """Renders the template with variables, within the sandbox's limits."""
        from jinja2 import TemplateSyntaxError

        from ondevice.text.template_sandbox import LimitedEnvironment

        environment = LimitedEnvironment()
        try:
            template = environment.compiled(self._source)
        except Exception as error:  # also RecursionError, and Python's SyntaxError for the code that Jinja generates
            where = f"line {error.lineno}: " if isinstance(error, TemplateSyntaxError) else ""
            raise BundleCorruptError(
                f"the chat template is not valid Jinja ({where}{reason(error)}): export the bundle again"
            ) from error

        def render(**variables: Any) -> str:
            environment.restart()
            return template.render(**variables)

        return render


def _called(style: CallStyle, call_id: str = SHORT_ID) -> list[Message]:
    """A conversation with a tool call."""
    content, arguments = style
    call = {"id": call_id, "type": "function", "function": {"name": "x", "arguments": arguments}}
    return [ASKED, {"role": "assistant", "content": content, "tool_calls": [call]}]


def _with_parameter(**schema: Any) -> Mapping[str, Any]:
    """A function, declared with a parameter of this schema."""
    return {**DECLARED, "description": "", "parameters": {"type": "object", "properties": {"x": schema}}}


def _with_properties(parameters: Any) -> Any:
    """The schema of parameters with a list of properties."""
    if parameters is None or isinstance(parameters, Mapping):
        return {"type": "object", "properties": {}, **(parameters or {})}
    return parameters


def _with_texts_as_defaults(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    """The declaration with defaults of enumerations and alternatives as texts of JSON."""
    function = tool["function"]
    parameters = function.get("parameters")
    properties = parameters.get("properties") if isinstance(parameters, Mapping) else None
    if not isinstance(properties, Mapping):
        return tool
    changed = {
        name: {**schema, "default": json.dumps(schema["default"], ensure_ascii=False)}
        for name, schema in properties.items()
        if isinstance(schema, Mapping)
        and (schema.get("enum") or schema.get("oneOf"))
        and not isinstance(schema.get("default", ""), str)
    }
    return {**tool, "function": {**function, "parameters": {**parameters, "properties": {**properties, **changed}}}}


def _with_joined_instructions(messages: Sequence[Message]) -> list[Message]:
    """The messages with the texts of all system messages in one, the first of all."""
    said = [message for message in messages if message["role"] in SYSTEM_ROLES]
    texts = [
        [{"type": "text", "text": each}] if isinstance(each := message["content"], str) else each for message in said
    ]
    parts = [*chain(*texts)]
    plain = all(part.get("type") == "text" for part in parts)  # parts may be written without anything between them
    joined = {**said[0], "content": "\n".join(part["text"] for part in parts) if plain else parts}
    return [joined, *(message for message in messages if message["role"] not in SYSTEM_ROLES)]


def _with_text(call: Mapping[str, Any]) -> Mapping[str, Any]:
    """The call with its arguments as a text of JSON."""
    function = call["function"]
    text = json.dumps(function.get("arguments") or {}, ensure_ascii=False)
    return {**call, "function": {**function, "arguments": text}}


def _with_roles(messages: Sequence[Message], roles: CallRoles) -> Iterator[Message]:
    """The messages with calls and results as such a template takes them. Text before calls stands in front of their
    opening, where there is one, or else in a message of its own.
    """
    for message in messages:
        calls = [call["function"] for call in message.get("tool_calls") or ()]
        before = message.get("content") or ""
        if message["role"] == "tool":
            yield {**message, "role": roles.result}
            continue
        if not calls or (before and not (roles.opening and isinstance(before, str))):
            yield {name: value for name, value in message.items() if name != "tool_calls"}
            before = ""
        if roles.each:
            for each in calls:
                yield {"role": roles.call, "metadata": each["name"], "content": _json(each.get("arguments") or {})}
        elif calls:
            listed = [{"name": each["name"], "arguments": each.get("arguments") or {}} for each in calls]
            yield {"role": roles.call, "content": f"{before}{roles.opening}{_json(listed)}"}


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _with_single_calls(messages: Sequence[Message]) -> list[Message]:
    """The messages with one call each, and after each call its results, which all came after the last one."""
    made: list[Message] = []
    at = 0
    while at < len(messages):
        message, at = messages[at], at + 1
        calls = message.get("tool_calls") or ()
        if len(calls) < 2:
            made.append(message)
            continue
        results: list[list[Message]] = [[] for _ in (*calls, None)]  # the last are those of no call
        while at < len(messages) and messages[at]["role"] == "tool":
            results[_answered(messages[at], calls, results)].append(messages[at])
            at += 1
        for call, own in zip(calls, results, strict=False):
            made += [{**message, "tool_calls": [call]}, *own]
            message = {"role": "assistant", "content": ""}
        made += results[-1]
    return made


def _answered(result: Message, calls: Sequence[Mapping[str, Any]], results: Sequence[Sequence[Message]]) -> int:
    """The place of the call that a result answers: the one of its id, or the first without a result that has its name
    or, where it says no name, no id; -1 if there is none.
    """
    answered, name = result.get("tool_call_id"), result.get("name")
    for place, call in enumerate(calls):
        if answered is not None and call.get("id") == answered:
            return place
    for place, call in enumerate(calls):
        if not results[place] and (call["function"]["name"] == name if name else call.get("id") is None):
            return place
    return -1


def _with_short_ids(message: Message) -> Message:
    """The message with ids of nine letters or digits, equal where they were equal."""
    if message.get("tool_calls"):
        calls = [{**call, "id": _short_id(call["id"])} if call.get("id") else call for call in message["tool_calls"]]
        return {**message, "tool_calls": calls}
    answered = message.get("tool_call_id")
    return {**message, "tool_call_id": _short_id(answered)} if answered else message


def _short_id(call_id: str) -> str:
    if len(call_id) == len(SHORT_ID) and call_id.isascii() and call_id.isalnum():
        return call_id
    return hashlib.sha256(call_id.encode(errors="replace")).hexdigest()[: len(SHORT_ID)]
