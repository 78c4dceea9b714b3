"""What has been said, and how the next reply comes about."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from ondevice.errors import ContextOverflowError, PromptError
from ondevice.reply import Reply
from ondevice.terminal.reply import stream_reply, summary

if TYPE_CHECKING:
    from ondevice.model import Model
    from ondevice.options import GenerationKeywords

NOTICES = {
    "cancelled": "(stopped)",
    "length": "(cut at --max-new-tokens)",
    "context": "(the context is full: /clear starts anew)",
}


class Conversation:
    """Messages of one session. A reply that was stopped stays in it as far as it came.

    Raises:
        PromptError: the bundle has no chat template, or one that refuses a system message.
    """

    def __init__(self, model: Model, options: GenerationKeywords, system: str | None = None) -> None:
        self._model = model
        self._options = options
        self._beginning = [{"role": "system", "content": system}] if system else []
        self.messages = list(self._beginning)
        self._replies = 0
        # A bundle that cannot chat should say so now, not after the first message was typed.
        model.encode([*self.messages, {"role": "user", "content": "Hello"}])

    def say(self, text: str) -> None:
        """Send a message and show the reply. One that does not fit leaves the conversation as it was."""
        asked = [*self.messages, {"role": "user", "content": text}]
        try:
            reply = stream_reply(self._model, asked, self._options)
        except PromptError as error:
            hint = " (/clear starts anew)" if isinstance(error, ContextOverflowError) else ""
            print(f"ondevice: {error}{hint}", file=sys.stderr)
            return
        self.messages = [*asked, {"role": "assistant", "content": self._as_said(reply)}]
        self._replies += 1
        if reply.finish_reason in NOTICES:
            print(NOTICES[reply.finish_reason], file=sys.stderr)

    def regenerate(self) -> None:
        """Answer the last message anew, in place of the reply that it had."""
        if len(self.messages) == len(self._beginning):
            print("ondevice: no message yet", file=sys.stderr)
            return
        before = self.messages
        self.messages = before[:-2]
        self.say(before[-2]["content"])
        if len(self.messages) < len(before):  # it failed
            self.messages = before

    def clear(self) -> None:
        """Forget everything said; the model's cache and its drafters forget it too."""
        self.messages = list(self._beginning)
        self._model.forget()

    def _as_said(self, reply: Reply) -> str:
        """The reply as the template needs it: only by their control tokens can it tell thoughts, and drop them."""
        tokenizer = self._model.tokenizer
        inner = list(reply.token_ids)
        while tokenizer and inner and inner[-1] in tokenizer.special_ids:
            inner.pop()  # the end of the turn, which the template writes itself
        if tokenizer is None or tokenizer.special_ids.isdisjoint(inner):
            return reply.text
        return tokenizer.decode(inner, keep_special=True)

    def stats(self) -> str:
        return summary(self._model.last_stats) if self._replies else "no reply yet"
