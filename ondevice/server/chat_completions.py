"""`/v1/chat/completions`, as OpenAI has it, with llama.cpp's additions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

from ondevice.decoding.record import TokenLogprob
from ondevice.reply import Step
from ondevice.server.chat_fields import chat_options
from ondevice.server.fields import Fields
from ondevice.server.logprobs import as_chat, chat_logprobs
from ondevice.server.openai_shape import OpenAIShape
from ondevice.server.order import Order, make_order, most_tokens, number_of_choices, wants_usage
from ondevice.server.replies import Reading
from ondevice.server.service import MakeShape
from ondevice.server.shape import Choice, Message, openai_finish_reason, progress


def read(fields: Fields) -> tuple[Order, MakeShape]:
    """What a request asks for, and how its replies are written."""
    return _order(fields), partial(ChatCompletion, include_usage=wants_usage(fields))


def _order(fields: Fields) -> Order:
    fields.needed("messages")
    messages = [dict(message) for message in fields.objects("messages")]
    if not messages:
        raise fields.wrong("messages", "a list of at least one message")
    return make_order(
        fields,
        [messages],
        most_tokens(fields, "max_completion_tokens", "max_tokens", "n_predict"),
        more={**chat_options(fields), **chat_logprobs(fields)},
        choices=number_of_choices(fields),
    )


class ChatCompletion(OpenAIShape):
    """The `chat.completion` of a request, or its chunks."""

    kind, chunk_kind, id_prefix = "chat.completion", "chat.completion.chunk", "chatcmpl-"

    def opening(self) -> Iterator[Message]:
        for choice in self._choices:
            yield self._said(choice, {"role": "assistant", "content": ""})

    def reading(self, event: Reading) -> Iterator[Message]:
        yield self._said(self._choices[0], {}, prompt_progress=progress(event))

    def step(self, choice: Choice, step: Step) -> Iterator[Message]:
        delta: dict[str, Any] = {}
        if step.reasoning:
            delta["reasoning_content"] = step.reasoning
        if step.text:
            delta["content"] = step.text
        if step.tool_calls:
            first = choice.calls - len(step.tool_calls)
            delta["tool_calls"] = [
                {"index": first + number, **call.as_openai()} for number, call in enumerate(step.tool_calls)
            ]
        if delta or step.logprobs:
            yield self._said(choice, delta, step.logprobs)
        if choice.finish_reason:
            yield self._said(
                choice, {}, finish_reason=openai_finish_reason(choice.finish_reason), timings=choice.stats.timings()
            )

    def finished(self, choice: Choice) -> dict[str, Any]:
        reply = choice.reply
        return {
            "index": choice.index,
            "message": reply.message,
            "logprobs": as_chat(reply.logprobs, self._tokenizer),
            "finish_reason": openai_finish_reason(reply.finish_reason),
        }

    def _said(
        self,
        choice: Choice,
        delta: dict[str, Any],
        logprobs: Sequence[TokenLogprob] = (),
        finish_reason: str | None = None,
        **more: Any,
    ) -> Message:
        told = {
            "index": choice.index,
            "delta": delta,
            "logprobs": as_chat(logprobs, self._tokenizer),
            "finish_reason": finish_reason,
        }
        return self._chunk([told], **more)
