"""`/v1/responses`, as OpenAI has it, without memory: every request brings the whole conversation."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

from ondevice.model import Model
from ondevice.options import GenerationKeywords
from ondevice.reply import Step
from ondevice.server.chat_fields import EFFORTS, tool_options
from ondevice.server.fields import Fields
from ondevice.server.order import Order, make_order, most_tokens
from ondevice.server.replies import Reading
from ondevice.server.request_error import RequestError
from ondevice.server.response_input import read_input, read_tools
from ondevice.server.response_items import FunctionCall, Item, Reasoning, Text
from ondevice.server.service import MakeShape
from ondevice.server.shape import Choice, Message, new_id, now, openai_usage


def read(fields: Fields) -> tuple[Order, MakeShape]:
    """What a request asks for, and how its reply is written."""
    for name in ("previous_response_id", "conversation"):
        if name in fields:
            raise fields.missing_feature(name, "this server remembers nothing: send the whole conversation as `input`")
    order = make_order(fields, [read_input(fields)], most_tokens(fields, "max_output_tokens"), more=_options(fields))
    echoed = ("instructions", "max_output_tokens", "temperature", "top_p", "metadata")
    return order, partial(Response, asked={name: fields.get(name) for name in echoed})


def _options(fields: Fields) -> GenerationKeywords:
    """Tools, thinking and the form of the answer."""
    choice = fields.get("tool_choice")
    if isinstance(choice, dict) and "name" in choice:
        choice = {"type": choice.get("type"), "function": {"name": choice["name"]}}
    options = tool_options(read_tools(fields), choice)
    effort = fields.inner("reasoning").choice("effort", EFFORTS)
    if effort is not None:
        options["thinking"] = effort != "none"
    form = dict(fields.inner("text").inner("format"))
    if form.get("type") == "json_schema":
        options["response_format"] = {"type": form.pop("type"), "json_schema": form}
    elif form:
        options["response_format"] = form
    return options


class Response:
    """The `response` of a request, or the events that build it item by item."""

    def __init__(self, model: Model, choices: Sequence[Choice], *, asked: dict[str, Any]) -> None:
        """
        Args:
            asked: fields of the request that its response repeats.
        """
        [self._choice] = choices
        self._tokenizer = model.tokenizer
        self._head = {"id": new_id("resp_"), "object": "response", "created_at": now(), "model": model.manifest.name}
        self._asked = asked
        self._items: list[Item] = []
        self._sent = 0

    def opening(self) -> Iterator[Message]:
        for kind in ("created", "in_progress"):
            yield self._event(f"response.{kind}", response=self._told("in_progress"))

    def reading(self, event: Reading) -> Iterator[Message]:
        return iter(())

    def step(self, choice: Choice, step: Step) -> Iterator[Message]:
        if step.reasoning:
            yield from self._write(Reasoning, step.reasoning)
        if step.text:
            yield from self._write(Text, step.text)
        for call in step.tool_calls:
            yield from self._begin(FunctionCall(call))
            yield from self._messages(self._items[-1].write(""))

    def closing(self) -> Iterator[Message]:
        yield from self._end_item()
        status = self._status()
        yield self._event(f"response.{status}", response=self._told(status))

    def failure(self, error: RequestError) -> Iterator[Message]:
        told = {"code": "server_error", "message": error.message}
        yield self._event("response.failed", response=self._told("failed") | {"error": told})

    def silence(self) -> Message | None:
        return None

    def whole(self) -> dict[str, Any]:
        return self._told(self._status())

    def _write(self, kind: type[Reasoning | Text], text: str) -> Iterator[Message]:
        if not self._items or not isinstance(self._items[-1], kind):
            yield from self._begin(kind())
        yield from self._messages(self._items[-1].write(text))

    def _begin(self, item: Item) -> Iterator[Message]:
        yield from self._end_item()
        self._items.append(item)
        yield from self._messages(item.begin())

    def _end_item(self) -> Iterator[Message]:
        if self._items and self._items[-1].is_open:
            yield from self._messages(self._items[-1].end())

    def _messages(self, events: Iterator[dict[str, Any]]) -> Iterator[Message]:
        for event in events:
            yield self._event(event.pop("type"), output_index=len(self._items) - 1, **event)

    def _event(self, kind: str, **data: Any) -> Message:
        self._sent += 1
        return Message({"type": kind, "sequence_number": self._sent - 1, **data}, kind)

    def _status(self) -> str:
        return "incomplete" if self._choice.finish_reason in ("length", "context") else "completed"

    def _told(self, status: str) -> dict[str, Any]:
        return {
            **self._head,
            **self._asked,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "output": [item.as_json() for item in self._items],
            "parallel_tool_calls": True,
            "tool_choice": "auto",
            "tools": [],
            "store": False,
            "usage": None if status == "in_progress" else self._usage(),
        }

    def _usage(self) -> dict[str, Any]:
        usage, thoughts = openai_usage([self._choice]), self._choice.reply.reasoning
        thought = len(self._tokenizer.encode(thoughts, add_special_tokens=False)) if self._tokenizer and thoughts else 0
        return {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": usage["prompt_tokens_details"],
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": thought},
            "total_tokens": usage["total_tokens"],
        }
