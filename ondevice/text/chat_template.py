"""Messages to the text that the model was trained to continue."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn

from jinja2 import TemplateError, TemplateSyntaxError

from ondevice.errors import BundleCorruptError, PromptError, reason
from ondevice.text.messages import Message
from ondevice.text.template_sandbox import LimitedEnvironment

PARTS: Message = {"role": "user", "content": [{"type": "text", "text": "x"}]}
NULL: list[Message] = [
    {"role": "user", "content": "x"},
    {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "x", "arguments": {}}}]},
]
"""A template that does not know these forms writes them down as Python does."""


class ChatTemplate:
    """A bundle's `chat_template.jinja`, rendered as transformers renders it.

    Messages reach the template as they are: leaving out the thoughts of earlier turns, for one, is its business.

    Args:
        source: the Jinja text.
        special_tokens: what the template may use by name, such as `bos_token`.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str] | None = None) -> None:
        self._environment = _environment()
        try:
            self._template = self._environment.compiled(source)
        except Exception as error:  # not only its own: RecursionError, or Python's SyntaxError for what it is made into
            where = f"line {error.lineno}: " if isinstance(error, TemplateSyntaxError) else ""
            raise BundleCorruptError(
                f"the chat template is not valid Jinja ({where}{reason(error)}): export the bundle again"
            ) from error
        self._special_tokens = dict(special_tokens or {})

    @classmethod
    def from_file(cls, path: str | Path, special_tokens: Mapping[str, str] | None = None) -> ChatTemplate:
        """Read a template.

        Raises:
            BundleCorruptError: it cannot be read, or is not Jinja.
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
            variables: anything else this template understands, such as `enable_thinking` and `tools`.

        Raises:
            PromptError: messages that the template refuses.
        """
        understood = [self._understood(message) for message in messages]
        # None, not undefined: templates ask `tools is not none`.
        known = {"tools": None, "documents": None, **self._special_tokens, **variables}
        try:
            with self._environment.limits():
                return self._template.render(messages=understood, add_generation_prompt=add_generation_prompt, **known)
        except Exception as error:  # a template can make Python raise anything
            raise PromptError(f"the chat template refuses these messages: {reason(error)}") from error

    def _understood(self, message: Message) -> Message:
        """Content as a string, where the template reads nothing else."""
        content = message.get("content", "")
        if isinstance(content, list) and not self._reads_parts:
            return {**message, "content": "\n".join(part["text"] for part in content)}
        if content is None and not self._reads_null:
            return {**message, "content": ""}
        return message

    @cached_property
    def _reads_parts(self) -> bool:
        return not self._tried([PARTS]).count("'type'")

    @cached_property
    def _reads_null(self) -> bool:
        return not self._tried(NULL).count("None")

    def _tried(self, messages: Sequence[Message]) -> str:
        """What the template makes of messages; where it refuses them, what Python would write."""
        try:
            with self._environment.limits():
                return self._template.render(messages=messages, tools=None, documents=None, **self._special_tokens)
        except Exception:  # as above
            return str(messages)


def _environment() -> LimitedEnvironment:
    environment = LimitedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"])
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


def _refuse(message: str) -> NoReturn:
    raise TemplateError(message)
