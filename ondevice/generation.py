"""One generation, as the caller reads it: `Step`, `Reply`, `Generation` and `AsyncGeneration`.

`steps` at the end turns the rounds of the draft/verify loop (token ids) into steps (text).
"""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Callable, Generator, Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass
from functools import reduce
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self

from ondevice.errors import UsageError
from ondevice.generate.stats import Origin, Round, Stats, TokenLogprob
from ondevice.text.messages import ToolCall
from ondevice.text.reply_parser import Parsed
from ondevice.text.reply_stream import ReplyStream

if TYPE_CHECKING:
    import asyncio

FinishReason = Literal["stop", "length", "context", "cancelled", "tool_calls"]
"""Why a generation ended.

stop: a stop token, a stop string, or the end of the `response_format`; length: `max_new_tokens`; context: the context
is full; cancelled: `cancel` or `close`; tool_calls: the model stopped and waits for the results of its calls.
"""


@dataclass(frozen=True)
class Piece:
    """The text that one token made final, for displays that show what was drafted.

    text : text of the answer. Text that was held back belongs to the token that released it
    origin : where the token comes from
    token_id : None for text that was held back to the end of the reply, after its last token
    """

    text: str
    origin: Origin
    token_id: int | None


@dataclass(frozen=True)
class Step:
    """One round of a generation: draft, verify, accept.

    text : new text of the answer; empty while half a character or the possible beginning of a stop string is held back
    token_ids : the tokens of that text, and of the reasoning and calls
    drafted, accepted : number of drafted tokens, and of those that the target accepted
    source : name of the drafter of this round; `none` without a draft
    seconds : duration of the round
    finish_reason : set in the last step only
    stop_string : in the last step, the one of `stop` that ended the text; None if none did
    parts : reasoning, text and calls in the order in which they were written; within a part they have this order.
        Mostly there is one
    reasoning : new text of the model's thoughts, which come before the answer
    tool_calls : calls that this round completed
    logprobs : one entry per token of `token_ids`, if requested
    prompt_logprobs : in the first step, one entry per token of the prompt after its first one, if requested
    pieces : `text`, token by token: one for every token of this round, while `token_ids` leaves out tokens that are
        held back and those after a stop string
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
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    pieces: tuple[Piece, ...] = ()
    stop_string: str | None = None
    parts: tuple[Parsed, ...] = ()


@dataclass(frozen=True)
class Reply:
    """A whole generation: its steps joined.

    text : the answer; thoughts and calls are left out if the bundle's response template tells them apart
    stop_string : the one of `stop` that ended the text; None if none did
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    stats: Stats
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    stop_string: str | None = None

    @classmethod
    def of(cls, steps: Iterable[Step], stats: Stats) -> Reply:
        """Join all steps of a generation. Without a finish_reason in the last one it was cancelled."""
        taken = list(steps)
        return cls(
            text="".join(step.text for step in taken),
            token_ids=tuple(token for step in taken for token in step.token_ids),
            finish_reason=(taken[-1].finish_reason if taken else None) or "cancelled",
            stats=stats,
            reasoning="".join(step.reasoning for step in taken),
            tool_calls=tuple(call for step in taken for call in step.tool_calls),
            logprobs=tuple(each for step in taken for each in step.logprobs),
            prompt_logprobs=tuple(each for step in taken for each in step.prompt_logprobs),
            stop_string=taken[-1].stop_string if taken else None,
        )

    @property
    def message(self) -> dict[str, Any]:
        """This reply as an assistant message in OpenAI's form, to append to the conversation."""
        made: dict[str, Any] = {"role": "assistant", "content": self.text}
        if self.reasoning:
            made["reasoning_content"] = self.reasoning
        if self.tool_calls:
            made["tool_calls"] = [call.as_openai() for call in self.tool_calls]
            made["content"] = self.text or None
        return made


@dataclass
class Cancellation:
    """Flag that asks a generation to end. Not a lock or event, because signal handlers set it and must not block."""

    requested: bool = False


