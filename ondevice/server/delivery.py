"""Send the response to a request, as one JSON object or as a stream of events.

`ResponseWriter` is what an API implements (the files of `apis`): it turns the events of `Replies` into JSON. Framing,
keep-alives, errors in a running stream, and cancelling the replies of a client that disconnects are here, the same for
all APIs.
"""

from __future__ import annotations

import asyncio
import json
import secrets
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass
from io import StringIO
from typing import Any, NamedTuple, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ondevice.generate.stats import DraftCounts
from ondevice.generation import FinishReason, Step
from ondevice.model import Model
from ondevice.server.replies import Choice, KeepAlive, PrefillProgress, QueuePlace, Replies
from ondevice.server.requests import RequestError

KEEP_ALIVE_S = 15.0
"""Seconds without an event after which a stream sends something, so that proxies and clients do not close it."""

CLIENT_LEFT = 499
"""nginx's status for a client that disconnected before the response. It is never received."""

STREAM_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
"""Proxies must not cache or buffer a stream."""

Result = TypeVar("Result")


class FinishNames(NamedTuple):
    """Each API's names for the end of a reply.

    openai : `finish_reason` of chat completions and completions
    anthropic : `stop_reason` of a message
    responses : `status` of a response
    """

    openai: str
    anthropic: str
    responses: str


FINISH_NAMES: dict[FinishReason | None, FinishNames] = {
    "stop": FinishNames("stop", "end_turn", "completed"),
    "length": FinishNames("length", "max_tokens", "incomplete"),
    "context": FinishNames("length", "model_context_window_exceeded", "incomplete"),
    "tool_calls": FinishNames("tool_calls", "tool_use", "completed"),
}
"""By `Step.finish_reason`; a cancelled reply is an error in all APIs."""


class Usage(NamedTuple):
    """Tokens of a response. A prompt with several replies counts once.

    prompt : tokens of all prompts, cached ones included
    cached : those taken from the prefix cache
    new : tokens of all replies
    drafts : figures of drafts of all replies, by the names of vLLM's metrics
    """

    prompt: int
    cached: int
    new: int
    drafts: dict[str, Any]

    @classmethod
    def of(cls, choices: Sequence[Choice]) -> Usage:
        firsts, drafts = [choice.stats for choice in choices if choice.first is None], DraftCounts()
        for choice in choices:
            drafts.include(choice.stats)
        return cls(
            sum(stats.prompt_tokens for stats in firsts),
            sum(stats.cached_tokens for stats in firsts),
            sum(choice.stats.new_tokens for choice in choices),
            drafts.draft_figures(),
        )


def new_id(prefix: str) -> str:
    """A random id of a response or a part of it."""
    return f"{prefix}{secrets.token_hex(12)}"


@dataclass(frozen=True)
class ServerSentEvent:
    """One event of a stream.

    data : a JSON object, a string that is sent as it is, or None for a comment, which only keeps the connection open
    name : the event's name, in APIs that name events
    number : its place in the stream, in APIs whose streams can be joined again
    """

    data: dict[str, Any] | str | None
    name: str | None = None
    number: int | None = None

    def encode(self, write: Callable[[Any], str]) -> str:
        """The event as clients read it.

        Args:
            write: writes a value as JSON.
        """
        if self.data is None:
            return ": keep-alive\n\n"
        name = "" if self.name is None else f"event: {self.name}\n"
        if self.number is not None:
            name = f"id: {self.number}\n{name}"
        data = self.data if isinstance(self.data, str) else write(self.data)
        return f"{name}data: {data}\n\n"


class JsonLine(NamedTuple):
    """A line of a stream of JSON objects, as Ollama's."""

    data: dict[str, Any]

    def encode(self, write: Callable[[Any], str]) -> str:
        """See `ServerSentEvent.encode`."""
        return f"{write(self.data)}\n"


StreamEvent = ServerSentEvent | JsonLine


class ResponseWriter(ABC):
    """Writes the replies to one request in the form of one API: event by event, or at the end as one object.

    In both cases `opening`, `queued`, `prefill`, `step` and `closing` are called in the order of events, and what they
    return is iterated over, so that a writer may keep state.

    media_type : of a stream
    """

    media_type = "text/event-stream"

    def __init__(self, model: Model, name: str, choices: Sequence[Choice]) -> None:
        """
        Args:
            name: by which the server knows the model. It is the bundle's own, or its directory's where two have one.
        """
        self.model = model
        self.name = name
        self.choices = choices

    def opening(self) -> Iterable[StreamEvent]:
        """Before anything is computed."""
        return ()

    def queued(self, queue: QueuePlace) -> Iterable[StreamEvent]:
        """A reply waits for a slot."""
        return ()

    def prefill(self, progress: PrefillProgress) -> Iterable[StreamEvent]:
        """More of a prompt has been read."""
        return ()

    @abstractmethod
    def step(self, choice: Choice, step: Step) -> Iterable[StreamEvent]:
        """A reply has a new step, which `choice.steps` ends with."""

    @abstractmethod
    def closing(self) -> Iterable[StreamEvent]:
        """All replies are complete."""

    @abstractmethod
    def failure(self, error: RequestError) -> Iterable[StreamEvent]:
        """The stream ends with an error."""

    def keep_alive(self) -> StreamEvent:
        """Nothing has happened for some time."""
        return ServerSentEvent(None)

    @abstractmethod
    def whole(self) -> dict[str, Any]:
        """The response as one object, after `closing`."""


