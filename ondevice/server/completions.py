"""`/v1/completions`: text that goes on, as OpenAI has it, with llama.cpp's additions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

from ondevice.decoding.record import TokenLogprob
from ondevice.model import Model
from ondevice.reply import Step
from ondevice.server.chat_completions import DONE
from ondevice.server.fields import Fields
from ondevice.server.logprobs import as_text, text_logprobs
from ondevice.server.order import Order, make_order, most_tokens, number_of_choices, wants_usage
from ondevice.server.replies import Reading
from ondevice.server.request_error import RequestError
from ondevice.server.service import MakeShape
from ondevice.server.shape import Choice, Message, new_id, now, openai_finish_reason, openai_usage, progress
from ondevice.text.prompt import Prompt

MOST_PROMPTS = 64


def read(fields: Fields) -> tuple[Order, MakeShape]:
    """What a request asks for, and how its replies are written."""
    return _order(fields), partial(Completion, include_usage=wants_usage(fields))


def _order(fields: Fields) -> Order:
    for name in ("suffix", "echo"):
        if fields.get(name):
            raise fields.missing_feature(name, "this server continues a prompt and adds nothing to it: leave it out")
    return make_order(
        fields,
        _prompts(fields),
        most_tokens(fields, "max_tokens", "n_predict"),
        more=text_logprobs(fields),
        choices=number_of_choices(fields),
    )


def _prompts(fields: Fields) -> Sequence[Prompt]:
    """A text, token ids, or a list of either."""
    prompt = fields.needed("prompt")
    if isinstance(prompt, str) or (_is_list_of(prompt, int) and prompt):
        return [prompt]
    if not (_is_list_of(prompt, str) or (isinstance(prompt, list) and all(_is_list_of(each, int) for each in prompt))):
        raise fields.wrong("prompt", "a string, a list of token ids, or a list of either")
    if not 0 < len(prompt) <= MOST_PROMPTS:
        raise RequestError(400, f"prompt must hold 1 to {MOST_PROMPTS} prompts, not {len(prompt)}", param="prompt")
    return list(prompt)


def _is_list_of(value: Any, kind: type) -> bool:
    return isinstance(value, list) and all(isinstance(each, kind) and not isinstance(each, bool) for each in value)


class Completion:
    """The `text_completion` of a request, or its chunks."""

    def __init__(self, model: Model, choices: Sequence[Choice], *, include_usage: bool = False) -> None:
        self._tokenizer = model.tokenizer
        self._choices = choices
        self._include_usage = include_usage
        self._told_so_far = [0] * len(choices)
        """Characters of each reply, for the offsets of the tokens to come."""
        self._head = {
            "object": "text_completion",
            "id": new_id("cmpl-"),
            "created": now(),
            "model": model.manifest.name,
        }

    def opening(self) -> Iterator[Message]:
        return iter(())

    def reading(self, event: Reading) -> Iterator[Message]:
        yield self._chunk(self._choices[0], "", prompt_progress=progress(event))

    def step(self, choice: Choice, step: Step) -> Iterator[Message]:
        timings = {"timings": choice.stats.timings()} if choice.finish_reason else {}
        if step.text or step.logprobs or timings:
            yield self._chunk(choice, step.text, step.logprobs, **timings)
        self._told_so_far[choice.index] += len(step.text)

    def closing(self) -> Iterator[Message]:
        if self._include_usage:
            yield Message({**self._head, "choices": [], "usage": openai_usage(self._choices)})
        yield DONE

    def failure(self, error: RequestError) -> Iterator[Message]:
        yield Message(error.openai())

    def silence(self) -> Message | None:
        return None

    def whole(self) -> dict[str, Any]:
        replies = [(choice, choice.reply) for choice in self._choices]
        choices = [self._told(choice, reply.text, reply.logprobs, 0) for choice, reply in replies]
        told = {**self._head, "choices": choices, "usage": openai_usage(self._choices)}
        return told | ({"timings": self._choices[0].stats.timings()} if len(choices) == 1 else {})

    def _chunk(self, choice: Choice, text: str, logprobs: Sequence[TokenLogprob] = (), **more: Any) -> Message:
        told = self._told(choice, text, logprobs, self._told_so_far[choice.index])
        return Message({**self._head, "choices": [told], **more})

    def _told(self, choice: Choice, text: str, logprobs: Sequence[TokenLogprob], offset: int) -> dict[str, Any]:
        return {
            "index": choice.index,
            "text": text,
            "logprobs": as_text(logprobs, self._tokenizer, offset),
            "finish_reason": openai_finish_reason(choice.finish_reason),
        }
