"""The replies to one request, generated side by side."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from time import perf_counter

from ondevice.async_generation import AsyncGeneration
from ondevice.decoding.record import Stats
from ondevice.model import Model
from ondevice.options import GenerationKeywords
from ondevice.progress import Progress
from ondevice.reply import Step
from ondevice.server.metrics import Metrics
from ondevice.server.order import Order
from ondevice.server.places import Places
from ondevice.server.residence import Residence


@dataclass(frozen=True)
class Reading:
    """So many of a prompt's tokens are read: of `total`, `cached` were known before; `seconds` since it began."""

    total: int
    cached: int
    processed: int
    seconds: float


@dataclass(frozen=True)
class Told:
    """A step of one of the replies."""

    index: int
    step: Step


@dataclass(frozen=True)
class Silence:
    """Nothing happened for a while."""


Event = Reading | Told | Silence


class _Reply:
    """One of the replies to a prompt, the first of which reads the prompt for all of them."""

    def __init__(self, index: int, first: _Reply | None) -> None:
        self.index = index
        self.first = first
        self.has_read = asyncio.Event()
        self.since = 0.0
        self.generation: AsyncGeneration


class Replies:
    """What one request gets. Made by `begin`; `close` it, whatever happened."""

    def __init__(self, model: Model, residence: Residence, places: Places, metrics: Metrics) -> None:
        self._model = model
        self._residence = residence
        self._places = places
        self._metrics = metrics
        self._events: asyncio.Queue[Event | BaseException | None] = asyncio.Queue()
        self._replies: list[_Reply] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._queued = True
        self._closed = False

    @classmethod
    async def begin(cls, order: Order, residence: Residence, places: Places, metrics: Metrics) -> Replies:
        """Let a request in, and check all that it asks for. Nothing is generated yet.

        Raises:
            RequestError: there is no room, or no model yet.
            UsageError, PromptError: it asks for what makes no sense.
        """
        residence.check_loaded_once()
        places.queue()
        try:
            model = await residence.take()
        except BaseException:
            places.leave_queue()
            raise
        replies = cls(model, residence, places, metrics)
        try:
            replies._replies = await asyncio.to_thread(replies._made, order, asyncio.get_running_loop())
        except BaseException:
            await replies.close()
            raise
        return replies

    @property
    def model(self) -> Model:
        return self._model

    @property
    def stats(self) -> list[tuple[Stats, bool]]:
        """Of every reply, so far, and whether it is the first one to its prompt."""
        return [(reply.generation.stats, reply.first is None) for reply in self._replies]

    async def events(self, patience_s: float) -> AsyncIterator[Event]:
        """What happens, until all replies are complete; `Silence` wherever that takes longer than `patience_s`.

        Raises what a generation does.
        """
        self._tasks = [asyncio.create_task(self._run(reply)) for reply in self._replies]
        running = len(self._tasks)
        while running:
            try:
                async with asyncio.timeout(patience_s):  # Python 3.11's wait_for can lose a cancellation
                    event = await self._events.get()
            except TimeoutError:
                event = Silence()
            if isinstance(event, BaseException):
                raise event
            if event is None:
                running -= 1
            else:
                yield event

    async def close(self) -> None:
        """Cancel what is still generated, within one forward, and leave everything as it was."""
        if self._closed:
            return
        self._closed = True
        for reply in self._replies:
            reply.generation.cancel()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._leave_queue()
        self._residence.give_back()

    def _made(self, order: Order, loop: asyncio.AbstractEventLoop) -> list[_Reply]:
        """Check and encode, in a thread: that may take a while."""
        replies: list[_Reply] = []
        for prompt in order.prompts:
            first = None
            for choice in range(order.choices):
                reply = _Reply(len(replies), first)
                options = self._options(order, choice)
                if first is None:
                    options["copies"] = order.choices - 1
                    if order.tell_reading:
                        options["on_prefill"] = self._on_prefill(reply, loop)
                reply.generation = self._model.astream(prompt, **options)
                replies.append(reply)
                first = first or reply
        return replies

    def _options(self, order: Order, choice: int) -> GenerationKeywords:
        options: GenerationKeywords = {**order.options}
        if order.until_end:
            options["max_new_tokens"] = self._model.context_length
        if (seed := options.get("seed")) is not None:
            options["seed"] = seed + choice
        return options

    def _on_prefill(self, reply: _Reply, loop: asyncio.AbstractEventLoop) -> Progress:
        def tell(done: int, total: int) -> None:
            stats = reply.generation.stats
            if not stats.new_tokens:  # later it is a draft model that reads
                event = Reading(total, stats.cached_tokens, done, perf_counter() - reply.since)
                loop.call_soon_threadsafe(self._events.put_nowait, event)

        return tell

    async def _run(self, reply: _Reply) -> None:
        try:
            if reply.first is not None:
                await reply.first.has_read.wait()
            async with self._places.place():
                self._leave_queue()
                reply.since = perf_counter()
                await self._read(reply)
        except Exception as error:
            self._events.put_nowait(error)
        else:
            self._events.put_nowait(None)
        finally:
            reply.has_read.set()

    async def _read(self, reply: _Reply) -> None:
        try:
            async with reply.generation as steps:
                async for step in steps:
                    reply.has_read.set()
                    self._events.put_nowait(Told(reply.index, step))
        finally:
            self._metrics.count(reply.generation.stats)

    def _leave_queue(self) -> None:
        if self._queued:
            self._queued = False
            self._places.leave_queue()
