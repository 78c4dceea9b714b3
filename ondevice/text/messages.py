"""Messages in OpenAI's form: what they may hold, and how a chat template takes them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from ondevice.errors import PromptError, reason

Message = Mapping[str, Any]
"""`{"role": ..., "content": ...}`, and for a template whatever else it reads: `tool_calls`, `tool_call_id`, `name`,
`reasoning_content`. `content` is a string or a list of text parts, and beside `tool_calls` it may be None.
"""

ROLES = ("system", "developer", "user", "assistant", "tool")

THOUGHTS = ("reasoning_content", "thinking", "reasoning")
"""Names that a message's thoughts go by, the one that counts first."""


def plain_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """The messages as plain JSON for a template: arguments of tool calls as mappings, thoughts by all of their names.

    Raises:
        PromptError: one is malformed; it is named, counted from 1.
    """
    if not messages:
        raise PromptError("there are no messages: pass at least one with the role 'user'")
    called: set[str] = set()
    return [_plain_message(message, f"message {number}", called) for number, message in enumerate(messages, 1)]


def plain_tools(tools: Sequence[Mapping[str, Any]] | None) -> list[dict[str, Any]] | None:
    """Declarations of functions, `{"type": "function", "function": {"name": ...}}`, as plain JSON.

    Raises:
        PromptError: one is malformed.
    """
    if tools is None:
        return None
    if isinstance(tools, str | Mapping) or not isinstance(tools, Sequence):
        raise PromptError(f"tools must be a list of declarations, not {tools!r:.60}")
    declared = []
    for number, tool in enumerate(tools, 1):
        function = tool.get("function") if isinstance(tool, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str) or not function["name"]:
            raise PromptError(
                f'tool {number} is no {{"type": "function", "function": {{"name": ...}}}} but {tool!r:.60}'
            )
        declared.append(plain(tool, f"tool {number}"))
    return declared


def plain(value: Any, place: str) -> Any:
    """A value of JSON's types only, copied: a template must not reach into other objects.

    Raises:
        PromptError: it holds anything else, or too much in each other.
    """
    try:
        return _plain(value, place)
    except RecursionError as error:
        raise PromptError(f"{place} holds too many lists in each other") from error


def _plain(value: Any, place: str) -> Any:
    if value is None or type(value) in (str, int, float, bool):
        return value
    for kind in (str, int, float):  # a subclass may have methods
        if isinstance(value, kind):
            return kind(value)
    if isinstance(value, Mapping):
        return {_plain(key, place): _plain(item, place) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item, place) for item in value]
    raise PromptError(f"{place} holds {value!r:.60}, which is not JSON")


def _plain_message(message: Message, place: str, called: set[str]) -> dict[str, Any]:
    """
    called : ids of the calls before it; its own are added
    """
    if not isinstance(message, Mapping):
        raise PromptError(f"{place} is not a mapping with 'role' and 'content' but {message!r:.60}")
    role = message.get("role")
    if role not in ROLES:
        raise PromptError(f"{place} has the role {role!r}: use one of {', '.join(ROLES)}")
    _check_content(message, place)
    made: dict[str, Any] = plain(message, place)
    if made.get("tool_calls") is not None:
        made["tool_calls"] = _calls(made["tool_calls"], place)
        called |= {call["id"] for call in made["tool_calls"] if isinstance(call.get("id"), str)}
    answered = made.get("tool_call_id")
    if role == "tool" and answered is not None and answered not in called and not made.get("name"):
        raise PromptError(f"{place} answers the tool call {answered!r:.60}, which no message before it makes")
    # As transformers does: templates read one name or another.
    thoughts = next((made[name] for name in THOUGHTS if made.get(name) is not None), None)
    return made if thoughts is None else {"thinking": thoughts, **made, "reasoning_content": thoughts}


def _check_content(message: Message, place: str) -> None:
    content, role = message.get("content"), message["role"]
    if isinstance(content, str) or (content is None and role == "assistant" and message.get("tool_calls")):
        return
    if not isinstance(content, list | tuple) or not all(isinstance(part, Mapping) for part in content):
        raise PromptError(f"{place} needs a string as its 'content', or a list of text parts, not {content!r:.60}")
    for part in content:
        if part.get("type") != "text":
            raise PromptError(f"{place} has a part of the type {part.get('type')!r:.60}: this runtime reads text only")
        if not isinstance(part.get("text"), str):
            raise PromptError(f"{place} has a text part whose 'text' is {part.get('text')!r:.60}")


def _calls(calls: Any, place: str) -> list[dict[str, Any]]:
    if not isinstance(calls, list):
        raise PromptError(f"{place} needs a list as its 'tool_calls', not {calls!r:.60}")
    return [_call(call, f"{place}, tool call {number}") for number, call in enumerate(calls, 1)]


def _call(call: Any, place: str) -> dict[str, Any]:
    """A call whose arguments are a mapping: templates write them down one by one, and refuse a string."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise PromptError(f'{place} is no {{"function": {{"name": ..., "arguments": ...}}}} but {call!r:.60}')
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments) if arguments.strip() else {}
        except (ValueError, RecursionError) as error:
            raise PromptError(f"{place} has arguments that are no JSON: {reason(error)}") from error
    if arguments is not None and not isinstance(arguments, dict):
        raise PromptError(f"{place} has arguments that are no JSON object: {arguments!r:.60}")
    return {**call, "function": {**function, "arguments": arguments}}
