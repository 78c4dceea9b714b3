"""Work in a forked process with limits of time and memory: whatever happens to it, the fuzzer goes on."""

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
"""Bytes of address space of a child. Libraries reserve more than they use."""

MEMORY = 2 << 30
"""Bytes that a child may ever have held."""

SECONDS = 30.0


@dataclass(frozen=True)
class Outcome:
    """How a child ended.

    kind : `ok` with a value; `refused` by an error of ours; else a fault
    """

    kind: Literal["ok", "refused", "traceback", "crash", "hang", "memory"]
    text: str = ""
    value: Any = None

    @property
    def is_fault(self) -> bool:
        return self.kind not in ("ok", "refused")


def run(work: Callable[[], Any], seconds: float = SECONDS) -> Outcome:
    """What `work` returned or raised. Its value must be one that can be pickled."""
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
    """What a child writes until it ends, and whether that was before the deadline."""
    pieces: list[bytes] = []
    while (left := deadline - time.monotonic()) > 0:
        if select.select([reading], [], [], left)[0]:
            if not (piece := os.read(reading, 1 << 16)):
                return b"".join(pieces), True
            pieces.append(piece)
    return b"", False
