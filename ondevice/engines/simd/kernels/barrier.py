"""The barrier of a forward's threads: an int64 that counts arrivals, and the loops in which threads wait for it."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
from numba import types

from ondevice.engines.simd.kernels.jit import kernel
from ondevice.engines.simd.kernels.memory import fetch_add, pause, read_shared, ticks

_SPINS = 4_000
"""Reads of the counter before a thread naps: about 0.1 ms, longer than threads of an idle machine drift apart."""

_SPINS_FOR_NEXT = 20_000
"""Reads of the counter before an idle thread sleeps: about 0.5 ms, in which tokens are chosen and drafts begun."""

_WINDOWS = sys.platform == "win32"
_nap: Any = types.ExternalFunction("Sleep" if _WINDOWS else "usleep", types.int32(types.uint32))
_LENGTH = np.uint32(0 if _WINDOWS else 20)
"""Microseconds; on Windows milliseconds, where none means to offer the core.

A nap frees the core for the thread that is waited for: two threads that the system has put on one core, as it does
when others are busy, took 6 ms for a barrier with sched_yield. And a thread that wakes up is given an idle core.
"""


@kernel
def wait_for_all(counter: int, target: int) -> Any:
    """Count this thread's arrival, then wait until there are `target` arrivals; the count is never reset.

    Returns:
        `ticks` for which it waited.
    """
    if fetch_add(counter, np.int64(1)) + 1 >= target:
        return 0
    arrived = ticks()
    spins = 0
    while read_shared(counter) < target:
        spins += 1
        if spins < _SPINS:
            pause()
        else:
            _nap(_LENGTH)
    return ticks() - arrived


@kernel
def spin_for_next(counter: int, beyond: int) -> None:
    """Spin for up to 0.5 ms until there are more than `beyond` arrivals: a sleeping thread takes 0.1 ms to wake up."""
    spins = 0
    while read_shared(counter) <= beyond and spins < _SPINS_FOR_NEXT:
        spins += 1
        pause()
