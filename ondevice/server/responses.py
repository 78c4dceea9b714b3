"""`/v1/responses`: OpenAI's Responses API without stored conversations, so that a request contains all of its own.

Input and tools are translated to the form of OpenAI's chat completions, which the text layer reads. A response consists
of items (`Text`, `Reasoning`, `FunctionCall`), each of which writes the events that build it.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, ClassVar

from ondevice.generation import Step
from ondevice.model import Model
from ondevice.options import GenerationKeywords
from ondevice.server.delivery import FINISH_NAMES, MakeWriter, ResponseWriter, ServerSentEvent, Usage, new_id
from ondevice.server.parts import Part, after_results, content_of, responses_picture, text_part
from ondevice.server.replies import Choice
from ondevice.server.requests import (
    CompletionRequest,
    FieldNames,
    Fields,
    RequestError,
    effort_option,
    read_request,
    tool_options,
)
from ondevice.text.messages import ToolCall

NAMES = FieldNames(max_tokens=("max_output_tokens",))
ECHOED = ("instructions", "max_output_tokens", "temperature", "top_p", "metadata")
"""Fields of the request that the response repeats."""

ITEM_KINDS = ("message", "function_call", "function_call_output", "reasoning")
ROLES = ("user", "assistant", "system", "developer")
TEXT_KINDS = ("input_text", "output_text", "reasoning_text", "summary_text", "text")
PICTURE_KIND = "input_image"


def read_response(fields: Fields) -> tuple[CompletionRequest, MakeWriter]:
    """A request to `/v1/responses`, and what makes the writer of its response."""
    for name in ("previous_response_id", "conversation"):
        if name in fields:
            raise fields.unsupported(
                name, "this server stores no conversations: send the whole conversation as `input`"
            )
    request = read_request(fields, NAMES, [read_input(fields)], _options(fields))
    return request, partial(OpenAIResponseWriter, echoed={name: fields.get(name) for name in ECHOED})


def read_input(fields: Fields) -> list[dict[str, Any]]:
    """`instructions` and `input`, as messages of a chat completion."""
    fields.required("input")
    instructions = fields.text("instructions")
    messages: list[dict[str, Any]] = [{"role": "system", "content": instructions}] if instructions else []
    if isinstance(fields["input"], str):
        return [*messages, {"role": "user", "content": fields["input"]}]
    for item in fields.objects("input"):
        kind = item.choice("type", ITEM_KINDS) or "message"
        if kind == "function_call_output":
            output = content_of(_parts(item, "output"))
            messages.append({"role": "tool", "tool_call_id": item.required("call_id"), "content": output})
        elif kind == "message" and (role := item.choice("role", ROLES) or "user") != "assistant":
            content = content_of(_parts(item, "content")) if role == "user" else item.joined_text("content", TEXT_KINDS)
            messages.append({"role": role, "content": content})
        else:
            if not messages or messages[-1]["role"] != "assistant":
                messages.append({"role": "assistant", "content": None})
            _add_to_assistant(messages[-1], item, kind)
    for message in messages:
        if message["content"] is None and "tool_calls" not in message:
            message["content"] = ""
    return after_results(messages)


def _parts(item: Fields, name: str) -> list[Part]:
    """A string, or a list of blocks of text and pictures."""
    if isinstance(item.get(name), str):
        return [{"type": "text", "text": item[name]}]
    return [
        responses_picture(block) if block.kind((*TEXT_KINDS, PICTURE_KIND)) == PICTURE_KIND else text_part(block)
        for block in item.objects(name)
    ]


def _add_to_assistant(message: dict[str, Any], item: Fields, kind: str) -> None:
    """Add an item to an assistant's message: consecutive thoughts, calls and texts are one turn."""
    if kind == "function_call":
        function = {"name": item.required("name"), "arguments": item.text("arguments") or ""}
        call = {"id": item.required("call_id"), "type": "function", "function": function}
        message["tool_calls"] = [*message.get("tool_calls", []), call]
    else:
        name = "reasoning_content" if kind == "reasoning" else "content"
        message[name] = (message.get(name) or "") + item.joined_text("content", TEXT_KINDS)


