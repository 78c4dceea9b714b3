"""Anthropic's messages and tools in OpenAI's form, which the chat layer reads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ondevice.server.fields import Fields


def read_messages(fields: Fields) -> list[dict[str, Any]]:
    """`system` and `messages` of a request."""
    fields.needed("messages")
    system = _texts(fields, "system")
    found = [{"role": "system", "content": system}] if system else []
    for message in fields.objects("messages"):
        message.needed("content")
        role = message.choice("role", ("user", "assistant", "system")) or "user"
        blocks = [Fields({"type": "text", "text": message["content"]})]
        if not isinstance(message["content"], str):
            blocks = message.objects("content")
        found += _assistant(blocks) if role == "assistant" else _user(blocks, role)
    return found


def read_tools(fields: Fields) -> list[dict[str, Any]]:
    """`tools` of a request."""
    return [
        {
            "type": "function",
            "function": {
                "name": tool.needed("name"),
                "description": tool.text("description") or "",
                "parameters": dict(tool.inner("input_schema")),
            },
        }
        for tool in fields.objects("tools")
    ]


def _user(blocks: Sequence[Fields], role: str) -> list[dict[str, Any]]:
    """Results of tools are messages of their own, before what the user says."""
    results, texts = [], []
    for block in blocks:
        if _kind(block, ("text", "tool_result")) == "text":
            texts.append(block.text("text") or "")
        else:
            content = _texts(block, "content")
            results.append({"role": "tool", "tool_call_id": block.needed("tool_use_id"), "content": content})
    said = [{"role": role, "content": "\n".join(texts)}] if texts or not results else []
    return [*results, *said]


def _assistant(blocks: Sequence[Fields]) -> list[dict[str, Any]]:
    texts, thoughts, calls = [], [], []
    for block in blocks:
        kind = _kind(block, ("text", "thinking", "redacted_thinking", "tool_use"))
        if kind == "text":
            texts.append(block.text("text") or "")
        elif kind == "thinking":
            thoughts.append(block.text("thinking") or "")
        elif kind == "tool_use":
            function = {"name": block.needed("name"), "arguments": dict(block.inner("input"))}
            calls.append({"id": block.needed("id"), "type": "function", "function": function})
    made: dict[str, Any] = {"role": "assistant", "content": "".join(texts) or (None if calls else "")}
    made |= {"reasoning_content": "".join(thoughts)} if thoughts else {}
    return [made | ({"tool_calls": calls} if calls else {})]


def _texts(fields: Fields, name: str) -> str:
    """A string, or blocks of text."""
    if isinstance(fields.get(name), str):
        return str(fields[name])
    blocks = fields.objects(name)
    for block in blocks:
        _kind(block, ("text",))
    return "\n".join(block.text("text") or "" for block in blocks)


def _kind(block: Fields, kinds: Sequence[str]) -> str:
    """The type of a block; images and documents are refused."""
    block.needed("type")
    return block.choice("type", kinds) or ""