class Generation(Iterator[Step]):
    """Iterator over the steps of a generation. Nothing is computed before the first step is asked for.

    The last step has a finish_reason. The generation ends when it is exhausted, closed, left as a context manager,
    garbage-collected, or interrupted. `cancel` and `close` may be called from any thread.
    """

    def __init__(
        self,
        steps: Generator[Step, None, None],
        stats: Stats,
        cancellation: Cancellation,
        wake: Callable[[], None] = lambda: None,
    ) -> None:
        """
        Args:
            steps: makes the steps, and ends within one forward after a cancellation.
            stats: filled by the generation while it runs.
            cancellation: the flag that `steps` reads.
            wake: called after the flag is set, so that a generation waiting for its turn reads it.
        """
        self._steps = steps
        self._stats = stats
        self._cancellation = cancellation
        self._wake = wake
        self._reading = threading.Lock()
        self._reader = 0
        self._ended = False

    @property
    def stats(self) -> Stats:
        """Statistics so far, complete after the last step."""
        return self._stats

    def cancel(self) -> None:
        """Stop within one forward, or 0.05 s of shorter ones, or before the first one. The last step's finish_reason is
        then `cancelled`.
        """
        self._cancellation.requested = True
        self._wake()

    def close(self) -> None:
        """Stop and return no more steps. If another thread is waiting for a step, that thread gets the last one."""
        self._ended = True
        self.cancel()
        if self._reading.acquire(blocking=False):
            try:
                self._steps.close()
            finally:
                self._reading.release()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Step:
        if self._ended:
            raise StopIteration
        if self._reader == threading.get_ident():
            raise UsageError("a callback cannot ask its own generation for the next step")
        with self._reading:
            self._reader = threading.get_ident()
            try:
                return next(self._steps)
            except BaseException:
                self._ended = True
                raise
            finally:
                self._reader = 0
                if self._ended:
                    self._steps.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()


class AsyncGeneration(AsyncIterator[Step]):
    """A generation for `async for`. From the first step on, a thread of its own reads the generation into a queue.

    The generation does not wait for a slow reader. It ends when it is exhausted, closed, left as a context manager, or
    garbage-collected; cancelling a task leaves the context, and so ends it.
    """

    def __init__(self, generation: Generation) -> None:
        import asyncio  # imported late: it takes 5 % of a process's time to its first token

        self._generation = generation
        self._steps: asyncio.Queue[Step | BaseException | None] = asyncio.Queue()
        self._loop: asyncio.AbstractEventLoop | None = None
        """The event loop of the first step; None before it."""
        self._reader: threading.Thread | None = None
        self._ended = False

    @property
    def stats(self) -> Stats:
        """Statistics so far, complete after the last step."""
        return self._generation.stats

    def cancel(self) -> None:
        """Stop within one forward. The last step's finish_reason is then `cancelled`."""
        self._generation.cancel()

    async def aclose(self) -> None:
        """Stop, and wait until the computation has ended, at most one forward later. If another task is waiting for a
        step, that task gets no more.
        """
        import asyncio

        self._generation.close()
        if self._reader is not None and self._loop is not asyncio.get_running_loop():
            await asyncio.to_thread(self._reader.join)
            self._ended = True
        while self._reader is not None and not self._ended:
            await self._take()
        self._ended = True

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Step:
        import asyncio

        if self._ended:
            raise StopAsyncIteration
        loop = asyncio.get_running_loop()
        if self._reader is None:
            arguments = self._generation, loop, self._steps
            reader = threading.Thread(target=_read, args=arguments, name="ondevice-generation", daemon=True)
            reader.start()
            self._loop, self._reader = loop, reader
        if self._loop is not loop:
            raise UsageError("this generation began in another event loop: read all its steps in one")
        step = await self._take()
        if isinstance(step, Step):
            return step
        if step is None:
            raise StopAsyncIteration
        if isinstance(step, StopAsyncIteration):  # it would end an `async for` in silence
            raise RuntimeError("generation raised StopAsyncIteration") from step
        raise step

    async def _take(self) -> Step | BaseException | None:
        """The next item of the queue; None after its end, for every task that waits."""
        item = await self._steps.get()
        if not isinstance(item, Step):
            self._ended = True
            self._steps.put_nowait(None)
        return item

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    def __del__(self) -> None:
        self._generation.close()