MakeWriter = Callable[[Model, str, Sequence[Choice]], ResponseWriter]
"""Makes a writer of a model, its name, and the replies."""


async def deliver(request: Request, replies: Replies, writer: ResponseWriter, stream: bool) -> Response:
    """Generate the replies and answer the request with them; closes them in the end.

    Args:
        request: its connection is watched.
        replies: not started yet.
        writer: of the API that was called.
        stream: whether to answer with server-sent events.

    Raises:
        Exception: of a generation, if not `stream`; a stream ends with an error event instead.
    """
    if stream:
        return EventStream(_texts(replies, writer), writer.media_type, replies.close)
    try:
        response = await unless_disconnected(request.receive, _whole(replies, writer))
    finally:
        await replies.close()
    return Response(status_code=CLIENT_LEFT) if response is None else response


class EventStream(Response):
    """A response that is sent as its text comes."""

    def __init__(
        self, texts: AsyncIterator[str], media_type: str, close: Callable[[], Awaitable[None]] | None = None
    ) -> None:
        """
        Args:
            close: called in the end, also when the client has disconnected.
        """
        super().__init__(headers=STREAM_HEADERS, media_type=media_type)
        del self.headers["content-length"]
        self._texts = texts
        self._close = close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await unless_disconnected(receive, self._send(send))
        finally:
            if self._close is not None:
                await self._close()

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async for text in self._texts:
            await send({"type": "http.response.body", "body": text.encode(), "more_body": True})
        await send({"type": "http.response.body", "body": b""})


async def _texts(replies: Replies, writer: ResponseWriter) -> AsyncIterator[str]:
    """The text of a stream."""
    try:
        async for text in written(replies, writer, _encoded):
            if text:
                yield text
        yield await replies.work(lambda: _encoded(writer.closing(), in_parts))
    except Exception as error:
        yield _encoded(writer.failure(RequestError.of(error)))


LINE_ENDS = {end: f"\\u{ord(end):04x}" for end in "\x85\u2028\u2029"}
"""Escapes of the characters at which some clients end a line, as those do that read with httpx's `iter_lines`."""


def at_once(value: Any) -> str:
    """A value as JSON on one line."""
    return _on_one_line(json.dumps(value, ensure_ascii=False))


def in_parts(value: Any) -> str:
    """A value as JSON, written in small parts, between which other threads run.

    Joining a list of the parts would stop them for 0.27 s, and take 350 MB, for the million tokens of a text.
    """
    text = StringIO()
    text.writelines(json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":")).iterencode(value))
    return _on_one_line(text.getvalue())


def _on_one_line(text: str) -> str:
    """JSON without the ends of lines that `json` leaves in it, all of which are in strings."""
    if not text.isascii():
        for end, escape in LINE_ENDS.items():
            text = text.replace(end, escape)
    return text


def _encoded(events: Iterable[StreamEvent], write: Callable[[Any], str] = at_once) -> str:
    return "".join(event.encode(write) for event in events)


def _exhausted(events: Iterable[StreamEvent], write: Callable[[Any], str] = at_once) -> str:
    """Let a writer make its events, which a whole response does not need: it keeps state."""
    for _ in events:
        pass
    return ""


async def _whole(replies: Replies, writer: ResponseWriter) -> Response:
    async for _ in written(replies, writer, _exhausted):
        pass

    def write() -> Response:
        for _ in writer.closing():
            pass
        return json_response(writer.whole())

    return await replies.work(write)


async def written(replies: Replies, writer: ResponseWriter, write: Callable[..., str]) -> AsyncIterator[str]:
    """The writer's events, encoded by `write`, but for those of the end: these can be as long as a whole reply.

    An echoed prompt is as long, so its events are made in a thread for requests.
    """
    yield write(writer.opening())
    async for event in replies.events(KEEP_ALIVE_S):
        if isinstance(event, KeepAlive):
            yield write([writer.keep_alive()])
        elif isinstance(event, QueuePlace):
            yield write(writer.queued(event))
        elif isinstance(event, PrefillProgress):
            yield write(writer.prefill(event))
        elif event.choice.echo is not None and len(event.choice.steps) == 1:
            yield await replies.work(write, writer.step(event.choice, event.step), in_parts)
        else:
            yield write(writer.step(event.choice, event.step))


def json_response(value: dict[str, Any]) -> Response:
    """A response with a JSON object."""
    return Response(in_parts(value).encode(), media_type="application/json")


async def unless_disconnected(receive: Receive, work: Coroutine[Any, Any, Result]) -> Result | None:
    """Run `work`, and cancel it if the client disconnects.

    Returns:
        Its result; None if the client disconnected first.
    """
    working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else None
    finally:
        working.cancel()
        leaving.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)
        del working  # its exception refers to this frame: the request would stay in memory for a while


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
