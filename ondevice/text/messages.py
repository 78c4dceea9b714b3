"""Messages, tools and tool calls in OpenAI's form: their checks, and how a chat template takes them."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ondevice.bundle_format.manifest import SPECIAL_TOKENS
from ondevice.errors import PromptError, UsageError, reason, shown
from ondevice.text.media_parts import PLACEHOLDERS

Message = Mapping[str, Any]
"""`{"role": ..., "content": ...}`, and for a template whatever else it reads: `tool_calls`, `tool_call_id`, `name`,
`reasoning_content`. `content` is a string or a list of parts: text, pictures and sounds (`text.media_parts`). A message
with `tool_calls` may have None.
"""

Tool = Mapping[str, Any]
"""Declaration of a function that the model may call, in OpenAI's form."""

DEVELOPER = "developer"
SYSTEM_ROLES = ("system", DEVELOPER)
ROLES = (*SYSTEM_ROLES, "user", "assistant", "tool")

THOUGHTS = ("reasoning_content", "thinking", "reasoning")
"""Names of the field with a message's thoughts, in order of precedence."""

READ_THOUGHTS = ("reasoning_content", "thinking")
"""The names of them that templates read."""

FUNCTION_NAME = re.compile(r"[\w.-]{1,128}")
"""Names that a function may have: those that the APIs of OpenAI and Anthropic allow, and what the parser of Gemma 4's
replies reads as a name. Quotes, braces or control tokens would end the call in the middle of its name."""

OWN = ("messages", "tools", "add_generation_prompt", *SPECIAL_TOKENS, "self")
"""Variables of a template that `template_options` cannot set; `self` is Jinja's name for the template."""

THINKING, EFFORT, BUDGET = "enable_thinking", "reasoning_effort", "thinking_budget"
"""Variables of templates: whether the model thinks, and how much, in a word or in tokens."""

THINKING_TOO = "thinking"
"""Another name of the first, in Granite 3.2's and 3.3's templates."""

LEVELS = {"minimal": "low", "low": "low", "medium": "medium", "high": "high", "xhigh": "high", "max": "high"}
"""Efforts that the APIs know, and those that models were trained with."""


def _new_id() -> str:
    return f"call_{secrets.token_hex(12)}"


@dataclass(frozen=True)
class ToolCall:
    """A function that the model wants called.

    Attributes:
        name: name of the function, as declared.
        arguments: its arguments by name.
        id: `tool_call_id` for the message with the result; unique for each call.
    """

    name: str
    arguments: dict[str, Any]
    id: str = field(default_factory=_new_id, compare=False)

    def as_openai(self) -> dict[str, Any]:
        """The entry of `tool_calls` in a message, where arguments are a string of JSON."""
        function = {"name": self.name, "arguments": json.dumps(self.arguments, ensure_ascii=False)}
        return {"id": self.id, "type": "function", "function": function}


