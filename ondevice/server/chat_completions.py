"""`/v1/chat/completions`, as OpenAI has it, with llama.cpp's additions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from ondevice.reply import Step
from ondevice.server.fields import Fields
from ondevice.server.order import Order, make_order, most_tokens, number_of_choices
from ondevice.server.replies import Reading
from ondevice.server.request_error import RequestError
from ondevice.server.shape import (
    Choice,
    Message,
    new_id,
    now,
    openai_finish_reason,
    openai_usage,
    progress,
)

DONE = Message("data: [DONE]")


def read_order(fields: Fields) -> Order:
    """What a request asks for."""
    fields.needed("messages")
    messages = [dict(message) for message in fields.objects("messages")]
    if not messages:
        raise fields.wrong("messages", "a list of at least one message")
    return make_order(
        fields,
        [messages],
        most_tokens(fields, "max_completion_tokens", "max_tokens", "n_predict"),
        choices=number_of_choices(fields),
    )


class ChatCompletion:
    """The `chat.completion` of a request, or its chunks."""

    def __init__(self, model: str, choices: Sequence[Choice], *, include_usage: bool = False) -> None:
        self._choices = choices
        self._include_usage = include_usage
        self._about = {"id": new_id("chatcmpl-"), "created": now(), "model": model}

    def opening(self) -> Iterator[Message]:
        for choice in self._choices:
            yield self._chunk(choice, {"role": "assistant", "content": ""})

    def reading(self, event: Reading) -> Iterator[Message]:
        yield self._chunk(self._choices[0], {}, prompt_progress=progress(event))

    def step(self, choice: Choice, step: Step) -> Iterator[Message]:
        if step.text:
            yield self._chunk(choice, {"content": step.text})
        if choice.finish_reason:
            yield self._chunk(choice, {}, timings=choice.stats.timings())

    def closing(self) -> Iterator[Message]:
        if self._include_usage:
            yield Message({**self._head("chat.completion.chunk"), "choices": [], "usage": openai_usage(self._choices)})
        yield DONE

    def failure(self, refusal: RequestError) -> Iterator[Message]:
        yield Message(refusal.openai())

    def silence(self) -> Message | None:
        return None

    def whole(self) -> dict[str, Any]:
        choices = [
            {
                "index": choice.index,
                "message": {"role": "assistant", "content": choice.text},
                "logprobs": None,
                "finish_reason": openai_finish_reason(choice.finish_reason),
            }
            for choice in self._choices
        ]
        told = {**self._head("chat.completion"), "choices": choices, "usage": openai_usage(self._choices)}
        return told | ({"timings": self._choices[0].stats.timings()} if len(choices) == 1 else {})

    def _chunk(self, choice: Choice, delta: dict[str, Any], **more: Any) -> Message:
        told = {
            "index": choice.index,
            "delta": delta,
            "logprobs": None,
            "finish_reason": None if delta else openai_finish_reason(choice.finish_reason),
        }
        return Message({**self._head("chat.completion.chunk"), "choices": [told], **more})

    def _head(self, kind: str) -> dict[str, Any]:
        return {"object": kind, **self._about}
