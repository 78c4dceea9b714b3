"""What `Model.stream` returns."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from ondevice.decoding.record import Step


class StepStream(Iterator[Step]):
    """A generator that also gives the model back when it was never started: a bare one's `finally` would not run.

    release : called once, when no more steps will come
    """

    def __init__(self, steps: Iterator[Step], release: Callable[[], None]) -> None:
        self._steps = steps
        self._release = release

    def __next__(self) -> Step:
        try:
            return next(self._steps)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        steps, self._steps = self._steps, iter(())
        if close := getattr(steps, "close", None):
            close()
            self._release()

    def __del__(self) -> None:
        self.close()