@dataclass(frozen=True)
class ChatOptions:
    """Variables of a chat template other than the messages.

    Attributes:
        tools: functions that the model may call:
            `{"type": "function", "function": {"name", "description", "parameters"}}`.
        thinking: whether the model thinks before it answers, `enable_thinking` in templates; None: its default. A word
            of `LEVELS`, such as "high", also says how much, where the template has a `reasoning_effort`.
        template_options: further variables of the template, such as `preserve_thinking`.
        continue_final: whether the reply continues the text of the last message, an assistant's, instead of following
            it as a message of its own.

    Raises:
        UsageError: an invalid value.
    """

    tools: Sequence[Tool] | None = None
    thinking: bool | str | None = None
    template_options: Mapping[str, Any] | None = None
    continue_final: bool = False

    def __post_init__(self) -> None:
        tools = self.tools
        if tools is not None and (isinstance(tools, str | Mapping) or not isinstance(tools, Sequence)):
            raise UsageError(f"tools must be a list of declarations, not {shown(tools, 60)}")
        thinking = self.thinking
        if not (thinking is None or isinstance(thinking, bool) or (isinstance(thinking, str) and thinking in LEVELS)):
            raise UsageError(f"thinking must be True, False, None or one of {', '.join(LEVELS)}, not {shown(thinking)}")
        if not isinstance(self.continue_final, bool):
            raise UsageError(f"continue_final must be True or False, not {shown(self.continue_final)}")
        options = self.template_options
        if options is None:
            return
        if not isinstance(options, Mapping) or not all(isinstance(name, str) for name in options):
            raise UsageError(f"template_options must be a mapping of names to values, not {shown(options)}")
        for name in options:
            if name in OWN or (name == THINKING and self.thinking is not None):
                raise UsageError(f"template_options cannot set {name}: it has an option of its own, or is not yours")

    def __bool__(self) -> bool:
        """Whether any option is set."""
        return bool(self.tools or self.template_options) or self.thinking is not None or self.continue_final

    @property
    def thinks(self) -> bool | None:
        """Whether the reply may begin with thoughts: the template asks for them, and the answer has not begun. None
        where nothing is said.
        """
        wanted = self.variables.get(THINKING)
        return False if self.continue_final else None if wanted is None else bool(wanted)

    @property
    def variables(self) -> dict[str, Any]:
        """Variables of the template, without `tools`."""
        made = dict(self.template_options or {})
        if isinstance(self.thinking, str):
            return {EFFORT: LEVELS[self.thinking], **made, THINKING: True}
        return made if self.thinking is None else {**made, THINKING: self.thinking}


def plain_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """The messages as plain JSON for a template: arguments of tool calls as mappings, thoughts by both names that
    templates read.

    Raises:
        PromptError: a message is malformed; the error names it, counted from 1.
    """
    if not messages:
        raise PromptError("there are no messages: pass at least one with the role 'user'")
    called: set[str] = set()
    return [_plain_message(message, f"message {number}", called) for number, message in enumerate(messages, 1)]


def begun_answer(messages: Sequence[Message]) -> str:
    """The text of the last message, which a reply is to continue.

    Args:
        messages: checked ones. Parts of the last one that are no text, such as pictures, add nothing.

    Raises:
        PromptError: it is no assistant's message, or has tool calls, after which no text goes on.
    """
    last = messages[-1]
    if last["role"] != "assistant":
        raise PromptError(
            f"only an assistant's message can be continued, and the last one is of the role {last['role']}"
        )
    if last.get("tool_calls"):
        raise PromptError("the last message has tool calls and cannot be continued: send their results")
    content = last["content"]
    if isinstance(content, str):
        return content
    return "".join(part["text"] for part in content if isinstance(part, Mapping) and part.get("text"))


def plain_tools(tools: Sequence[Mapping[str, Any]] | None) -> list[dict[str, Any]] | None:
    """Declarations of functions, `{"type": "function", "function": {"name": ...}}`, as plain JSON.

    Raises:
        PromptError: a declaration is malformed.
    """
    if tools is None:
        return None
    declared = []
    for number, tool in enumerate(tools, 1):
        function = tool.get("function") if isinstance(tool, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str) or not function["name"]:
            raise PromptError(
                f'tool {number} is no {{"type": "function", "function": {{"name": ...}}}} but {shown(tool, 60)}'
            )
        if not FUNCTION_NAME.fullmatch(function["name"]):
            raise PromptError(
                f"tool {number} has a function name that is not 1 to 128 letters, digits, _, - or .: "
                f"{shown(function['name'], 60)}"
            )
        declared.append(plain(tool, f"tool {number}"))
    return declared


def plain(value: Any, place: str) -> Any:
    """A copy of a value in JSON's types only: a template must not reach into other objects.

    Raises:
        PromptError: it holds another type, or is nested too deep.
    """
    try:
        return _plain(value, place)
    except RecursionError as error:
        raise PromptError(f"{place} holds too many lists in each other") from error


