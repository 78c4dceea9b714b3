"""Where the threads of a forward wait for one another."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
from numba import types

from ondevice.engines.simd.kernels.jit import kernel
from ondevice.engines.simd.kernels.memory import fetch_add, pause, read_shared

_SPINS = 4_000
"""Looks before a thread goes to sleep: about 0.1 ms, longer than threads of an idle machine drift apart."""

_LINGER = 20_000
"""Looks for the next plan before a thread goes to sleep: about 0.5 ms, in which tokens are chosen and drafts begun."""

_WINDOWS = sys.platform == "win32"
_nap: Any = types.ExternalFunction("Sleep" if _WINDOWS else "usleep", types.int32(types.uint32))
_LENGTH = np.uint32(0 if _WINDOWS else 20)
"""Microseconds; on Windows milliseconds, where none means to offer the core.

A nap frees the core for the thread that is waited for: two threads that the system has put on one core, as it does
when others are busy, took 6 ms to meet with sched_yield. And a thread that wakes up is given an idle core.
"""


@kernel
def meet(counter: int, target: int) -> None:
    """Wait until `target` threads have come since the counter was made; it only ever grows, so nothing is reset."""
    fetch_add(counter, np.int64(1))
    spins = 0
    while read_shared(counter) < target:
        spins += 1
        if spins < _SPINS:
            pause()
        else:
            _nap(_LENGTH)


@kernel
def linger(counter: int, beyond: int) -> None:
    """Wait until more than `beyond` threads have come, but not for long: whoever sleeps takes 0.1 ms to wake up."""
    spins = 0
    while read_shared(counter) <= beyond and spins < _LINGER:
        spins += 1
        pause()


@kernel
def claim(counter: int, size: int) -> Any:
    """Take the next `size` units of a step; what a slower core leaves, a faster one takes."""
    return fetch_add(counter, np.int64(size))
