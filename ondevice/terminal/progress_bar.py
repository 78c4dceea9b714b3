"""How far something is that a person waits for."""

from __future__ import annotations

import logging
import sys
from time import perf_counter
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from tqdm import tqdm

LOG = logging.getLogger("ondevice")

PATIENCE_S = 2.0
"""What takes less needs no bar."""


class ProgressBar:
    """A bar on standard error, only on a terminal, that goes away when all is done.

    Meanwhile, what is logged appears above it.
    """

    def __init__(self, title: str, **options: Any) -> None:
        """
        Args:
            title: what is going on.
            options: of tqdm, which is imported when there is something to show.
        """
        self._options = {"desc": title, "delay": PATIENCE_S, "leave": False, "disable": None, **options}
        self._bar: tqdm[None] | None = None
        self._since = 0.0
        self._handler = _Above(self)

    def __enter__(self) -> Self:
        LOG.addHandler(self._handler)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        LOG.removeHandler(self._handler)
        self._close()

    def show(self, done: int, total: int) -> None:
        """So much is done, of so much."""
        if self._bar is None:
            from tqdm import tqdm

            self._bar = tqdm(total=total, file=sys.stderr, **self._options)
        self._bar.update(done - self._bar.n)
        if done == total:
            self._close()

    def title(self, title: str) -> None:
        """What is going on now."""
        self._options["desc"] = title
        if self._bar is not None:
            self._bar.set_description_str(title, refresh=False)

    def show_below(self, done: int, total: int) -> None:
        """`show` under text that has begun, which the bar would wipe out in its own line."""
        if self._bar is None:
            now = perf_counter()
            self._since = self._since or now
            if done == total or now - self._since < PATIENCE_S:
                self._since = 0.0 if done == total else self._since
                return
            if sys.stderr.isatty():
                print(file=sys.stderr)
            self._options["delay"] = 0
        self.show(done, total)

    def say(self, line: str) -> None:
        """Print a line, above the bar where there is one."""
        if self._bar is None:
            print(line, file=sys.stderr)
        else:
            self._bar.write(line, file=sys.stderr)

    def _close(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None


class _Above(logging.Handler):
    """Without a handler, Python prints warnings itself: into the bar's line."""

    def __init__(self, bar: ProgressBar) -> None:
        super().__init__(logging.WARNING)
        self._bar = bar

    def emit(self, record: logging.LogRecord) -> None:
        self._bar.say(record.getMessage())


def prompt_bar() -> ProgressBar:
    return ProgressBar("prompt", unit=" tokens")


def byte_bar(title: str) -> ProgressBar:
    return ProgressBar(title, unit="B", unit_scale=True)


class PreparationBar(ProgressBar):
    """Shows how far a bundle is prepared for this machine, from the first half second on."""

    def __init__(self) -> None:
        super().__init__("preparing", bar_format="{desc}: {percentage:3.0f}%|{bar}| {elapsed}", delay=0.5)

    def prepare(self, stage: str, share: float) -> None:
        """What `ondevice.load` tells."""
        self.title(stage)
        self.show(round(1000 * share), 1000)
