"""`/v1/messages` and `/v1/messages/count_tokens`: Anthropic's API.

Messages and tools are translated to the form of OpenAI's chat completions, which the text layer reads.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

from ondevice.generation import Step
from ondevice.model import Model
from ondevice.options import GenerationKeywords
from ondevice.server.delivery import FINISH_NAMES, MakeWriter, ResponseWriter, ServerSentEvent, Usage, new_id
from ondevice.server.parts import Part, after_results, anthropic_picture, content_of, text_part
from ondevice.server.replies import Choice, PrefillProgress
from ondevice.server.requests import (
    CompletionRequest,
    FieldNames,
    Fields,
    RequestError,
    read_request,
    schema_format,
    tool_options,
)

NAMES = FieldNames(max_tokens=("max_tokens",), stop="stop_sequences")


def read_message(fields: Fields) -> tuple[CompletionRequest, MakeWriter]:
    """A request to `/v1/messages`, and what makes the writer of its response."""
    fields.required("max_tokens")
    messages = read_messages(fields)
    fields.whole("max_tokens", 1)  # in the other APIs -1 means no limit
    request = read_request(fields, NAMES, [messages], _options(fields))
    return request, partial(MessageWriter, stop_sequences=fields.texts("stop_sequences"))


def count_tokens(model: Model, fields: Fields) -> dict[str, Any]:
    """The number of tokens of a request's prompt."""
    options = _options(fields)
    prompt = model.encode(read_messages(fields), tools=options.get("tools"), thinking=options.get("thinking"))
    return {"input_tokens": len(prompt)}


def read_messages(fields: Fields) -> list[dict[str, Any]]:
    """`system` and `messages`, as messages of a chat completion."""
    fields.required("messages")
    system = fields.joined_text("system", ("text",), "\n")
    messages = [{"role": "system", "content": system}] if system else []
    for message in fields.objects("messages"):
        message.required("content")
        role = message.choice("role", ("user", "assistant", "system")) or "user"
        blocks = [Fields({"type": "text", "text": message["content"]})]
        if not isinstance(message["content"], str):
            blocks = message.objects("content")
        messages += _assistant_messages(blocks) if role == "assistant" else _user_messages(blocks, role)
    return after_results(messages)


def _user_messages(blocks: Sequence[Fields], role: str) -> list[dict[str, Any]]:
    """Tool results become messages of their own, before the text and pictures."""
    kinds = ("text", "image", "tool_result") if role == "user" else ("text", "tool_result")
    results: list[dict[str, Any]] = []
    parts: list[Part] = []
    for block in blocks:
        kind = block.kind(kinds)
        if kind == "tool_result":
            content = content_of(_result_parts(block), "\n")
            results.append({"role": "tool", "tool_call_id": block.required("tool_use_id"), "content": content})
        else:
            parts.append(_part(block, kind))
    return [*results, *([{"role": role, "content": content_of(parts, "\n")}] if parts or not results else [])]


def _result_parts(block: Fields) -> list[Part]:
    if isinstance(block.get("content"), str):
        return [{"type": "text", "text": block["content"]}]
    return [_part(each, each.kind(("text", "image"))) for each in block.objects("content")]


def _part(block: Fields, kind: str) -> Part:
    return text_part(block) if kind == "text" else anthropic_picture(block)


def _assistant_messages(blocks: Sequence[Fields]) -> list[dict[str, Any]]:
    texts, thoughts, calls = [], [], []
    for block in blocks:
        kind = block.kind(("text", "thinking", "redacted_thinking", "tool_use"))
        if kind == "text":
            texts.append(block.text("text") or "")
        elif kind == "thinking":
            thoughts.append(block.text("thinking") or "")
        elif kind == "tool_use":
            function = {"name": block.required("name"), "arguments": dict(block.inner("input"))}
            calls.append({"id": block.required("id"), "type": "function", "function": function})
    message: dict[str, Any] = {"role": "assistant", "content": "".join(texts) or (None if calls else "")}
    if thoughts:
        message["reasoning_content"] = "".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    return [message]


def _options(fields: Fields) -> GenerationKeywords:
    """Tools, thinking and response format."""
    options = tool_options(_tools(fields), _tool_choice(fields.inner("tool_choice")))
    thinking = fields.inner("thinking").choice("type", ("enabled", "adaptive", "disabled"))
    if thinking is not None:
        options["thinking"] = thinking != "disabled"
    output_format = fields.inner("output_config").inner("format")
    if output_format.choice("type", ("json_schema",)) is not None:
        output_format.required("schema")
        options["response_format"] = schema_format(output_format.inner("schema"))
    return options


