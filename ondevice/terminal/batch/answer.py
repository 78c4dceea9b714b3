"""A line of a file of answers. It says nothing of time or drafts: a prompt's answer is the same in every run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ondevice.errors import OndeviceError
from ondevice.reply import Reply, Step
from ondevice.terminal.batch import openai_form
from ondevice.terminal.batch.request import Request
from ondevice.terminal.reply import content

if TYPE_CHECKING:
    from ondevice.generation import Generation
    from ondevice.model import Model


@dataclass(frozen=True)
class Answer:
    """
    record : the line, as JSON
    new_tokens : of the reply
    """

    record: dict[str, Any]
    new_tokens: int = 0

    @property
    def is_error(self) -> bool:
        return self.record.get("error") is not None

    @classmethod
    def of(cls, request: Request, reply: Reply) -> Answer:
        """Calls of tools are numbered: their ids are random elsewhere, and two runs would differ."""
        calls = tuple(
            replace(call, id=f"call_{request.line}_{number}") for number, call in enumerate(reply.tool_calls, 1)
        )
        reply = replace(reply, tool_calls=calls)
        told = openai_form.response(request, reply) if request.is_openai else _own_form(request, reply)
        return cls(_begin(request) | told, reply.stats.new_tokens)

    @classmethod
    def refusing(cls, request: Request, message: str) -> Answer:
        told = openai_form.refusal(request, message) if request.is_openai else {"id": request.id, "error": message}
        return cls(_begin(request) | told)


def answer(
    model: Model,
    request: Request,
    begun: Callable[[Generation], None] = lambda generation: None,
    heard: Callable[[Step], None] = lambda step: None,
) -> Answer | None:
    """Ask a model.

    Args:
        begun: hears of the generation before it computes anything.
        heard: hears of every step.

    Returns:
        None where the generation was cancelled.
    """
    if request.fault is not None:
        return Answer.refusing(request, request.fault)
    steps: list[Step] = []
    try:
        with model.stream(request.prompt, **request.options) as generation:
            begun(generation)
            for step in generation:
                heard(step)
                steps.append(step)
        reply = Reply.of(steps, generation.stats)
    except OndeviceError as error:
        return Answer.refusing(request, str(error))
    return None if reply.finish_reason == "cancelled" else Answer.of(request, reply)


def _begin(request: Request) -> dict[str, Any]:
    return {"line": request.line, "asked": request.asked}


def _own_form(request: Request, reply: Reply) -> dict[str, Any]:
    return {"id": request.id, **content(reply), "usage": openai_form.usage(reply)}
