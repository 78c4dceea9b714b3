"""Rounds of token ids to steps of text."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import closing

from ondevice.decoding.record import Round, TokenLogprob
from ondevice.reply import FinishReason, Step
from ondevice.text.reply_parser import Parsed
from ondevice.text.stream import ReplyStream


def steps(
    rounds: Generator[Round, None, None], stream: ReplyStream | None, check: Callable[[], None]
) -> Generator[Step, None, None]:
    """A step per round, ended at a stop string.

    A token whose text may be the beginning of a stop string waits with it, so that the ids of a reply do not depend on
    how drafts divide it into rounds.

    Args:
        rounds: closed at the end.
        stream: None leaves the text empty.
        check: called before the next round is asked for; an exception from it ends them.
    """
    waiting: list[int] = []
    looked_up: list[TokenLogprob] = []
    given = calls = 0
    with closing(rounds):
        for this in rounds:
            waiting += this.token_ids
            looked_up += this.logprobs
            reason: FinishReason | None = this.finish_reason
            parsed, final = Parsed(), given + len(waiting)
            if stream is not None:
                parsed = stream.feed(this.token_ids)
                if reason:
                    parsed = parsed.then(stream.finish())
                calls += len(parsed.tool_calls)
                if stream.stopped:
                    reason = "stop"
                elif reason == "stop" and calls:
                    reason = "tool_calls"
                if stream.stopped or not reason:
                    final = stream.final_tokens
            token_ids, waiting = tuple(waiting[: final - given]), waiting[final - given :]
            logprobs, looked_up = tuple(looked_up[: final - given]), looked_up[final - given :]
            given = final
            yield Step(
                text=parsed.text,
                token_ids=token_ids,
                drafted=this.drafted,
                accepted=this.accepted,
                source=this.source,
                seconds=this.seconds,
                finish_reason=reason,
                reasoning=parsed.reasoning,
                tool_calls=parsed.tool_calls,
                logprobs=logprobs,
            )
            if reason:
                return
            check()
