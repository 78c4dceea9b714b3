"""How chat completions and completions are written down alike."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

from ondevice.model import Model
from ondevice.server.request_error import RequestError
from ondevice.server.shape import Choice, Message, new_id, now, openai_usage

DONE = Message("data: [DONE]")


class OpenAIShape(ABC):
    """A `Shape` but for what an answer says of a reply.

    kind, chunk_kind : what an answer, and a part of one, calls itself
    """

    kind: ClassVar[str]
    chunk_kind: ClassVar[str]
    id_prefix: ClassVar[str]

    def __init__(self, model: Model, choices: Sequence[Choice], *, include_usage: bool = False) -> None:
        self._tokenizer = model.tokenizer
        self._choices = choices
        self._include_usage = include_usage
        self._about = {"id": new_id(self.id_prefix), "created": now(), "model": model.manifest.name}

    @abstractmethod
    def finished(self, choice: Choice) -> dict[str, Any]:
        """A complete reply, in an answer that comes as a whole."""

    def closing(self) -> Iterator[Message]:
        if self._include_usage:
            yield self._chunk([], usage=openai_usage(self._choices))
        yield DONE

    def failure(self, error: RequestError) -> Iterator[Message]:
        yield Message(error.openai())

    def silence(self) -> Message | None:
        return None

    def whole(self) -> dict[str, Any]:
        choices = [self.finished(choice) for choice in self._choices]
        told = {"object": self.kind, **self._about, "choices": choices, "usage": openai_usage(self._choices)}
        return told | ({"timings": self._choices[0].stats.timings()} if len(choices) == 1 else {})

    def _chunk(self, choices: Sequence[dict[str, Any]], **more: Any) -> Message:
        return Message({"object": self.chunk_kind, **self._about, "choices": choices, **more})