def _tools(fields: Fields) -> list[dict[str, Any]]:
    return [
        {
            "type": "function",
            "function": {
                "name": tool.required("name"),
                "description": tool.text("description") or "",
                "parameters": dict(tool.inner("input_schema")),
            },
        }
        for tool in fields.objects("tools")
    ]


def _tool_choice(choice: Fields) -> Any:
    """OpenAI's `tool_choice`."""
    kind = choice.choice("type", ("auto", "any", "tool", "none"))
    if kind == "tool":
        return {"type": "function", "function": {"name": choice.required("name")}}
    return "required" if kind == "any" else kind


class MessageWriter(ResponseWriter):
    """A `message`, or the events that build it block by block."""

    def __init__(self, model: Model, choices: Sequence[Choice], *, stop_sequences: Sequence[str] = ()) -> None:
        super().__init__(model, choices)
        [self._choice] = choices
        self._end_ids = {*model.manifest.eos_token_ids, *model.defaults.eos_token_ids}
        self._head = {"id": new_id("msg_"), "type": "message", "role": "assistant", "model": model.manifest.name}
        self._stop_sequences = stop_sequences
        self._index = 0
        """Number of the block that is open, or of the next one."""
        self._open: str | None = None
        """Type of the block that is open."""

    def opening(self) -> Iterator[ServerSentEvent]:
        end = {"stop_reason": None, "stop_sequence": None}
        yield _event("message_start", message={**self._head, "content": [], **end, "usage": self._usage()})

    def prefill(self, progress: PrefillProgress) -> Iterator[ServerSentEvent]:
        yield self.keep_alive()

    def step(self, choice: Choice, step: Step) -> Iterator[ServerSentEvent]:
        if step.reasoning:
            head: dict[str, Any] = {"thinking": "", "signature": ""}
            yield from self._write("thinking", head, "thinking_delta", thinking=step.reasoning)
        if step.text:
            yield from self._write("text", {"text": ""}, "text_delta", text=step.text)
        for call in step.tool_calls:
            yield from self._close()
            head = {"id": call.id, "name": call.name, "input": {}}
            arguments = json.dumps(call.arguments, ensure_ascii=False)
            yield from self._write("tool_use", head, "input_json_delta", partial_json=arguments)
            yield from self._close()

    def closing(self) -> Iterator[ServerSentEvent]:
        yield from self._close()
        yield _event("message_delta", delta=self._end(), usage=self._usage())
        yield _event("message_stop")

    def failure(self, error: RequestError) -> Iterator[ServerSentEvent]:
        yield ServerSentEvent(error.anthropic(), "error")

    def keep_alive(self) -> ServerSentEvent:
        return _event("ping")

    def whole(self) -> dict[str, Any]:
        return {**self._head, "content": self._content(), **self._end(), "usage": self._usage()}

    def _write(self, kind: str, head: dict[str, Any], delta_kind: str, **delta: str) -> Iterator[ServerSentEvent]:
        """Add to the open block, after opening one of this kind if another or none is open."""
        if self._open != kind:
            yield from self._close()
            self._open = kind
            yield _event("content_block_start", index=self._index, content_block={"type": kind, **head})
        yield _event("content_block_delta", index=self._index, delta={"type": delta_kind, **delta})

    def _close(self) -> Iterator[ServerSentEvent]:
        if self._open is not None:
            yield _event("content_block_stop", index=self._index)
            self._index += 1
            self._open = None

    def _content(self) -> list[dict[str, Any]]:
        reply = self._choice.reply
        thinking = [{"type": "thinking", "thinking": reply.reasoning, "signature": ""}] if reply.reasoning else []
        text = [{"type": "text", "text": reply.text}] if reply.text else []
        calls = [
            {"type": "tool_use", "id": call.id, "name": call.name, "input": call.arguments} for call in reply.tool_calls
        ]
        return [*thinking, *text, *calls]

    def _end(self) -> dict[str, Any]:
        """`stop_reason` and `stop_sequence`.

        A reply that stopped without an end-of-turn token ended at a stop sequence; which of several is not known.
        """
        reply, stops = self._choice.reply, self._stop_sequences
        if reply.finish_reason == "stop" and stops and not self._end_ids.intersection(reply.token_ids[-1:]):
            return {"stop_reason": "stop_sequence", "stop_sequence": stops[0] if len(stops) == 1 else None}
        return {"stop_reason": FINISH_NAMES[self._choice.finish_reason].anthropic, "stop_sequence": None}

    def _usage(self) -> dict[str, int]:
        usage = Usage.of(self.choices)
        return {
            "input_tokens": usage.prompt - usage.cached,
            "cache_read_input_tokens": usage.cached,
            "cache_creation_input_tokens": 0,
            "output_tokens": usage.new,
        }


def _event(kind: str, **data: Any) -> ServerSentEvent:
    return ServerSentEvent({"type": kind, **data}, kind)