def _options(fields: Fields) -> GenerationKeywords:
    """Tools, thinking and response format."""
    choice = fields.get("tool_choice")
    if isinstance(choice, dict) and "name" in choice:
        choice = {"type": choice.get("type"), "function": {"name": choice["name"]}}
    options = tool_options(_tools(fields), choice) | effort_option(fields.inner("reasoning"), "effort")
    text_format = dict(fields.inner("text").inner("format"))
    if text_format.get("type") == "json_schema":
        options["response_format"] = {"type": text_format.pop("type"), "json_schema": text_format}
    elif text_format:
        options["response_format"] = text_format
    return options


def _tools(fields: Fields) -> list[dict[str, Any]]:
    """Functions, whose declarations have one level less here. OpenAI's hosted tools are refused."""
    tools = []
    for tool in fields.objects("tools"):
        tool.kind(("function",))
        tool.required("name")
        tools.append({"type": "function", "function": {name: value for name, value in tool.items() if name != "type"}})
    return tools


class OpenAIResponseWriter(ResponseWriter):
    """A `response`, or the events that build it item by item."""

    def __init__(self, model: Model, choices: Sequence[Choice], *, echoed: dict[str, Any]) -> None:
        """
        Args:
            model: that answers.
            choices: exactly one.
            echoed: fields of the request that the response repeats.
        """
        super().__init__(model, choices)
        [self._choice] = choices
        head = {"id": new_id("resp_"), "object": "response", "created_at": int(time.time())}
        self._head = {**head, "model": model.manifest.name, **echoed}
        self._items: list[Item] = []
        self._events_sent = 0

    def opening(self) -> Iterator[ServerSentEvent]:
        for kind in ("response.created", "response.in_progress"):
            yield self._event(kind, response=self._response("in_progress"))

    def step(self, choice: Choice, step: Step) -> Iterator[ServerSentEvent]:
        if step.reasoning:
            yield from self._write(Reasoning, step.reasoning)
        if step.text:
            yield from self._write(Text, step.text)
        for call in step.tool_calls:
            item = FunctionCall(call)
            yield from self._begin(item)
            yield from self._item_events(item.write())

    def closing(self) -> Iterator[ServerSentEvent]:
        yield from self._end_item()
        status = self._final_status()
        yield self._event(f"response.{status}", response=self._response(status))

    def failure(self, error: RequestError) -> Iterator[ServerSentEvent]:
        failed = self._response("failed") | {"error": {"code": "server_error", "message": error.message}}
        yield self._event("response.failed", response=failed)

    def whole(self) -> dict[str, Any]:
        return self._response(self._final_status())

    def _write(self, kind: type[Reasoning | Text], text: str) -> Iterator[ServerSentEvent]:
        """Add to the last item, after beginning one of this kind if the last one has another."""
        item = self._items[-1] if self._items else None
        if not isinstance(item, kind):
            item = kind()
            yield from self._begin(item)
        yield from self._item_events(item.write(text))

    def _begin(self, item: Item) -> Iterator[ServerSentEvent]:
        yield from self._end_item()
        self._items.append(item)
        yield from self._item_events(item.begin())

    def _end_item(self) -> Iterator[ServerSentEvent]:
        if self._items and self._items[-1].is_open:
            yield from self._item_events(self._items[-1].end())

    def _item_events(self, events: Iterator[dict[str, Any]]) -> Iterator[ServerSentEvent]:
        for event in events:
            yield self._event(event.pop("type"), output_index=len(self._items) - 1, **event)

    def _event(self, kind: str, **data: Any) -> ServerSentEvent:
        self._events_sent += 1
        return ServerSentEvent({"type": kind, "sequence_number": self._events_sent - 1, **data}, kind)

    def _final_status(self) -> str:
        return FINISH_NAMES[self._choice.finish_reason].responses

    def _response(self, status: str) -> dict[str, Any]:
        return {
            **self._head,
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
        usage, tokenizer, thoughts = Usage.of(self.choices), self.model.tokenizer, self._choice.reply.reasoning
        thinking = len(tokenizer.encode(thoughts, add_special_tokens=False)) if tokenizer and thoughts else 0
        return {
            "input_tokens": usage.prompt,
            "input_tokens_details": {"cached_tokens": usage.cached},
            "output_tokens": usage.new,
            "output_tokens_details": {"reasoning_tokens": thinking},
            "total_tokens": usage.prompt + usage.new,
        }


class Item(ABC):
    """An item of a response's output. Its methods yield the events that build it, without the item's number."""

    id_prefix: ClassVar[str]

    def __init__(self) -> None:
        self.id = new_id(self.id_prefix)
        self.is_open = True

    def begin(self) -> Iterator[dict[str, Any]]:
        yield {"type": "response.output_item.added", "item": self.as_json()}

    def end(self) -> Iterator[dict[str, Any]]:
        self.is_open = False
        yield {"type": "response.output_item.done", "item": self.as_json()}

    @abstractmethod
    def as_json(self) -> dict[str, Any]:
        """The item as far as it is written."""

    @property
    def status(self) -> str:
        return "in_progress" if self.is_open else "completed"


class _TextItem(Item):
    """An item with one part, which is a text."""

    part_kind: ClassVar[str]

    def __init__(self) -> None:
        super().__init__()
        self._text = ""

    def begin(self) -> Iterator[dict[str, Any]]:
        yield {"type": "response.output_item.added", "item": {**self.as_json(), "content": []}}
        yield self._part_event("response.content_part.added", part=self._part())

    def write(self, text: str) -> Iterator[dict[str, Any]]:
        """Add to the text."""
        self._text += text
        yield self._part_event(f"response.{self.part_kind}.delta", delta=text, logprobs=[])

    def end(self) -> Iterator[dict[str, Any]]:
        yield self._part_event(f"response.{self.part_kind}.done", text=self._text, logprobs=[])
        yield self._part_event("response.content_part.done", part=self._part())
        yield from super().end()

    def _part_event(self, kind: str, **data: Any) -> dict[str, Any]:
        return {"type": kind, "item_id": self.id, "content_index": 0, **data}

    def _part(self) -> dict[str, Any]:
        return {"type": self.part_kind, "text": self._text}


class Text(_TextItem):
    """The answer."""

    id_prefix = "msg_"
    part_kind = "output_text"

    def _part(self) -> dict[str, Any]:
        return {**super()._part(), "annotations": [], "logprobs": []}

    def as_json(self) -> dict[str, Any]:
        head = {"type": "message", "id": self.id, "role": "assistant", "status": self.status}
        return {**head, "content": [self._part()]}


class Reasoning(_TextItem):
    """The model's thoughts."""

    id_prefix = "rs_"
    part_kind = "reasoning_text"

    def as_json(self) -> dict[str, Any]:
        return {"type": "reasoning", "id": self.id, "summary": [], "content": [self._part()], "status": self.status}


class FunctionCall(Item):
    """A call that the application should make."""

    id_prefix = "fc_"

    def __init__(self, call: ToolCall) -> None:
        super().__init__()
        self._call = call.as_openai()
        self._arguments = ""

    def write(self) -> Iterator[dict[str, Any]]:
        """All arguments at once: they are translated from the model's own syntax when the call is complete."""
        self._arguments = self._call["function"]["arguments"]
        yield {"type": "response.function_call_arguments.delta", "item_id": self.id, "delta": self._arguments}

    def end(self) -> Iterator[dict[str, Any]]:
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
