"""Progress bars on stderr, and the signals and keys of a command that runs: Ctrl-C, SIGTERM, typing during a reply."""

from __future__ import annotations

import logging
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any, Protocol, Self

if TYPE_CHECKING:
    from tqdm import tqdm

LOG = logging.getLogger("ondevice")

PATIENCE_S = 2.0
"""Seconds before a bar appears: shorter work needs none."""


class ProgressBar:
    """A bar on stderr, shown only on a terminal, that disappears when the work is done.

    While it is open, messages of the `ondevice` logger are printed above it; of two nested ones, above the inner
    one.
    """

    def __init__(self, title: str, **options: Any) -> None:
        """
        Args:
            title: text before the bar.
            options: of tqdm, which is imported when there is something to show.
        """
        self._options = {"desc": title, "delay": PATIENCE_S, "leave": False, "disable": None, **options}
        self._bar: tqdm[None] | None = None
        self._since = 0.0
        self._handler = _AboveBar(self)
        self._outer: list[logging.Handler] = []
        """The handlers of the bars that this one is opened in."""

    def __enter__(self) -> Self:
        self._outer = [handler for handler in LOG.handlers if isinstance(handler, _AboveBar)]
        for handler in self._outer:
            LOG.removeHandler(handler)
        LOG.addHandler(self._handler)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        LOG.removeHandler(self._handler)
        for handler in self._outer:
            LOG.addHandler(handler)
        self._close()

    def show(self, done: int, total: int) -> None:
        """Show that `done` of `total` units are done; the bar closes when all are."""
        if self._bar is None:
            if done == total:
                return
            from tqdm import tqdm

            self._bar = tqdm(total=total, file=sys.stderr, **self._options)
        self._bar.update(done - self._bar.n)
        if done == total:
            self._close()

    def title(self, title: str) -> None:
        """Change the text before the bar."""
        self._options["desc"] = title
        if self._bar is not None:
            self._bar.set_description_str(title, refresh=False)

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

    def say(self, line: str) -> None:
        """Print a line on stderr, above the bar if it is shown."""
        if self._bar is None:
            print(line, file=sys.stderr)
        else:
            self._bar.write(line, file=sys.stderr)

    def _close(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None


class _AboveBar(logging.Handler):
    """Prints log messages above a bar. Without a handler, logging would print warnings into the bar's own line."""

    def __init__(self, bar: ProgressBar) -> None:
        super().__init__(logging.WARNING)
        self._bar = bar

    def emit(self, record: logging.LogRecord) -> None:
        self._bar.say(record.getMessage())


def prompt_bar() -> ProgressBar:
    """A bar in tokens, for the prefill of a prompt."""
    return ProgressBar("prompt", unit=" tokens")


def byte_bar(title: str) -> ProgressBar:
    """A bar in bytes."""
    return ProgressBar(title, unit="B", unit_scale=True)


class PreparationBar(ProgressBar):
    """A bar for preparing a bundle for this machine: a percentage, shown after half a second."""

    def __init__(self) -> None:
        super().__init__("preparing", bar_format="{desc}: {percentage:3.0f}%|{bar}| {elapsed}", delay=0.5)

    def prepare(self, stage: str, share: float) -> None:
        """The `on_prepare` callback of `ondevice.load`: the stage, and the share that is done, 0 to 1."""
        self.title(stage)
        self.show(round(1000 * share), 1000)


class Cancellable(Protocol):
    """A model or batch whose work `cancel` ends early; safe to call from a signal handler."""

    def cancel(self) -> None: ...


@dataclass
class Interrupt:
    """Whether Ctrl-C was pressed within `cancel_on_interrupt`."""

    happened: bool = False


@contextmanager
def cancel_on_interrupt(model: Cancellable) -> Iterator[Interrupt]:
    """Within the block, the first Ctrl-C cancels the generation, which then ends by itself; the second one raises.

    Yields:
        An object that says whether that happened.
    """
    interrupt = Interrupt()
    if threading.current_thread() is not threading.main_thread():
        yield interrupt  # Python allows signal handlers in the main thread only
        return

    def handle(signum: int, frame: FrameType | None) -> None:
        if interrupt.happened:
            raise KeyboardInterrupt
        interrupt.happened = True
        model.cancel()

    previous = signal.signal(signal.SIGINT, handle)
    try:
        yield interrupt
    finally:
        signal.signal(signal.SIGINT, previous)


@contextmanager
def ending_by_exception() -> Iterator[None]:
    """Within the block, SIGTERM and SIGHUP raise SystemExit, so that unfinished files are removed, as after Ctrl-C.

    A signal that is ignored already, as under nohup, stays ignored.
    """
    signals = [signal.SIGTERM, *([signal.SIGHUP] if hasattr(signal, "SIGHUP") else [])]
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def handle(signum: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + signum)  # as shells report a program that the signal ended

    taken = {each: old for each in signals if (old := signal.getsignal(each)) is signal.SIG_DFL}
    for each in taken:
        signal.signal(each, handle)
    try:
        yield
    finally:
        for each, old in taken.items():
            signal.signal(each, old)


@contextmanager
def unseen_keys() -> Iterator[None]:
    """Within the block, typed keys are not echoed into the reply; they become the next line. Ctrl-C still works."""
    try:
        import termios
    except ImportError:  # Windows echoes keys only when they are read
        yield
        return
    if not sys.stdin.isatty():
        yield
        return
    try:
        keyboard = sys.stdin.fileno()
        before = termios.tcgetattr(keyboard)
    except (OSError, ValueError, termios.error):  # an object in place of a terminal, such as a test's or a notebook's
        yield
        return
    silent = [*before[:3], before[3] & ~termios.ECHO, *before[4:]]
    termios.tcsetattr(keyboard, termios.TCSADRAIN, silent)
    try:
        yield
    finally:
        termios.tcsetattr(keyboard, termios.TCSADRAIN, before)
