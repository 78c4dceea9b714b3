"""Runs work in a forked process with limits on time and memory, so that no crash or hang stops the fuzzer."""

from __future__ import annotations

import os
import pickle
import resource
import select
import signal
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from ondevice.errors import OndeviceError

ADDRESSES = 6 << 30
"""Limit of a child's address space in bytes, above `MEMORY` because libraries reserve more than they use."""

MEMORY = 2 << 30
"""Limit of a child's peak resident memory in bytes."""

SECONDS = 30.0


@dataclass(frozen=True)
class Outcome:
    """The result of a child process.

    kind : `ok` with a value; `refused` if one of our errors was raised; any other kind is a fault
    """

    kind: Literal["ok", "refused", "traceback", "crash", "hang", "memory"]
    text: str = ""
    value: Any = None

    @property
    def is_fault(self) -> bool:
        return self.kind not in ("ok", "refused")


def run(work: Callable[[], Any], seconds: float = SECONDS) -> Outcome:
    """Run `work` in a child process and return its value, which must be picklable, or its error."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        os.close(reading)
        _work(work, writing)
    os.close(writing)
    message, in_time = _read(reading, time.monotonic() + seconds)
    os.close(reading)
    if not in_time:
        os.kill(child, signal.SIGKILL)
    _, status, usage = os.wait4(child, 0)
    if not in_time:
        return Outcome("hang", f"it took more than {seconds:.0f} s")
    if os.WIFSIGNALED(status) or not message:
        return Outcome("crash", f"status {os.waitstatus_to_exitcode(status)}")
    if usage.ru_maxrss * 1024 > MEMORY:
        return Outcome("memory", f"it held {usage.ru_maxrss >> 10} MB")
    kind, text, value = pickle.loads(message)
    return Outcome(kind, text, value)


def _work(work: Callable[[], Any], writing: int) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (ADDRESSES, ADDRESSES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    try:
        found = ("ok", "", work())
    except OndeviceError as error:
        text = str(error)
        found = ("refused" if text.isprintable() and text else "traceback", text, None)
    except BaseException:
        found = ("traceback", traceback.format_exc(), None)
    left = memoryview(pickle.dumps(found))
    while left:
        left = left[os.write(writing, left) :]
    os._exit(0)


def _read(reading: int, deadline: float) -> tuple[bytes, bool]:
    """Read a child's output until it ends or the deadline passes; returns the bytes and whether it ended in time."""
    pieces: list[bytes] = []
    while (left := deadline - time.monotonic()) > 0:
        if select.select([reading], [], [], left)[0]:
            if not (piece := os.read(reading, 1 << 16)):
                return b"".join(pieces), True
            pieces.append(piece)
    return b"", False
