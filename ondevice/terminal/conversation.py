"""What has been said, and how the next reply comes about."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ondevice.errors import ContextOverflowError, OndeviceError, PromptError, UsageError
from ondevice.reply import Reply
from ondevice.terminal.keyboard import unseen_keys
from ondevice.terminal.reply import stream_reply, summary
from ondevice.terminal.reply_view import TextView
from ondevice.text.prompt_file import read_text

if TYPE_CHECKING:
    from ondevice.decoding.record import Stats
    from ondevice.model import Model
    from ondevice.options import GenerationKeywords

FULL = "/drop forgets the oldest question and its reply, /clear all"

NOTICES = {
    "cancelled": "(stopped)",
    "length": "(cut at --max-new-tokens)",
    "context": f"(the context is full: {FULL})",
}

HELLO = {"role": "user", "content": "Hello"}

SYSTEM = ("system", "developer")


class Conversation:
    """Messages of one session. A reply that was stopped stays in it as far as it came.

    Raises:
        PromptError: the bundle has no chat template, or one that refuses a system message.
    """

    def __init__(self, model: Model, options: GenerationKeywords, system: str | None = None) -> None:
        self._model = model
        self.options = options
        self.messages: list[dict[str, Any]] = []
        self.thoughts = ""
        """Of the last reply."""
        self._stats: Stats | None = None
        self.instruct(system)
        # A bundle that cannot chat should say so now, not after the first message was typed.
        model.encode([*self.messages, HELLO])

    @property
    def system(self) -> str | None:
        """The instructions for the model."""
        return self.messages[0]["content"] if self._beginning else None

    @property
    def _beginning(self) -> list[dict[str, Any]]:
        """The messages that are no turn of the conversation."""
        return self.messages[:1] if self.messages and self.messages[0]["role"] in SYSTEM else []

    @property
    def can_think(self) -> bool:
        """Whether the template knows a difference."""
        return self._model.encode([HELLO], thinking=True) != self._model.encode([HELLO], thinking=False)

    def instruct(self, system: str | None) -> None:
        """Other instructions from now on, or none."""
        rest = self.messages[len(self._beginning) :]
        self.messages = [*([{"role": "system", "content": system}] if system else []), *rest]

    def use(self, options: GenerationKeywords) -> None:
        """Other options from now on.

        Raises:
            OndeviceError: one that makes no sense, or not with this bundle.
        """
        self._model.stream([*self._beginning, HELLO], **options).close()  # nothing is computed
        self.options = options

    def say(self, text: str) -> None:
        """Send a message and show the reply. One that cannot be sent leaves the conversation as it was."""
        asked = [*self.messages, {"role": "user", "content": text}]
        try:
            with unseen_keys():
                reply = stream_reply(self._model, asked, self.options, TextView())
        except PromptError as error:
            hint = f" ({FULL})" if isinstance(error, ContextOverflowError) else ""
            print(f"ondevice: {error}{hint}", file=sys.stderr)
            return
        self.messages = [*asked, self._message(reply)]
        self.thoughts = reply.reasoning
        self._stats = reply.stats
        if reply.finish_reason in NOTICES:
            print(NOTICES[reply.finish_reason], file=sys.stderr)

    def regenerate(self) -> None:
        """Answer the last message anew, in place of the reply that it had.

        Raises:
            UsageError: there is none.
        """
        before = self.messages
        if len(before) < 2 or (before[-2]["role"], before[-1]["role"]) != ("user", "assistant"):
            raise UsageError("no message yet that could be answered anew")
        self.messages = before[:-2]
        self.say(before[-2]["content"])
        if len(self.messages) < len(before):  # it failed
            self.messages = before

    def drop(self) -> None:
        """Forget the oldest question, and what came of it.

        Raises:
            UsageError: there is none.
        """
        beginning = self._beginning
        turns = self.messages[len(beginning) :]
        if not turns:
            raise UsageError("no message yet that could be dropped")
        later = [place for place, message in enumerate(turns) if place and message["role"] == "user"]
        self.messages = [*beginning, *(turns[later[0] :] if later else [])]

    def clear(self) -> None:
        """Forget everything said; the model's cache and its drafters forget it too."""
        self.messages = self._beginning
        self.thoughts = ""
        self._model.forget()

    def save(self, path: Path) -> None:
        """Write the messages to a file, as JSON in OpenAI's form.

        Raises:
            UsageError: there is something else of that name.
            OSError: it cannot be written.
        """
        if path.exists():
            try:
                _read_messages(path)
            except PromptError as error:
                raise UsageError(f"{path} is no conversation, it will not be overwritten") from error
        path.write_text(json.dumps(self.messages, indent=1, ensure_ascii=False) + "\n", "utf-8")

    def load(self, path: Path) -> None:
        """Go on with the messages of a file.

        Raises:
            PromptError: it holds none that this bundle can read.
        """
        messages = _read_messages(path)
        self._model.encode([*messages, HELLO])
        self.messages, self.thoughts = messages, ""

    def _message(self, reply: Reply) -> dict[str, Any]:
        """The reply as the template needs it: where a bundle does not say how to tell thoughts, the template can only
        drop them by their control tokens.
        """
        if reply.reasoning or reply.tool_calls:
            return reply.message
        return {"role": "assistant", "content": self._as_said(reply)}

    def _as_said(self, reply: Reply) -> str:
        tokenizer = self._model.tokenizer
        inner = list(reply.token_ids)
        while tokenizer and inner and inner[-1] in tokenizer.special_ids:
            inner.pop()  # the end of the turn, which the template writes itself
        if tokenizer is None or tokenizer.special_ids.isdisjoint(inner):
            return reply.text
        return tokenizer.decode(inner, keep_special=True)

    def stats(self) -> str:
        """Figures of the last reply."""
        return summary(self._stats) if self._stats else "no reply yet"


def _read_messages(path: Path) -> list[dict[str, Any]]:
    try:
        messages = json.loads(read_text(path))
    except (ValueError, RecursionError) as error:
        if isinstance(error, OndeviceError):
            raise
        raise PromptError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        raise PromptError(f"{path} holds no list of messages")
    return messages
