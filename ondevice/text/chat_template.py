"""Chat template of a bundle: renders messages as the prompt text that the model was trained on."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from ondevice.errors import BundleCorruptError, PromptError, reason
from ondevice.text.marked_text import joined
from ondevice.text.messages import Message

USER: Message = {"role": "user", "content": "x"}
PARTS: Message = {"role": "user", "content": [{"type": "text", "text": "x"}]}
CALL: Message = {
    "role": "assistant",
    "content": None,
    "tool_calls": [{"id": "x", "type": "function", "function": {"name": "x", "arguments": {}}}],
}
ANSWER: Message = {"role": "assistant", "content": "x"}
TOOL = {"type": "function", "function": {"name": "x", "description": "x", "parameters": {"type": "object"}}}
"""Messages that tell whether a template supports parts and null content: one that does not prints Python's repr."""

SAMPLES: tuple[list[Message], ...] = (
    [USER],
    [{"role": "system", "content": "x"}, USER, ANSWER, USER],
    [USER, {**CALL, "content": ""}, {"role": "tool", "tool_call_id": "x", "name": "x", "content": "x"}],
)
"""Chats in which all roles occur, for the texts that a template makes of them, such as `'<|' + role + '|>'`."""


class Compiled(NamedTuple):
    """A compiled template: renders variables; and the texts in its source."""

    render: Callable[[Mapping[str, Any]], str]
    texts: Sequence[str]


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

    def render(self, messages: Sequence[Message], /, *, add_generation_prompt: bool = True, **variables: Any) -> str:
        """The prompt text, control tokens and `<bos>` included: encode it without adding special tokens.

        It is a `MarkedText` where the messages or variables hold such.

        Args:
            messages: as `plain_messages` makes them, oldest first.
            add_generation_prompt: open the model's turn at the end.
            variables: further variables of this template, such as `enable_thinking` and `tools`.

        Raises:
            PromptError: the template refuses the messages, or exceeds a limit.
            BundleCorruptError: the template is not Jinja.
        """
        understood = [self._understood(message) for message in messages]
        own = {"messages": understood, "add_generation_prompt": add_generation_prompt}
        render = self._compiled.render
        try:
            # None, not undefined: templates ask `tools is not none`.
            return render({"tools": None, "documents": None, **self._special_tokens, **variables, **own})
        except Exception as error:  # a template can make Python raise anything
            raise PromptError(f"the chat template refuses these messages: {reason(error)}") from error

    @cached_property
    def written(self) -> str:
        """The texts that the template writes by itself, one after another with NUL between them.

        These are the texts in its source, and what it makes of chats of one letter.
        """
        made = (self._tried(messages, tools) for messages in SAMPLES for tools in (None, [TOOL]))
        return "\0".join([*self._compiled.texts, *(text for text in made if text is not None)])

    def _understood(self, message: Message) -> Message:
        """The message with its content as a string, if the template supports no other form."""
        content = message.get("content", "")
        if isinstance(content, list) and not self._reads_parts:
            if any(part.get("type") != "text" for part in content):
                raise PromptError("this bundle's chat template has no place for pictures and sounds: leave them out")
            return {**message, "content": joined("\n", (part["text"] for part in content))}
        if content is None and not self._reads_null:
            return {**message, "content": ""}
        return message

    @cached_property
    def _reads_parts(self) -> bool:
        text = self._tried([PARTS])
        return text is not None and "'type'" not in text

    @cached_property
    def _reads_null(self) -> bool:
        text = self._tried([USER, CALL])
        return text is not None and "None" not in text

    def _tried(self, messages: Sequence[Message], tools: Sequence[Any] | None = None) -> str | None:
        """The rendered messages, and what opens the reply; None if the template refuses them."""
        own = {"messages": messages, "tools": tools, "documents": None, "add_generation_prompt": True}
        render = self._compiled.render
        try:
            return render({**self._special_tokens, **own})
        except Exception:  # as above
            return None

    @cached_property
    def _compiled(self) -> Compiled:
        from jinja2 import TemplateSyntaxError

        from ondevice.text.template_sandbox import LimitedEnvironment

        environment = LimitedEnvironment()
        try:
            template, texts = environment.compiled(self._source)
        except Exception as error:  # also RecursionError, and Python's SyntaxError for the code that Jinja generates
            where = f"line {error.lineno}: " if isinstance(error, TemplateSyntaxError) else ""
            raise BundleCorruptError(
                f"the chat template is not valid Jinja ({where}{reason(error)}): export the bundle again"
            ) from error
        return Compiled(lambda variables: environment.rendered(template, variables), texts)
