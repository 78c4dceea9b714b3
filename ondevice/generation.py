"""What `Model.stream` returns: one generation, read step by step."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from ondevice.decoding.record import Stats
from ondevice.errors import UsageError
from ondevice.reply import Step


@dataclass
class Cancellation:
    """Whether a generation should end. A plain flag: signal handlers set it, and must not wait for a lock."""

    requested: bool = False


class Generation(Iterator[Step]):
    """Iterate over its steps; the last one has a finish_reason. Nothing is computed before the first is asked for.

    It ends when it is exhausted, closed, left as a context, dropped, or interrupted. `cancel` and `close` may be called
    from any thread.
    """

    def __init__(
        self,
        steps: Generator[Step, None, None],
        stats: Stats,
        cancellation: Cancellation,
        wake: Callable[[], None] = lambda: None,
    ) -> None:
        """
        Args:
            steps: what makes the steps; it ends soon after a cancellation.
            stats: filled while it runs.
            cancellation: what `steps` looks at.
            wake: called after a cancellation, so that one that waits for its turn looks.
        """
        self._steps = steps
        self._stats = stats
        self._cancellation = cancellation
        self._wake = wake
        self._reading = threading.Lock()
        self._reader = 0
        self._ended = False

    @property
    def stats(self) -> Stats:
        """Figures so far, complete after the last step."""
        return self._stats

    def cancel(self) -> None:
        """Stop within one forward, also where the first one has not begun. The last step's finish_reason is then
        `cancelled`.
        """
        self._cancellation.requested = True
        self._wake()

    def close(self) -> None:
        """Stop, and give no more steps. Where another thread waits for a step, that thread gets the last one."""
        self._ended = True
        self.cancel()
        if self._reading.acquire(blocking=False):
            try:
                self._steps.close()
            finally:
                self._reading.release()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Step:
        if self._ended:
            raise StopIteration
        if self._reader == threading.get_ident():
            raise UsageError("a callback cannot ask its own generation for the next step")
        with self._reading:
            self._reader = threading.get_ident()
            try:
                return next(self._steps)
            except BaseException:
                self._ended = True
                raise
            finally:
                self._reader = 0
                if self._ended:
                    self._steps.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()
