"""What a caller gets: a step for each round, a reply for a whole generation."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

from ondevice.decoding.record import Stats, TokenLogprob
from ondevice.text.tool_call import ToolCall

FinishReason = Literal["stop", "length", "context", "cancelled", "tool_calls"]
"""stop: a stop token or stop string, or the end of the answer's form; length: `max_new_tokens`; context: the context is
full; tool_calls: the model stopped, and waits for the results of its calls.
"""


@dataclass(frozen=True)
class Step:
    """What a caller of `Model.stream` sees: a round, as text.

    text : of the answer; it may be empty while half a character or what may become a stop string waits
    reasoning : of the model's thoughts, which come before the answer
    tool_calls : those that are complete now
    logprobs : of the tokens, where they were asked for
    """

    text: str
    token_ids: tuple[int, ...]
    drafted: int
    accepted: int
    source: str
    seconds: float
    finish_reason: FinishReason | None
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True)
class Reply:
    """A whole generation.

    text : the answer, without thoughts and calls where the bundle says how to tell them apart
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    stats: Stats
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()

    @classmethod
    def of(cls, steps: Iterable[Step], stats: Stats) -> Reply:
        """All steps of a generation in one; it was cancelled where none gives another reason."""
        taken = list(steps)
        return cls(
            text="".join(step.text for step in taken),
            token_ids=tuple(token for step in taken for token in step.token_ids),
            finish_reason=(taken[-1].finish_reason if taken else None) or "cancelled",
            stats=stats,
            reasoning="".join(step.reasoning for step in taken),
            tool_calls=tuple(call for step in taken for call in step.tool_calls),
            logprobs=tuple(each for step in taken for each in step.logprobs),
        )

    @property
    def message(self) -> dict[str, Any]:
        """The message that this reply is, in OpenAI's form, for the conversation to go on with."""
        made: dict[str, Any] = {"role": "assistant", "content": self.text}
        if self.reasoning:
            made["reasoning_content"] = self.reasoning
        if self.tool_calls:
            made["tool_calls"] = [call.as_openai() for call in self.tool_calls]
            made["content"] = self.text or None
        return made
