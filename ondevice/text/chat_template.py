"""Messages to the text that the model was trained to continue."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

from jinja2 import TemplateError, TemplateSyntaxError

from ondevice.errors import BundleCorruptError, PromptError, reason
from ondevice.text.template_sandbox import LimitedEnvironment

Message = Mapping[str, Any]

ROLES = ("system", "developer", "user", "assistant", "tool")


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
            messages: `{"role": ..., "content": ...}`, oldest first; further keys are for the template.
            add_generation_prompt: open the model's turn at the end.
            variables: anything else this template understands, such as `enable_thinking`.

        Raises:
            PromptError: malformed messages, or ones that the template refuses.
        """
        check_messages(messages)
        # None, not undefined: templates ask `tools is not none`.
        known = {"tools": None, "documents": None, **self._special_tokens, **variables}
        try:
            with self._environment.limits():
                return self._template.render(messages=messages, add_generation_prompt=add_generation_prompt, **known)
        except Exception as error:  # a template can make Python raise anything
            raise PromptError(f"the chat template refuses these messages: {reason(error)}") from error


def check_messages(messages: Sequence[Message]) -> None:
    """Complain of the first message that is none.

    Raises:
        PromptError: naming the message, counted from 1.
    """
    if not messages:
        raise PromptError("there are no messages: pass at least one with the role 'user'")
    for number, message in enumerate(messages, 1):
        if not isinstance(message, Mapping):
            raise PromptError(f"message {number} is not a mapping with 'role' and 'content' but {message!r:.60}")
        role = message.get("role")
        if role not in ROLES:
            raise PromptError(f"message {number} has the role {role!r}: use one of {', '.join(ROLES)}")
        if not isinstance(message.get("content"), str):
            raise PromptError(f"message {number} needs a string as its 'content', not {message.get('content')!r:.60}")


def _environment() -> LimitedEnvironment:
    environment = LimitedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"])
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


def _refuse(message: str) -> NoReturn:
    raise TemplateError(message)
