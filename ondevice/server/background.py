"""Replies that go on without their clients: OpenAI's `background` responses, kept in memory until they are forgotten.

Each keeps its events as they are sent, so that any number of listeners can join it at any event, and at its end the
whole response. What they take is limited in number, bytes and time.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Callable, Iterable
from typing import Any

from ondevice.errors import shown
from ondevice.server.apis.responses import OpenAIResponseWriter
from ondevice.server.delivery import KEEP_ALIVE_S, StreamEvent, at_once, in_parts, written
from ondevice.server.replies import Replies
from ondevice.server.requests import RequestError

MAX_STORED = 64
"""Most responses. The oldest that has ended makes room for a new one."""

MAX_STORED_BYTES = 1 << 26
"""Most bytes of all events: some 200,000 tokens. The oldest responses that have ended make room; without any, the
response that grows fails."""

MAX_RUNNING_S = 4 * 3600.0
"""Seconds after which a response that nobody may be waiting for is ended."""

KEPT_S = 3600.0
"""Seconds for which a response is kept after its end."""

BATCH = 64
"""Most events that a listener is sent at once."""


class StoredResponse:
    """A response, as far as it is written.

    id : of the response
    events : those of its stream, encoded; each has its place as its number
    """

    def __init__(self, replies: Replies, writer: OpenAIResponseWriter) -> None:
        self.id = writer.id
        self.events: list[str] = []
        self.size = 0
        self.task: asyncio.Task[None]
        self._running: tuple[Replies, OpenAIResponseWriter] | None = (replies, writer)
        """None after the end: its steps are no longer needed, nor is the model."""
        self._whole: dict[str, Any] | None = None
        self._grown = asyncio.Event()

    @property
    def has_ended(self) -> bool:
        return self._whole is not None

    def whole(self) -> dict[str, Any]:
        """The response as one object, as far as it is written."""
        if self._whole is None:
            assert self._running is not None
            return self._running[1].current()
        return self._whole

    async def follow(self, after: int) -> AsyncIterator[str]:
        """The events after one of this number, those of the past at once, and comments where nothing happens."""
        position = after + 1
        while True:
            grown = self._grown
            while position < len(self.events):
                batch = self.events[position : position + BATCH]
                position += len(batch)
                yield "".join(batch)
            if self.has_ended:
                return
            try:
                async with asyncio.timeout(KEEP_ALIVE_S):
                    await grown.wait()
            except TimeoutError:
                yield ": keep-alive\n\n"

    async def generate(self, check_room: Callable[[], None]) -> None:
        """Generate the reply and keep its events; closes the replies in the end.

        Args:
            check_room: called whenever the response has grown; its exception ends the response.
        """
        assert self._running is not None
        replies, writer = self._running
        try:
            async with asyncio.timeout(MAX_RUNNING_S):
                async for _ in written(replies, writer, self._keep):
                    check_room()
                    self._tell()
            ending = asyncio.create_task(self._end(replies, writer))
            try:
                await asyncio.shield(ending)
            except asyncio.CancelledError:  # too late: the thread that writes the end goes on
                await ending
        except asyncio.CancelledError:
            self._keep(writer.cancelled())
        except TimeoutError:
            message = f"a background response ends after {MAX_RUNNING_S / 3600:g} hours"
            self._keep(writer.failure(RequestError(408, message)))
        except Exception as error:
            self._keep(writer.failure(RequestError.of(error)))
        finally:
            self._whole = self._whole or writer.final
            self._running = None
            self._tell()
            await replies.close()

    async def _end(self, replies: Replies, writer: OpenAIResponseWriter) -> None:
        """Write the end of a whole reply."""
        await replies.work(self._keep, writer.closing(), in_parts)
        self._whole = await replies.work(writer.whole)

    def _keep(self, events: Iterable[StreamEvent], write: Callable[[Any], str] = at_once) -> str:
        for event in events:
            if event.data is not None:
                self.events.append(event.encode(write))
                self.size += sys.getsizeof(self.events[-1])
        return ""

    def _tell(self) -> None:
        """Wake the listeners."""
        self._grown.set()
        self._grown = asyncio.Event()


class Background:
    """The responses in memory. All methods belong to one event loop."""

    def __init__(self) -> None:
        self._stored: dict[str, StoredResponse] = {}
        """By id, oldest first."""

    async def begin(self, replies: Replies, writer: OpenAIResponseWriter) -> StoredResponse:
        """Let a reply go on by itself.

        Raises:
            RequestError: as many as possible are running already.
        """
        if len(self._stored) >= MAX_STORED and not self._drop_oldest():
            await replies.close()
            raise RequestError(503, f"{MAX_STORED} background responses are running: try again later", retry_after=60)
        response = StoredResponse(replies, writer)
        self._stored[response.id] = response
        response.task = asyncio.create_task(response.generate(self._check_room))
        response.task.add_done_callback(lambda _: self._forget_later(response.id))
        return response

    def find(self, response_id: str) -> StoredResponse:
        """
        Raises:
            RequestError: there is none.
        """
        if (found := self._stored.get(response_id)) is None:
            raise RequestError(
                404,
                f"no response {shown(response_id)} here: only `background` ones are kept, for {KEPT_S / 60:g} minutes "
                "after their end, until they are deleted or newer ones need their room",
            )
        return found

    async def cancel(self, response_id: str) -> StoredResponse:
        """End a response that is running; one that has ended stays as it is. Raises what `find` does."""
        response = self.find(response_id)
        response.task.cancel()
        await asyncio.wait((response.task,))
        return response

    async def delete(self, response_id: str) -> None:
        """End a response, and forget it. Raises what `find` does."""
        await self.cancel(response_id)
        self._stored.pop(response_id, None)

    def _check_room(self) -> None:
        """
        Raises:
            RequestError: the responses that are running take too much.
        """
        while sum(each.size for each in self._stored.values()) > MAX_STORED_BYTES:
            if not self._drop_oldest():
                raise RequestError(503, f"background responses take more than {MAX_STORED_BYTES >> 20} MB together")

    def _drop_oldest(self) -> bool:
        """Forget the oldest response that has ended; False if none has."""
        oldest = next((each.id for each in self._stored.values() if each.has_ended), None)
        if oldest is None:
            return False
        del self._stored[oldest]
        return True

    def _forget_later(self, response_id: str) -> None:
        asyncio.get_running_loop().call_later(KEPT_S, self._stored.pop, response_id, None)
