"""Progress bars on stderr, and the signals and keys of a command that runs: Ctrl-C, SIGTERM, typing during a reply."""

from __future__ import annotations

import logging
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from time import perf_counter
from types import FrameType
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from tqdm import tqdm

LOG = logging.getLogger("ondevice")

PATIENCE_S = 2.0
"""Seconds before a bar appears: shorter work needs none."""

PERCENTAGE = "{desc}: {percentage:3.0f}%|{bar}| {elapsed}"
"""Format of a bar whose units mean nothing to a reader."""


class ProgressBar:
    """A bar on stderr, shown only on a terminal, that disappears when the work is done.

    While it is open, messages of the `ondevice` logger are printed above it.
    """

    def __init__(self, title: str, **options: Any) -> None:
        """`options` are those of tqdm, which is imported when there is something to show."""
        self._options = {"desc": title, "delay": PATIENCE_S, "leave": False, "disable": None, **options}
        self._bar: tqdm[None] | None = None
        self._since = 0.0
        self._handler = _AboveBars(logging.WARNING)

    def __enter__(self) -> Self:
        LOG.addHandler(self._handler)
        return self

    def __exit__(self, *raised: object) -> None:
        LOG.removeHandler(self._handler)
        self._close()

    def show(self, done: int, total: int, title: str | None = None) -> None:
        """Show that `done` of `total` units are done, with another title if one is given; closes when all are done."""
        if title is not None:
            self._options["desc"] = title
            if self._bar is not None:
                self._bar.set_description_str(title, refresh=False)
        if self._bar is None:
            if done == total:
                return
            from tqdm import tqdm

            self._bar = tqdm(total=total, file=sys.stderr, **self._options)
        self._bar.update(done - self._bar.n)
        if done == total:
            self._close()

    def show_below(self, done: int, total: int) -> None:
        """`show` on a line of its own, for a terminal line that holds text already, which the bar would overwrite.

        The line break is printed only if the work takes longer than `PATIENCE_S`.
        """
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

    @staticmethod
    def say(line: str) -> None:
        """Print a line on stderr, above all bars that are shown."""
        from tqdm import tqdm

        tqdm.write(line, file=sys.stderr)

    def _close(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None


class _AboveBars(logging.Handler):
    """Prints log messages above bars. Without a handler, logging would print warnings into a bar's own line."""

    def emit(self, record: logging.LogRecord) -> None:
        if LOG.handlers[-1] is self:  # of nested bars, the inner one
            ProgressBar.say(record.getMessage())


def prompt_bar() -> ProgressBar:
    """A bar in tokens, for the prefill of a prompt."""
    return ProgressBar("prompt", unit=" tokens")


def byte_bar(title: str) -> ProgressBar:
    """A bar in bytes."""
    return ProgressBar(title, unit="B", unit_scale=True)


@contextmanager
def cancel_on_interrupt(cancel: Callable[[], None]) -> Iterator[threading.Event]:
    """Within the block, the first Ctrl-C calls `cancel`, so that the work ends by itself; the second one raises.

    Yields:
        An event that is set by the first one.
    """
    happened = threading.Event()

    def handle(signum: int, frame: FrameType | None) -> None:
        if happened.is_set():
            raise KeyboardInterrupt
        happened.set()
        cancel()

    with _handling([signal.SIGINT], handle):
        yield happened


@contextmanager
def ending_by_exception() -> Iterator[None]:
    """Within the block, SIGTERM and SIGHUP raise SystemExit, so that unfinished files are removed, as after Ctrl-C.

    A signal that is ignored already, as under nohup, stays ignored.
    """

    def handle(signum: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + signum)  # as shells report a program that the signal ended

    signals = [signal.SIGTERM, *([signal.SIGHUP] if hasattr(signal, "SIGHUP") else [])]
    with _handling([each for each in signals if signal.getsignal(each) is signal.SIG_DFL], handle):
        yield


@contextmanager
def _handling(signals: Iterable[int], handle: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Within the block, these signals call `handle`, except outside the main thread, where Python does not allow it."""
    if threading.current_thread() is not threading.main_thread():
        signals = ()
    previous = {each: signal.signal(each, handle) for each in signals}
    try:
        yield
    finally:
        for each, handler in previous.items():
            signal.signal(each, handler)


@contextmanager
def unseen_keys() -> Iterator[None]:
    """Within the block, typed keys are not echoed into the reply; they become the next line. Ctrl-C still works."""
    try:
        import termios
    except ImportError:  # Windows echoes keys only when they are read
        yield
        return
    try:
        keyboard = sys.stdin.fileno()
        before = termios.tcgetattr(keyboard)
    except (OSError, ValueError, termios.error):  # no terminal, or an object in place of one
        yield
        return
    silent = [*before[:3], before[3] & ~termios.ECHO, *before[4:]]
    termios.tcsetattr(keyboard, termios.TCSADRAIN, silent)
    try:
        yield
    finally:
        termios.tcsetattr(keyboard, termios.TCSADRAIN, before)
