"""Ctrl-C as a request, not as an explosion."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Protocol


class Cancellable(Protocol):
    def cancel(self) -> None: ...


@dataclass
class Interrupt:
    happened: bool = False


@contextmanager
def cancel_on_interrupt(model: Cancellable) -> Iterator[Interrupt]:
    """Within the block the first Ctrl-C cancels the generation, which then ends by itself; the second one raises."""
    interrupt = Interrupt()
    if threading.current_thread() is not threading.main_thread():
        yield interrupt  # signals belong to the main thread
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
    """Within the block SIGTERM and SIGHUP raise SystemExit, so that what is half done is removed, as with Ctrl-C."""
    signals = [signal.SIGTERM, *([signal.SIGHUP] if hasattr(signal, "SIGHUP") else [])]
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def handle(signum: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + signum)  # as shells report a program that the signal ended

    # one that somebody ignores on purpose, as nohup does, stays ignored
    taken = {each: old for each in signals if (old := signal.getsignal(each)) is signal.SIG_DFL}
    for each in taken:
        signal.signal(each, handle)
    try:
        yield
    finally:
        for each, old in taken.items():
            signal.signal(each, old)