def _read(
    generation: Generation, loop: asyncio.AbstractEventLoop, steps: asyncio.Queue[Step | BaseException | None]
) -> None:
    """Put every step into the queue, and then None, or the exception that ended the generation.

    This thread keeps no reference to the AsyncGeneration, so that it can be garbage-collected.
    """

    def put(item: Step | BaseException | None) -> None:
        try:
            loop.call_soon_threadsafe(steps.put_nowait, item)
        except RuntimeError:  # the event loop was closed: there is no reader left
            generation.close()

    try:
        for step in generation:
            put(step)
    except BaseException as error:
        put(error)
    else:
        put(None)


def steps(
    rounds: Generator[Round, None, None], stream: ReplyStream | None, stats: Stats, check: Callable[[], None]
) -> Generator[Step, None, None]:
    """Turn rounds into steps: decode the tokens, separate thoughts and calls, end where the stream ends the reply.

    A token whose text may begin a stop string is held back together with its text. So the token ids of a reply do not
    depend on how drafts divide it into rounds.

    Args:
        rounds: token ids by round; closed at the end.
        stream: decodes the reply; None leaves the text empty.
        stats: has counted the rounds. Tokens after the end of the reply, which only drafts bring, are taken out of it.
        check: called before each further round; an exception from it ends the generation.
    """
    held_ids: list[int] = []
    held_logprobs: list[TokenLogprob] = []
    emitted = calls = 0
    last: Origin = "plain"
    """Origin of the newest token."""
    with closing(rounds):
        for current in rounds:
            held_ids += current.token_ids
            held_logprobs += current.logprobs
            reason: FinishReason | None = current.finish_reason
            parts, final = [Parsed()], emitted + len(held_ids)
            pieces: list[Piece] = []
            for token, origin in zip(current.token_ids, current.origins, strict=True):
                if stream is not None and stream.stopped:
                    stats.new_tokens -= 1
                given = Parsed() if stream is None else stream.feed([token])
                _add_part(parts, given)
                pieces.append(Piece(given.text, origin, token))
                last = origin
            if stream is not None:
                if reason and (rest := stream.finish()) != Parsed():
                    _add_part(parts, rest)
                    pieces.append(Piece(rest.text, last, None))
                calls += sum(len(part.tool_calls) for part in parts)
                if stream.stopped:
                    reason = "tool_calls" if stream.stop_string is None else "stop"
                elif reason == "stop" and calls:
                    reason = "tool_calls"
                if stream.stopped or not reason:
                    final = stream.final_tokens
            token_ids, held_ids = tuple(held_ids[: final - emitted]), held_ids[final - emitted :]
            logprobs, held_logprobs = tuple(held_logprobs[: final - emitted]), held_logprobs[final - emitted :]
            emitted = final
            parsed = reduce(Parsed.then, parts)
            yield Step(
                text=parsed.text,
                token_ids=token_ids,
                drafted=current.drafted,
                accepted=current.accepted,
                source=current.source,
                seconds=current.seconds,
                finish_reason=reason,
                reasoning=parsed.reasoning,
                tool_calls=parsed.tool_calls,
                logprobs=logprobs,
                prompt_logprobs=current.prompt_logprobs,
                pieces=tuple(pieces),
                stop_string=None if stream is None else stream.stop_string,
                parts=tuple(parts),
            )
            if reason:
                return
            check()


def _add_part(parts: list[Parsed], new: Parsed) -> None:
    """Add what was written next, to the last part if that keeps the order."""
    last = parts[-1]
    if (new.reasoning and (last.text or last.tool_calls)) or (new.text and last.tool_calls):
        parts.append(new)
    else:
        parts[-1] = last.then(new)
