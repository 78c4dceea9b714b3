"""What a chat request says about tools and thoughts."""

from __future__ import annotations

from typing import Any

from ondevice.options import GenerationKeywords
from ondevice.server.fields import Fields

EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh")
"""OpenAI's `reasoning_effort`: all but the first think, and a template knows no more and less of it."""

THINKING = "enable_thinking"


def chat_options(fields: Fields) -> GenerationKeywords:
    """Tools, thinking and template variables of OpenAI's chat completions, as llama.cpp extends them."""
    options = tool_options([dict(tool) for tool in fields.objects("tools")], fields.get("tool_choice"))
    variables = dict(fields.inner("chat_template_kwargs"))
    effort = fields.choice("reasoning_effort", EFFORTS)
    if effort is not None:
        options["thinking"] = effort != "none"
    elif THINKING in variables:
        options["thinking"] = fields.inner("chat_template_kwargs").flag(THINKING)
    variables.pop(THINKING, None)
    if variables:
        options["template_options"] = variables
    return options


def tool_options(tools: list[dict[str, Any]], choice: Any) -> GenerationKeywords:
    """Declared tools and OpenAI's `tool_choice`, None where it is not there.

    A call is held to its declaration where one of them is `strict`, as OpenAI means it, or a call is required.
    """
    if not tools:
        return {} if choice in (None, "auto", "none") else {"tool_choice": choice}
    if choice in (None, "auto"):
        strict = any(isinstance(tool.get("function"), dict) and tool["function"].get("strict") for tool in tools)
        return {"tools": tools, "tool_choice": "auto" if strict else None}
    return {"tools": tools, "tool_choice": choice}
