"""Replies on their way to the client: as one object, or as server-sent events; cancelled where the client leaves."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Coroutine, Iterable, Mapping
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from ondevice.errors import OndeviceError
from ondevice.server.replies import Reading, Replies, Told
from ondevice.server.request_error import RequestError
from ondevice.server.shape import Choice, Message, Shape

KEEP_ALIVE_S = 15.0
"""Of silence, after which a comment tells the client, and whatever lies between, that the connection lives."""

CLIENT_LEFT = 499
"""nginx's status for a client that did not wait; for logs, as nobody receives it."""

HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
"""Nobody between server and client shall hold a stream back."""

Result = TypeVar("Result")

_log = logging.getLogger("ondevice")


def as_request_error(error: Exception, fields: Mapping[str, Any]) -> RequestError:
    """What to tell the client; what it cannot be at fault for goes to the log."""
    if not isinstance(error, RequestError | OndeviceError):
        _log.error("a request failed", exc_info=error)
    return RequestError.of(error, fields)


async def deliver(request: Request, replies: Replies, choices: list[Choice], shape: Shape, stream: bool) -> Response:
    """Answer a request, and close its replies."""
    if stream:
        return EventStream(replies, choices, shape)
    try:
        whole = await _unless_left(request.receive, _whole(replies, choices, shape))
    finally:
        await replies.close()
    return JSONResponse(whole) if whole is not None else Response(status_code=CLIENT_LEFT)


class EventStream(Response):
    """A stream of server-sent events."""

    media_type = "text/event-stream"

    def __init__(self, replies: Replies, choices: list[Choice], shape: Shape) -> None:
        super().__init__(headers=HEADERS)
        del self.headers["content-length"]
        self._replies = replies
        self._choices = choices
        self._shape = shape

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await _unless_left(receive, self._send(send))
        finally:
            await self._replies.close()

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async for piece in self._pieces():
            await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": b""})

    async def _pieces(self) -> AsyncIterator[bytes]:
        yield _written(self._shape.opening())
        try:
            async for messages in _messages(self._replies, self._choices, self._shape):
                if piece := _written(messages):
                    yield piece
        except Exception as error:
            yield _written(self._shape.failure(as_request_error(error, {})))
        else:
            yield _written(self._shape.closing())


async def _whole(replies: Replies, choices: list[Choice], shape: Shape) -> dict[str, Any]:
    for _ in shape.opening():
        pass
    async for messages in _messages(replies, choices, shape):
        for _ in messages:
            pass
    for _ in shape.closing():
        pass
    return shape.whole()


async def _messages(replies: Replies, choices: list[Choice], shape: Shape) -> AsyncIterator[Iterable[Message]]:
    async for event in replies.events(KEEP_ALIVE_S):
        if isinstance(event, Told):
            choice = choices[event.index]
            choice.add(event.step)
            if choice.finish_reason == "cancelled":
                raise RequestError(503, "the server is stopping")
            yield shape.step(choice, event.step)
        elif isinstance(event, Reading):
            yield shape.reading(event)
        else:
            message = shape.silence()
            yield [Message(": keep-alive") if message is None else message]


def _written(messages: Iterable[Message]) -> bytes:
    return "".join(map(_as_text, messages)).encode()


def _as_text(message: Message) -> str:
    if isinstance(message.data, str):
        return f"{message.data}\n\n"
    name = "" if message.event is None else f"event: {message.event}\n"
    return f"{name}data: {json.dumps(message.data, ensure_ascii=False)}\n\n"


async def _unless_left(receive: Receive, work: Coroutine[Any, Any, Result]) -> Result | None:
    """The result of some work, which is cancelled if the client leaves before: None then."""
    working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(_left(receive))
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else None
    finally:
        working.cancel()
        leaving.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
