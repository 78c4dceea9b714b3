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
    options = tool_options(fields, [dict(tool) for tool in fields.objects("tools")])
    variables = dict(fields.inner("chat_template_kwargs"))
    effort = fields.choice("reasoning_effort", EFFORTS)
    if effort is not None:
        options["thinking"] = effort != "none"
    elif THINKING in variables:
        options["thinking"] = fields.inner("chat_template_kwargs").flag(THINKING)
    variables.pop(THINKING, None)
    if variables:
        options["template_options"] = variables
    _check_format(fields)
    return options


def tool_options(fields: Fields, tools: list[dict[str, Any]]) -> GenerationKeywords:
    """Declared tools, unless the request says that none shall be called."""
    choice = fields.get("tool_choice", "auto")
    kind = choice if isinstance(choice, str) else choice.get("type") if isinstance(choice, dict) else None
    if kind == "none" or not tools:
        return {}
    if kind != "auto":
        raise fields.missing_feature("tool_choice", "this server leaves it to the model: `auto`, or `none`")
    return {"tools": tools}


def _check_format(fields: Fields) -> None:
    if fields.inner("response_format").get("type", "text") != "text":
        raise fields.missing_feature("response_format", "this server has no structured output yet: only `text`")
