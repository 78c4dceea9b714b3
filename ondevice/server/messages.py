"""`/v1/messages`, as Anthropic has it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

from ondevice.model import Model
from ondevice.options import GenerationKeywords
from ondevice.reply import FinishReason, Reply, Step
from ondevice.server.anthropic_messages import read_messages, read_tools
from ondevice.server.chat_fields import tool_options
from ondevice.server.fields import Fields
from ondevice.server.order import Order, make_order
from ondevice.server.replies import Reading
from ondevice.server.request_error import RequestError
from ondevice.server.service import MakeShape
from ondevice.server.shape import Choice, Message, new_id

STOP_REASONS: dict[FinishReason | None, str] = {
    "stop": "end_turn",
    "length": "max_tokens",
    "context": "model_context_window_exceeded",
    "tool_calls": "tool_use",
}
THINKING = ("enabled", "adaptive", "disabled")


def read(fields: Fields) -> tuple[Order, MakeShape]:
    """What a request asks for, and how its replies are written."""
    fields.needed("max_tokens")
    order = make_order(
        fields,
        [read_messages(fields)],
        fields.whole("max_tokens", 1),
        more=_options(fields),
        stops="stop_sequences",
    )
    return order, partial(AnthropicMessage, stops=fields.texts("stop_sequences"))


def _options(fields: Fields) -> GenerationKeywords:
    """Tools, thinking and the form of the answer."""
    options = tool_options(read_tools(fields), _tool_choice(fields.inner("tool_choice")))
    thinking = fields.inner("thinking").choice("type", THINKING)
    if thinking is not None:
        options["thinking"] = thinking != "disabled"
    form = fields.inner("output_config").inner("format")
    if form.choice("type", ("json_schema",)) is not None:
        form.needed("schema")
        options["response_format"] = {"type": "json_schema", "json_schema": {"schema": dict(form.inner("schema"))}}
    return options


def _tool_choice(choice: Fields) -> Any:
    """In OpenAI's words."""
    kind = choice.choice("type", ("auto", "any", "tool", "none"))
    if kind == "tool":
        return {"type": "function", "function": {"name": choice.needed("name")}}
    return "required" if kind == "any" else kind


def count_tokens(model: Model, fields: Fields) -> dict[str, Any]:
    """How many tokens a request's prompt has."""
    options = _options(fields)
    prompt = model.encode(read_messages(fields), tools=options.get("tools"), thinking=options.get("thinking"))
    return {"input_tokens": len(prompt)}


class AnthropicMessage:
    """The `message` of a request, or the events that build it block by block."""

    def __init__(self, model: Model, choices: Sequence[Choice], *, stops: Sequence[str] = ()) -> None:
        [self._choice] = choices
        self._end_ids = {*model.manifest.eos_token_ids, *model.defaults.eos_token_ids}
        self._head = {"id": new_id("msg_"), "type": "message", "role": "assistant", "model": model.manifest.name}
        self._stops = stops
        self._index = 0
        self._open: str | None = None
        """The kind of the block that is being written."""

    def opening(self) -> Iterator[Message]:
        started: dict[str, Any] = {
            **self._head,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": self._usage(),
        }
        yield _event("message_start", message=started)

    def reading(self, event: Reading) -> Iterator[Message]:
        yield _event("ping")

    def step(self, choice: Choice, step: Step) -> Iterator[Message]:
        if step.reasoning:
            yield from self._write(
                "thinking", {"thinking": "", "signature": ""}, "thinking_delta", thinking=step.reasoning
            )
        if step.text:
            yield from self._write("text", {"text": ""}, "text_delta", text=step.text)
        for call in step.tool_calls:
            yield from self._close()
            head = {"id": call.id, "name": call.name, "input": {}}
            written = json.dumps(call.arguments, ensure_ascii=False)
            yield from self._write("tool_use", head, "input_json_delta", partial_json=written)
            yield from self._close()

    def closing(self) -> Iterator[Message]:
        yield from self._close()
        yield _event("message_delta", delta=self._ending(), usage=self._usage())
        yield _event("message_stop")

    def failure(self, error: RequestError) -> Iterator[Message]:
        yield Message(error.anthropic(), "error")

    def silence(self) -> Message | None:
        return _event("ping")

    def whole(self) -> dict[str, Any]:
        reply = self._choice.reply
        return {**self._head, "content": _blocks(reply), **self._ending(), "usage": self._usage()}

    def _write(self, kind: str, head: dict[str, Any], delta: str, **written: str) -> Iterator[Message]:
        if self._open != kind:
            yield from self._close()
            self._open = kind
            yield _event("content_block_start", index=self._index, content_block={"type": kind, **head})
        yield _event("content_block_delta", index=self._index, delta={"type": delta, **written})

    def _close(self) -> Iterator[Message]:
        if self._open is not None:
            yield _event("content_block_stop", index=self._index)
            self._index += 1
            self._open = None

    def _ending(self) -> dict[str, Any]:
        """A reply that ended at a stop string has no token that ends a turn; which of several it was, nobody tells."""
        reply = self._choice.reply
        if reply.finish_reason == "stop" and self._stops and not self._end_ids.intersection(reply.token_ids[-1:]):
            found = self._stops[0] if len(self._stops) == 1 else None
            return {"stop_reason": "stop_sequence", "stop_sequence": found}
        return {"stop_reason": STOP_REASONS.get(reply.finish_reason, "end_turn"), "stop_sequence": None}

    def _usage(self) -> dict[str, int]:
        stats = self._choice.stats
        return {
            "input_tokens": stats.prompt_tokens - stats.cached_tokens,
            "cache_read_input_tokens": stats.cached_tokens,
            "cache_creation_input_tokens": 0,
            "output_tokens": stats.new_tokens,
        }


def _blocks(reply: Reply) -> list[dict[str, Any]]:
    thoughts = [{"type": "thinking", "thinking": reply.reasoning, "signature": ""}] if reply.reasoning else []
    text = [{"type": "text", "text": reply.text}] if reply.text else []
    calls = [
        {"type": "tool_use", "id": call.id, "name": call.name, "input": call.arguments} for call in reply.tool_calls
    ]
    return [*thoughts, *text, *calls]


def _event(kind: str, **data: Any) -> Message:
    return Message({"type": kind, **data}, kind)
