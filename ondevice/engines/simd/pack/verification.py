"""Compares a bundle's files with their hashes, while they are packed: one thread reads as fast as two pack.

sha256 takes 0.85 s of a core per GB, reading included. A faster checksum in the manifest would do against damage, but
it can be forged: packs are named by the hashes that a manifest lists, and a bundle that listed those of another would
leave its own weights under the other's name.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as TooLong
from types import TracebackType
from typing import Self

from ondevice.engines.simd.graph.sources import Sources

POLL_S = 0.1
"""Seconds between two looks at how far it is."""


class _EndedError(Exception):
    """Nobody waits for the result any more."""


class Verification:
    """A thread that verifies sources, until the block is left."""

    def __init__(self, sources: Sources) -> None:
        self._pool = ThreadPoolExecutor(1)
        self._lock = threading.Lock()
        self._news = 0
        self._ended = False
        self._result: Future[None] = self._pool.submit(sources.verify, self._advance)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended = True
        self._pool.shutdown()

    def news(self) -> int:
        """Bytes that were read since this was asked last."""
        with self._lock:
            news, self._news = self._news, 0
        return news

    def wait(self, meanwhile: Callable[[], None]) -> None:
        """Return when all is verified, calling `meanwhile` now and then; raises what `Sources.verify` does."""
        while True:
            try:
                return self._result.result(POLL_S)
            except TooLong:
                if self._result.done():
                    raise
                meanwhile()

    def _advance(self, count: int) -> None:
        if self._ended:
            raise _EndedError
        with self._lock:
            self._news += count
