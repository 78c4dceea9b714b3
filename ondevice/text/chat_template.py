"""Chat template of a bundle: renders messages as the prompt text that the model was trained on."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from ondevice.errors import BundleCorruptError, PromptError, reason
from ondevice.text.messages import Message

PARTS: Message = {"role": "user", "content": [{"type": "text", "text": "x"}]}
NULL: list[Message] = [
    {"role": "user", "content": "x"},
    {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "x", "arguments": {}}}]},
]
"""Messages that tell whether a template supports parts and null content: one that does not prints Python's repr."""
ROLES: list[list[Message]] = [
    [{"role": "system", "content": "x"}, {"role": "user", "content": "x"}],
    [*NULL, {"role": "tool", "name": "x", "content": "x"}],
]
"""Messages whose rendering shows what a template writes around each role."""


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
        understood = [self._understood(message) for message in messages]
        # None, not undefined: templates ask `tools is not none`.
        known = {"tools": None, "documents": None, **self._special_tokens, **variables}
        render = self._compiled
        try:
            return render(messages=understood, add_generation_prompt=add_generation_prompt, **known)
        except Exception as error:  # a template can make Python raise anything
            raise PromptError(f"the chat template refuses these messages: {reason(error)}") from error

    def _understood(self, message: Message) -> Message:
        """The message with its content as a string, if the template supports no other form."""
        content = message.get("content", "")
        if isinstance(content, list) and not self._reads_parts:
            if any(part.get("type") != "text" for part in content):
                raise PromptError("this bundle's chat template has no place for pictures and sounds: leave them out")
            return {**message, "content": "\n".join(part["text"] for part in content)}
        if content is None and not self._reads_null:
            return {**message, "content": ""}
        return message

    @cached_property
    def written(self) -> str:
        """Text that the template writes by itself: its source, and what it joins, as by `'<|' + role + '|>'`."""
        return "\n".join([self._source, *(self._tried(messages) or "" for messages in ([PARTS], *ROLES))])

    @cached_property
    def _reads_parts(self) -> bool:
        return "'type'" not in (self._tried([PARTS]) or "'type'")

    @cached_property
    def _reads_null(self) -> bool:
        return "None" not in (self._tried(NULL) or "None")

    def _tried(self, messages: Sequence[Message]) -> str | None:
        """The rendered messages; None if the template refuses them."""
        render = self._compiled
        try:
            return render(messages=messages, tools=None, documents=None, **self._special_tokens)
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
