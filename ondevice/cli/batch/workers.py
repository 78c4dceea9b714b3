"""Answering several requests at once on one model: a thread per slot, whose rows share forwards."""

from __future__ import annotations

import threading
from collections.abc import Generator, Iterable, Iterator
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING

from ondevice.cli.batch.answers import Answer, answer
from ondevice.cli.batch.requests import Request

if TYPE_CHECKING:
    from ondevice.generation import Generation
    from ondevice.model import Model

BatchEvent = Answer | int
"""An answer, or a number of new tokens of answers that are not complete."""

POLL_S = 0.1
"""Timeout of the main thread's waits, in seconds: on Windows, Ctrl-C is only seen between two waits."""


class ModelThreads:
    """Threads that run requests on one model in this process."""

    def __init__(self, model: Model, count: int) -> None:
        """
        Args:
            count: number of requests at the same time; the model's `max_sequences`.
        """
        self._model = model
        self._count = count
        self._lock = threading.Lock()
        self._stopped = False

    def cancel(self) -> None:
        """Stop within one forward; requests without an answer get none. May be called from a signal handler."""
        self._stopped = True
        self._model.cancel()

    def answers(self, requests: Iterable[Request]) -> Generator[BatchEvent, None, None]:
        """Yield answers in the order in which they are completed, and numbers of new tokens in between.

        Raises:
            Exception: a failure that no request caused, such as a lack of memory; the other requests are stopped.
        """
        events: SimpleQueue[BatchEvent | Exception | None] = SimpleQueue()
        remaining = iter(requests)
        threads = [
            threading.Thread(target=self._work, args=(remaining, events), name="ondevice-batch", daemon=True)
            for _ in range(self._count)
        ]
        for thread in threads:
            thread.start()
        working = len(threads)
        try:
            while working:
                try:
                    event = events.get(timeout=POLL_S)
                except Empty:
                    continue
                if isinstance(event, Exception):
                    raise event
                if event is None:
                    working -= 1
                else:
                    yield event
        finally:
            if working:
                self.cancel()
            for thread in threads:
                thread.join()

    def _work(self, remaining: Iterator[Request], events: SimpleQueue[BatchEvent | Exception | None]) -> None:
        """Answer requests until none is left; a thread's last event is None."""
        try:
            while (request := self._next(remaining)) is not None:
                made = answer(self._model, request, self._on_start, lambda step: events.put(len(step.token_ids)))
                if made is None or self._stopped:
                    break
                events.put(made)
        except Exception as error:
            events.put(error)
        events.put(None)

    def _next(self, remaining: Iterator[Request]) -> Request | None:
        with self._lock:
            return None if self._stopped else next(remaining, None)

    def _on_start(self, generation: Generation) -> None:
        if self._stopped:  # `cancel` was called before the model had this generation to cancel
            generation.cancel()
