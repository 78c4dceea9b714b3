"""`/v1/completions`: text that goes on, as OpenAI has it, with llama.cpp's additions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

from ondevice.decoding.record import TokenLogprob
from ondevice.model import Model
from ondevice.reply import Step
from ondevice.server.fields import Fields
from ondevice.server.logprobs import as_text, text_logprobs
from ondevice.server.openai_shape import OpenAIShape
from ondevice.server.order import Order, make_order, most_tokens, number_of_choices, wants_usage
from ondevice.server.replies import Reading
from ondevice.server.request_error import RequestError
from ondevice.server.service import MakeShape
from ondevice.server.shape import Choice, Message, openai_finish_reason, progress
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


class Completion(OpenAIShape):
    """The `text_completion` of a request, or its chunks."""

    kind = chunk_kind = "text_completion"
    id_prefix = "cmpl-"

    def __init__(self, model: Model, choices: Sequence[Choice], *, include_usage: bool = False) -> None:
        super().__init__(model, choices, include_usage=include_usage)
        self._told_so_far = [0] * len(choices)
        """Characters of each reply, for the offsets of the tokens to come."""

    def opening(self) -> Iterator[Message]:
        return iter(())

    def reading(self, event: Reading) -> Iterator[Message]:
        yield self._chunk([self._told(self._choices[0], "", (), 0)], prompt_progress=progress(event))

    def step(self, choice: Choice, step: Step) -> Iterator[Message]:
        timings = {"timings": choice.stats.timings()} if choice.finish_reason else {}
        if step.text or step.logprobs or timings:
            told = self._told(choice, step.text, step.logprobs, self._told_so_far[choice.index])
            yield self._chunk([told], **timings)
        self._told_so_far[choice.index] += len(step.text)

    def finished(self, choice: Choice) -> dict[str, Any]:
        reply = choice.reply
        return self._told(choice, reply.text, reply.logprobs, 0)

    def _told(self, choice: Choice, text: str, logprobs: Sequence[TokenLogprob], offset: int) -> dict[str, Any]:
        return {
            "index": choice.index,
            "text": text,
            "logprobs": as_text(logprobs, self._tokenizer, offset),
            "finish_reason": openai_finish_reason(choice.finish_reason),
        }
