"""The items that a response's output is made of, and the events that build each."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any, ClassVar

from ondevice.server.shape import new_id
from ondevice.text.tool_call import ToolCall

Event = dict[str, Any]


class Item(ABC):
    """One item, open until its last event."""

    prefix: ClassVar[str]

    def __init__(self) -> None:
        self.id = new_id(self.prefix)
        self.is_open = True

    def begin(self) -> Iterator[Event]:
        yield {"type": "response.output_item.added", "item": self.as_json()}

    @abstractmethod
    def write(self, text: str) -> Iterator[Event]:
        """More of it."""

    def end(self) -> Iterator[Event]:
        self.is_open = False
        yield {"type": "response.output_item.done", "item": self.as_json()}

    @abstractmethod
    def as_json(self) -> dict[str, Any]:
        """As it stands now."""

    @property
    def status(self) -> str:
        return "in_progress" if self.is_open else "completed"


class _Written(Item):
    """An item with one part, a text."""

    event: ClassVar[str]
    part: ClassVar[str]

    def __init__(self) -> None:
        super().__init__()
        self.text = ""

    def begin(self) -> Iterator[Event]:
        yield {"type": "response.output_item.added", "item": {**self.as_json(), "content": []}}
        yield {"type": "response.content_part.added", **self._place, "part": self._part()}

    def write(self, text: str) -> Iterator[Event]:
        self.text += text
        yield {"type": f"response.{self.event}.delta", **self._place, "delta": text, "logprobs": []}

    def end(self) -> Iterator[Event]:
        yield {"type": f"response.{self.event}.done", **self._place, "text": self.text, "logprobs": []}
        yield {"type": "response.content_part.done", **self._place, "part": self._part()}
        yield from super().end()

    @property
    def _place(self) -> dict[str, Any]:
        return {"item_id": self.id, "content_index": 0}

    def _part(self) -> dict[str, Any]:
        return {"type": self.part, "text": self.text}


class Text(_Written):
    """A message: what the model answers."""

    prefix = "msg_"
    event = "output_text"
    part = "output_text"

    def _part(self) -> dict[str, Any]:
        return {**super()._part(), "annotations": [], "logprobs": []}

    def as_json(self) -> dict[str, Any]:
        head = {"type": "message", "id": self.id, "role": "assistant", "status": self.status}
        return {**head, "content": [self._part()]}


class Reasoning(_Written):
    """What the model thinks."""

    prefix = "rs_"
    event = "reasoning_text"
    part = "reasoning_text"

    def as_json(self) -> dict[str, Any]:
        return {"type": "reasoning", "id": self.id, "summary": [], "content": [self._part()], "status": self.status}


class FunctionCall(Item):
    """A call that the application is asked to make."""

    prefix = "fc_"

    def __init__(self, call: ToolCall) -> None:
        super().__init__()
        self._call = call.as_openai()
        self._arguments = ""

    def write(self, text: str) -> Iterator[Event]:
        """All arguments at once: the model's own syntax for them is another."""
        self._arguments = self._call["function"]["arguments"]
        yield {"type": "response.function_call_arguments.delta", "item_id": self.id, "delta": self._arguments}

    def end(self) -> Iterator[Event]:
        yield {"type": "response.function_call_arguments.done", "item_id": self.id, "arguments": self._arguments}
        yield from super().end()

    def as_json(self) -> dict[str, Any]:
        return {
            "type": "function_call",
            "id": self.id,
            "call_id": self._call["id"],
            "name": self._call["function"]["name"],
            "arguments": self._arguments,
            "status": self.status,
        }
