"""Who is answered now, who waits, and who has to come again later."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from math import ceil
from time import perf_counter

from ondevice.server.request_error import RequestError

LONGEST_RETRY_S = 60


class Places:
    """As many replies at a time as the model has sequences, first come, first served; and a queue before them."""

    def __init__(self, places: int, most_waiting: int) -> None:
        """
        Args:
            places: replies at a time.
            most_waiting: requests that may wait for one of them; further ones are refused.
        """
        self.places = places
        self._most_waiting = most_waiting
        self._semaphore = asyncio.Semaphore(places)
        self._usual_s = 1.0
        self.waiting = 0
        """Requests in the queue, those included that will find a free place."""
        self.busy = 0
        """Replies that have a place."""

    def queue(self) -> None:
        """Let a request in; `leave_queue` when its first reply has a place, or will have none.

        Raises:
            RequestError: too many are waiting.
        """
        if self.waiting >= self._most_waiting + self.places - self.busy:
            seconds = min(LONGEST_RETRY_S, max(1, ceil(self._usual_s * self.waiting / self.places)))
            message = f"{self.waiting} requests are waiting already: try again in {seconds} s"
            raise RequestError(503, message, retry_after=seconds)
        self.waiting += 1

    def leave_queue(self) -> None:
        self.waiting -= 1

    @asynccontextmanager
    async def place(self) -> AsyncIterator[None]:
        """Wait for one, and have it within the block."""
        async with self._semaphore:
            started = perf_counter()
            self.busy += 1
            try:
                yield
            finally:
                self.busy -= 1
                self._usual_s += 0.2 * (perf_counter() - started - self._usual_s)
