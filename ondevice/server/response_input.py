"""A response's input and tools in the form of chat completions, which the chat layer reads."""

from __future__ import annotations

from typing import Any

from ondevice.server.fields import Fields

ROLES = ("user", "assistant", "system", "developer")
KINDS = ("message", "function_call", "function_call_output", "reasoning")
TEXTS = ("input_text", "output_text", "reasoning_text", "summary_text", "text")


def read_input(fields: Fields) -> list[dict[str, Any]]:
    """`instructions` and `input` of a request, as messages."""
    fields.needed("input")
    instructions = fields.text("instructions")
    found: list[dict[str, Any]] = [{"role": "system", "content": instructions}] if instructions else []
    if isinstance(fields["input"], str):
        return [*found, {"role": "user", "content": fields["input"]}]
    for item in fields.objects("input"):
        kind = item.choice("type", KINDS) or "message"
        if kind == "function_call_output":
            found.append({"role": "tool", "tool_call_id": item.needed("call_id"), "content": _text(item, "output")})
        elif kind == "message" and (role := item.choice("role", ROLES)) != "assistant":
            found.append({"role": role or "user", "content": _text(item, "content")})
        else:
            _say(_said_last(found), item, kind)
    return [{**each, "content": ""} if each["content"] is None and "tool_calls" not in each else each for each in found]


def read_tools(fields: Fields) -> list[dict[str, Any]]:
    """Functions, which are declared in one object less; tools that only OpenAI has are refused."""
    found = []
    for tool in fields.objects("tools"):
        tool.needed("type")
        tool.choice("type", ("function",))
        tool.needed("name")
        found.append({"type": "function", "function": {name: each for name, each in tool.items() if name != "type"}})
    return found


def _said_last(messages: list[dict[str, Any]]) -> dict[str, Any]:
    """The assistant's message at the end, which thoughts, calls and text of one turn share."""
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": None})
    return messages[-1]


def _say(message: dict[str, Any], item: Fields, kind: str) -> None:
    if kind == "function_call":
        function = {"name": item.needed("name"), "arguments": item.text("arguments") or ""}
        call = {"id": item.needed("call_id"), "type": "function", "function": function}
        message["tool_calls"] = [*message.get("tool_calls", []), call]
    elif kind == "reasoning":
        message["reasoning_content"] = message.get("reasoning_content", "") + _text(item, "content")
    else:
        message["content"] = (message["content"] or "") + _text(item, "content")


def _text(item: Fields, name: str) -> str:
    """A string, or parts of text."""
    if isinstance(item.get(name), str):
        return str(item[name])
    return "".join(_part(part) for part in item.objects(name))


def _part(part: Fields) -> str:
    part.needed("type")
    part.choice("type", TEXTS)
    return part.text("text") or ""