def text_length(value: Any) -> int:
    """Characters of all texts in a value of JSON, names included, and one for every element."""
    length, left = 0, [value]
    while left:
        each = left.pop()
        length += len(each) if isinstance(each, str) else 1
        if isinstance(each, Mapping):
            left += [*each, *each.values()]
        elif isinstance(each, list | tuple):
            left += each
    return length


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
    raise PromptError(f"{place} holds {shown(value, 60)}, which is not JSON")


def _plain_message(message: Message, place: str, called: set[str]) -> dict[str, Any]:
    """
    Args:
        called: ids of the tool calls of earlier messages; those of this message are added.
    """
    if not isinstance(message, Mapping):
        raise PromptError(f"{place} is not a mapping with 'role' and 'content' but {shown(message, 60)}")
    role = message.get("role")
    if not isinstance(role, str) or role not in ROLES:
        raise PromptError(f"{place} has the role {shown(role)}: use one of {', '.join(ROLES)}")
    _check_content(message, place)
    made: dict[str, Any] = plain(message, place)
    # Clients write null, or an empty list, for what a message has not; templates ask whether the field is there.
    made = {name: value for name, value in made.items() if value is not None or name not in ("tool_calls", *THOUGHTS)}
    if made.get("tool_calls") == []:
        del made["tool_calls"]
    if "tool_calls" in made:
        made["tool_calls"] = _calls(made["tool_calls"], place)
        called |= {call["id"] for call in made["tool_calls"] if isinstance(call.get("id"), str)}
    answered = made.get("tool_call_id")
    if answered is not None and not isinstance(answered, str):
        raise PromptError(f"{place} needs a string as its 'tool_call_id', not {shown(answered, 60)}")
    if role == "tool" and answered is not None and answered not in called and not made.get("name"):
        raise PromptError(f"{place} answers the tool call {shown(answered, 60)}, which no message before it makes")
    # As in transformers: some templates read one name, some another.
    thoughts = next((made[name] for name in THOUGHTS if made.get(name) is not None), None)
    missing = [name for name in READ_THOUGHTS if made.get(name) is None]
    return made if thoughts is None else {**made, **dict.fromkeys(missing, thoughts)}


def _check_content(message: Message, place: str) -> None:
    content, role = message.get("content"), message["role"]
    if isinstance(content, str) or (content is None and role == "assistant" and message.get("tool_calls")):
        return
    if not isinstance(content, list | tuple) or not all(isinstance(part, Mapping) for part in content):
        raise PromptError(f"{place} needs a string as its 'content', or a list of parts, not {shown(content, 60)}")
    for part in content:
        kind = part.get("type")
        if isinstance(kind, str) and part in PLACEHOLDERS:
            continue
        if not isinstance(kind, str) or kind != "text":
            raise PromptError(
                f"{place} has a part of the type {shown(kind, 60)}: parts are text, image, audio and video"
            )
        if not isinstance(part.get("text"), str):
            raise PromptError(f"{place} has a text part whose 'text' is {shown(part.get('text'), 60)}")


def _calls(calls: Any, place: str) -> list[dict[str, Any]]:
    if not isinstance(calls, list):
        raise PromptError(f"{place} needs a list as its 'tool_calls', not {shown(calls, 60)}")
    return [_call(call, f"{place}, tool call {number}") for number, call in enumerate(calls, 1)]


def _call(call: Any, place: str) -> dict[str, Any]:
    """A call with its arguments as a mapping: templates write them one by one, and refuse a string, or none."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise PromptError(f'{place} is no {{"function": {{"name": ..., "arguments": ...}}}} but {shown(call, 60)}')
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments) if arguments.strip() else {}
        except (ValueError, RecursionError) as error:
            raise PromptError(f"{place} has arguments that are no JSON: {reason(error)}") from error
    if arguments is not None and not isinstance(arguments, dict):
        raise PromptError(f"{place} has arguments that are no JSON object: {shown(arguments, 60)}")
    return {**call, "function": {**function, "arguments": {} if arguments is None else arguments}}
