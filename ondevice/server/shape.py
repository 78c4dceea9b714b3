"""What the APIs have in common when they write replies down."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from ondevice.decoding.record import Stats
from ondevice.reply import FinishReason, Reply, Step
from ondevice.server.replies import Reading
from ondevice.server.request_error import RequestError


@dataclass(frozen=True)
class Message:
    """One of a stream: a JSON object, and the event's name in APIs that name them. A text is sent as it is."""

    data: dict[str, Any] | str
    event: str | None = None


@dataclass
class Choice:
    """A reply as far as it came.

    reads_prompt : it is the first one to its prompt
    """

    index: int
    stats: Stats
    reads_prompt: bool = True
    calls: int = 0
    finish_reason: FinishReason | None = None
    _steps: list[Step] = field(default_factory=list)

    def add(self, step: Step) -> None:
        self._steps.append(step)
        self.calls += len(step.tool_calls)
        self.finish_reason = step.finish_reason

    @property
    def reply(self) -> Reply:
        """All of it."""
        return Reply.of(self._steps, self.stats)


def openai_usage(choices: Sequence[Choice]) -> dict[str, Any]:
    """All tokens of a request; a prompt counts once, however many replies it got."""
    read = [choice.stats for choice in choices if choice.reads_prompt]
    prompt = sum(stats.prompt_tokens for stats in read)
    new = sum(choice.stats.new_tokens for choice in choices)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": new,
        "total_tokens": prompt + new,
        "prompt_tokens_details": {"cached_tokens": sum(stats.cached_tokens for stats in read)},
    }


def openai_finish_reason(reason: FinishReason | None) -> str | None:
    """A full context is `length` to OpenAI's clients."""
    return "length" if reason == "context" else reason


def progress(event: Reading) -> dict[str, Any]:
    """llama.cpp's `prompt_progress`."""
    return {
        "total": event.total,
        "cache": event.cached,
        "processed": event.processed,
        "time_ms": round(1e3 * event.seconds, 3),
    }


class Shape(Protocol):
    """How an API writes the replies to one request: message by message, or at the end as a whole. Either way it is
    told all that happens, in order.
    """

    def opening(self) -> Iterable[Message]:
        """Before anything is computed."""

    def reading(self, event: Reading) -> Iterable[Message]:
        """The prompt is read so far."""

    def step(self, choice: Choice, step: Step) -> Iterable[Message]:
        """A reply goes on; `choice` has the step already."""

    def closing(self) -> Iterable[Message]:
        """All replies are complete."""

    def failure(self, error: RequestError) -> Iterable[Message]:
        """The stream ends with an error."""

    def silence(self) -> Message | None:
        """What keeps the connection open; None where a comment does."""

    def whole(self) -> dict[str, Any]:
        """All replies as one object, when they are complete."""


def new_id(prefix: str) -> str:
    return f"{prefix}{secrets.token_hex(12)}"


def now() -> int:
    """Seconds since 1970, as the APIs tell when something was made."""
    return int(time.time())
