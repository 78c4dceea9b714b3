"""Generate the replies to one request: admission, the model, one generation per reply, one stream of events.

`Replies.begin` admits a `CompletionRequest` and takes the model, but generates nothing yet, so that every mistake in
the request is found before the first byte of the response. `Replies.events` generates, and yields events.
`Replies.close` cancels what still runs and releases the model; it must be called in any case.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from math import ceil, inf
from time import perf_counter
from typing import Any, TypeVar

from ondevice.generate.stats import Stats
from ondevice.generation import AsyncGeneration, FinishReason, Reply, Step
from ondevice.model import Model
from ondevice.options import GenerationKeywords
from ondevice.progress import Progress
from ondevice.server.metrics import Metrics
from ondevice.server.model_manager import ModelManager
from ondevice.server.requests import CompletionRequest, RequestError
from ondevice.text.codec import Prompt
from ondevice.text.reply_stream import TokenOffsets

MAX_RETRY_S = 60

WORKERS = 2
"""Threads for the work on requests, so that a long prompt does not hold up a short one."""

Result = TypeVar("Result")


class AdmissionQueue:
    """Admission control: running replies, a bounded queue of requests, and status 503 with `Retry-After` beyond it.

    A request counts as waiting until its first reply has a slot, or until it is answered if it generates nothing.
    Replies get slots first come, first served.

    What is computed of a request's size runs in `work`, in a few threads of its own: templates, tokens, grammars, and
    the JSON of a long response. Other work waits behind it there, never the event loop or a running reply.
    """

    def __init__(self, slots: int, max_waiting: int) -> None:
        """
        Args:
            slots: replies that are generated at the same time.
            max_waiting: requests that may wait for a slot; further ones are refused.
        """
        self.slots = slots
        self._max_waiting = max_waiting
        self._workers = ThreadPoolExecutor(WORKERS, "ondevice-request")
        self._semaphore = asyncio.Semaphore(slots)
        self._line: list[Callable[[int], None]] = []
        """Functions that get the place of each reply that waits for a slot, in their order."""
        self._typical_s = 1.0
        """Moving average of the time for which a reply holds a slot."""
        self.waiting = 0
        """Admitted requests whose first reply has no slot yet, those included that are about to take a free one."""
        self.running = 0
        """Replies that hold a slot."""

    def enter(self) -> None:
        """Admit a request. Call `leave` once, when its first reply gets a slot or when it never will.

        Raises:
            RequestError: the queue is full.
        """
        if self.waiting >= self._max_waiting + self.slots - self.running:
            seconds = min(MAX_RETRY_S, max(1, ceil(self._typical_s * self.waiting / self.slots)))
            message = f"{self.waiting} requests are waiting already: try again in {seconds} s"
            raise RequestError(503, message, retry_after=seconds)
        self.waiting += 1

    def leave(self) -> None:
        """Take an admitted request out of the queue."""
        self.waiting -= 1

    async def work(self, function: Callable[..., Result], *arguments: Any) -> Result:
        """Call a function in one of the threads for requests.

        A call that has begun goes on when the task is cancelled: its inputs are limited, so it ends soon.
        """
        return await asyncio.get_running_loop().run_in_executor(self._workers, partial(function, *arguments))

    @asynccontextmanager
    async def slot(self, tell_place: Callable[[int], None]) -> AsyncIterator[None]:
        """Wait for a slot and hold it within the block.

        Args:
            tell_place: called with the reply's place, 1 for the next one, if it has to wait and whenever that changes.
        """
        await self._wait(tell_place)
        started = perf_counter()
        self.running += 1
        try:
            yield
        finally:
            self._semaphore.release()
            self.running -= 1
            self._typical_s += 0.2 * (perf_counter() - started - self._typical_s)

    async def _wait(self, tell_place: Callable[[int], None]) -> None:
        if not self._semaphore.locked():
            await self._semaphore.acquire()
            return
        self._line.append(tell_place)
        tell_place(len(self._line))
        try:
            await self._semaphore.acquire()
        finally:
            at = self._line.index(tell_place)
            del self._line[at]
            for place, tell in enumerate(self._line[at:], at + 1):
                tell(place)


@dataclass(frozen=True)
class Echo:
    """A prompt that a response repeats.

    text : the prompt, or the text of its token ids
    token_ids : as the model reads it
    offsets : where each token begins in the text, in characters
    """

    text: str
    token_ids: Sequence[int]
    offsets: Sequence[int]

    @classmethod
    def of(cls, prompt: Prompt, model: Model) -> Echo:
        """
        Args:
            prompt: a text or token ids.

        Raises:
            PromptError: as `Model.stream` does.
        """
        token_ids = model.encode(prompt)
        if model.tokenizer is None:
            return cls("", token_ids, [0] * len(token_ids))
        text = prompt if isinstance(prompt, str) else model.tokenizer.decode(token_ids)
        offsets = TokenOffsets(model.tokenizer, spelling=text).add(token_ids)
        return cls(text, token_ids, [min(at, len(text)) for at in offsets])


class Choice:
    """One reply of a request: its generation, and its steps as far as `Replies.events` has yielded them.

    index : number of the reply in the response
    first : the first reply to the same prompt, which computes the prompt for all of them; None if this is it
    echo : the prompt, if the response begins with it
    """

    def __init__(self, index: int, first: Choice | None, echo: Echo | None) -> None:
        self.index = index
        self.first = first
        self.echo = echo
        self.generation: AsyncGeneration
        self.steps: list[Step] = []
        self.started_s = 0.0
        self.is_prefilled = asyncio.Event()

    @property
    def stats(self) -> Stats:
        """Statistics so far, complete after the last step."""
        return self.generation.stats

    @property
    def finish_reason(self) -> FinishReason | None:
        """None before the last step."""
        return self.steps[-1].finish_reason if self.steps else None

    @property
    def reply(self) -> Reply:
        """All steps so far in one."""
        return Reply.of(self.steps, self.stats)


@dataclass(frozen=True)
class QueuePlace:
    """A reply waits for a slot.

    choice : the reply
    place : 1 if it gets the next one
    """

    choice: Choice
    place: int


@dataclass(frozen=True)
class PrefillProgress:
    """Progress of reading a prompt.

    choice : the first reply to the prompt
    total, cached : tokens of the prompt, and of these the ones taken from the prefix cache
    processed : tokens done so far, cached ones included
    seconds : since the reply got its slot
    """

    choice: Choice
    total: int
    cached: int
    processed: int
    seconds: float


@dataclass(frozen=True)
class StepEvent:
    """A reply has a new step, which `choice.steps` ends with."""

    choice: Choice
    step: Step


@dataclass(frozen=True)
class KeepAlive:
    """Nothing has happened for some time: send something to keep the connection open."""


Event = QueuePlace | PrefillProgress | StepEvent | KeepAlive


class Replies:
    """The replies to one request. Made by `begin`; the caller must `close` it."""

    def __init__(self, model: Model, manager: ModelManager, queue: AdmissionQueue, metrics: Metrics) -> None:
        self.model = model
        self.choices: list[Choice] = []
        self._manager = manager
        self._queue = queue
        self._metrics = metrics
        self._events: asyncio.Queue[Event | Exception | None] = asyncio.Queue()
        """None: a reply is complete. An exception: a reply has failed."""
        self._tasks: list[asyncio.Task[None]] = []
        self._is_waiting = True
        self._closed = False

    @classmethod
    async def begin(
        cls, request: CompletionRequest, manager: ModelManager, queue: AdmissionQueue, metrics: Metrics
    ) -> Replies:
        """Admit a request, load the model if it was unloaded, and check options and prompts. Generates nothing yet.

        Raises:
            RequestError: the queue is full, the server stops, or the model is not capable of what the request needs.
            UsageError, PromptError, MissingDependencyError: see `Model.stream`.
        """
        for capability, name in request.needs.items():
            if capability not in manager.capabilities:  # the beginning is Ollama's: agents then ask without it
                message = f"{manager.name} does not support {capability}: its chat template has no {capability}"
                raise RequestError(400, message, param=name)
        queue.enter()
        try:
            model = await manager.acquire()
        except BaseException:
            queue.leave()
            raise
        if request.keep_s is not None:
            manager.keep(None if request.keep_s == inf else request.keep_s)
        replies = cls(model, manager, queue, metrics)
        try:
            replies.choices = await queue.work(replies._make_choices, request, asyncio.get_running_loop())
        except BaseException:
            await replies.close()
            raise
        return replies

    async def events(self, keep_alive_s: float) -> AsyncIterator[Event]:
        """Generate all replies and yield their events, and `KeepAlive` after every `keep_alive_s` without one.

        Raises:
            RequestError: the server stops.
            Exception: the first exception of a generation.
        """
        self._tasks = [asyncio.create_task(self._run(choice)) for choice in self.choices]
        running = len(self._tasks)
        while running:
            try:
                async with asyncio.timeout(keep_alive_s):  # Python 3.11's wait_for can lose a cancellation
                    event = await self._events.get()
            except TimeoutError:
                event = KeepAlive()
            if isinstance(event, Exception):
                raise event
            if event is None:
                running -= 1
                continue
            if isinstance(event, StepEvent):
                event.choice.steps.append(event.step)
                if event.step.finish_reason == "cancelled":
                    raise RequestError(503, "the server is stopping")
            yield event

    async def close(self) -> None:
        """Cancel what is still generated, which takes at most one forward, and release queue and model."""
        if self._closed:
            return
        self._closed = True
        for choice in self.choices:
            choice.generation.cancel()
        for task in self._tasks:
            task.cancel()
        try:
            await asyncio.gather(*self._tasks, return_exceptions=True)
        finally:  # also where the one that closes is cancelled: a user of the model that never left would keep its room
            self._leave_queue()
            self._manager.release()

    async def work(self, function: Callable[..., Result], *arguments: Any) -> Result:
        """See `AdmissionQueue.work`."""
        return await self._queue.work(function, *arguments)

    def _make_choices(self, request: CompletionRequest, loop: asyncio.AbstractEventLoop) -> list[Choice]:
        """Check options and encode prompts. Runs in another thread, since a long prompt takes a while."""
        choices: list[Choice] = []
        for prompt in request.prompts:
            first = None
            echo = Echo.of(prompt, self.model) if request.echoes else None
            for number in range(request.choices):
                if self._closed:  # the client has disconnected
                    return choices
                choice = Choice(len(choices), first, echo)
                options = self._options(request, number)
                if first is not None:
                    options["prompt_logprobs"] = False  # the first one computes the prompt
                else:
                    options["copies"] = request.choices - 1
                    if request.reports_prefill:
                        options["on_prefill"] = self._on_prefill(choice, loop)
                choice.generation = self.model.astream(prompt, **options)
                choices.append(choice)
                first = first or choice
        return choices

    def _options(self, request: CompletionRequest, number: int) -> GenerationKeywords:
        options: GenerationKeywords = {"max_new_tokens": self.model.context_length, **request.options}
        if (seed := options.get("seed")) is not None:
            options["seed"] = seed + number
        return options

    def _on_prefill(self, choice: Choice, loop: asyncio.AbstractEventLoop) -> Progress:
        def report(done: int, total: int) -> None:
            stats = choice.stats
            if not stats.new_tokens:  # later calls are about a draft model that reads the text
                event = PrefillProgress(choice, total, stats.cached_tokens, done, perf_counter() - choice.started_s)
                loop.call_soon_threadsafe(self._events.put_nowait, event)

        return report

    async def _run(self, choice: Choice) -> None:
        try:
            if choice.first is not None:
                await choice.first.is_prefilled.wait()
            async with self._queue.slot(lambda place: self._events.put_nowait(QueuePlace(choice, place))):
                self._leave_queue()
                choice.started_s = perf_counter()
                await self._generate(choice)
        except Exception as error:
            self._events.put_nowait(error)
        else:
            self._events.put_nowait(None)
        finally:
            choice.is_prefilled.set()

    async def _generate(self, choice: Choice) -> None:
        try:
            async with choice.generation as steps:
                async for step in steps:
                    choice.is_prefilled.set()
                    self._events.put_nowait(StepEvent(choice, step))
        finally:
            self._metrics.count(choice.stats)

    def _leave_queue(self) -> None:
        if self._is_waiting:
            self._is_waiting = False
            self._queue.leave()
