"""What `Model.astream` returns: one generation, whose steps an event loop awaits."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from types import TracebackType
from typing import Self

from ondevice.decoding.record import Stats
from ondevice.generation import Generation
from ondevice.reply import Step


class AsyncGeneration(AsyncIterator[Step]):
    """Iterate with `async for`; a thread of its own reads the generation meanwhile, from the first step asked for on.

    It computes ahead of a slow reader, as a reply that nobody waits for is soon complete. It ends when it is exhausted,
    closed, left as a context, or dropped; a task that is cancelled leaves the context, and so ends it.
    """

    def __init__(self, generation: Generation) -> None:
        self._generation = generation
        self._steps: asyncio.Queue[Step | BaseException | None] = asyncio.Queue()
        self._began = False
        self._ended = False

    @property
    def stats(self) -> Stats:
        """Figures so far, complete after the last step."""
        return self._generation.stats

    def cancel(self) -> None:
        """Stop within one forward. The last step's finish_reason is then `cancelled`."""
        self._generation.cancel()

    async def aclose(self) -> None:
        """Stop, and wait until nothing is computed any more, which is within one forward."""
        self._generation.close()
        while self._began and not self._ended:
            self._ended = not isinstance(await self._steps.get(), Step)
        self._ended = True

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Step:
        if self._ended:
            raise StopAsyncIteration
        if not self._began:
            self._began = True
            arguments = self._generation, asyncio.get_running_loop(), self._steps
            threading.Thread(target=_read, args=arguments, name="ondevice-generation", daemon=True).start()
        step = await self._steps.get()
        if isinstance(step, Step):
            return step
        self._ended = True
        if step is None:
            raise StopAsyncIteration
        raise step

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
    """Hand on the steps, and then None or what went wrong. Holds no AsyncGeneration, so that one can be dropped."""

    def tell(item: Step | BaseException | None) -> None:
        try:
            loop.call_soon_threadsafe(steps.put_nowait, item)
        except RuntimeError:  # the loop was closed: nobody reads on
            generation.close()

    try:
        for step in generation:
            tell(step)
    except BaseException as error:
        tell(error)
    else:
        tell(None)
