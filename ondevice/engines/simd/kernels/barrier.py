"""Where the threads of a forward wait for one another."""

from __future__ import annotations

import sys

import numpy as np
from numba import types

from ondevice.engines.simd.kernels.jit import kernel
from ondevice.engines.simd.kernels.memory import fetch_add, pause, read_shared

_SPINS = 20_000
"""Looks before a thread offers its core to others: about 0.3 ms, longer than two threads of a step drift apart."""

_give_way = types.ExternalFunction("SwitchToThread" if sys.platform == "win32" else "sched_yield", types.int32())


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
            _give_way()
