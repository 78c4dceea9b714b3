"""Several requests at once on one model: a thread reads each, and their rows share forwards."""

from __future__ import annotations

import threading
from collections.abc import Generator, Iterable, Iterator
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING

from ondevice.terminal.batch.answer import Answer, answer

if TYPE_CHECKING:
    from ondevice.generation import Generation
    from ondevice.model import Model
    from ondevice.terminal.batch.request import Request

POLL_S = 0.1
"""Seconds between looks of the main thread, which could not hear of Ctrl-C on Windows otherwise."""

News = Answer | int
"""An answer, or how many tokens some of them went on by."""


class ModelThreads:
    def __init__(self, model: Model, count: int) -> None:
        """
        Args:
            count: requests at the same time; the model's `max_sequences`.
        """
        self._model = model
        self._count = count
        self._lock = threading.Lock()
        self._stopped = False

    def cancel(self) -> None:
        """Stop within one forward: what is not answered then is not told of. A signal handler may call it."""
        self._stopped = True
        self._model.cancel()

    def answers(self, requests: Iterable[Request]) -> Generator[News, None, None]:
        """Answers in the order in which they come, and tokens between them.

        Raises:
            Exception: what is no fault of a request, such as a lack of memory; the others are stopped then.
        """
        told: SimpleQueue[News | Exception | None] = SimpleQueue()
        left = iter(requests)
        threads = [
            threading.Thread(target=self._work, args=(left, told), name="ondevice-batch", daemon=True)
            for _ in range(self._count)
        ]
        for thread in threads:
            thread.start()
        working = len(threads)
        try:
            while working:
                try:
                    news = told.get(timeout=POLL_S)
                except Empty:
                    continue
                if isinstance(news, Exception):
                    raise news
                if news is None:
                    working -= 1
                else:
                    yield news
        finally:
            if working:
                self.cancel()
            for thread in threads:
                thread.join()

    def _work(self, left: Iterator[Request], told: SimpleQueue[News | Exception | None]) -> None:
        try:
            while (request := self._next(left)) is not None:
                made = answer(self._model, request, self._begun, lambda step: told.put(len(step.token_ids)))
                if made is None or self._stopped:
                    break
                told.put(made)
        except Exception as error:
            told.put(error)
        told.put(None)

    def _next(self, left: Iterator[Request]) -> Request | None:
        with self._lock:
            return None if self._stopped else next(left, None)

    def _begun(self, generation: Generation) -> None:
        if self._stopped:  # `cancel` came before there was anything to cancel
            generation.cancel()
