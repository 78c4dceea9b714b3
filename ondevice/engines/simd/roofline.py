"""Measures the limits of this machine: memory bandwidth and 8-bit dot products per second, with all threads together.

The kernels that it times are in `kernels.roofline`.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from ondevice import machine
from ondevice.engines.simd.kernels.contract.entries import CHAINS, VECTORS, dots, read
from ondevice.engines.simd.kernels.contract.instruction_sets import instruction_set

COUNT = 1 << 14
"""Fewest turns of a measurement, each of VECTORS dot products in each chain."""
LEAST_S = 0.02
"""Least time of a measurement in seconds, so that the half millisecond to wake threads does not matter: it was a fifth
of a measurement on an Intel Xeon of 2024."""
PASSES = 4
"""Passes over the memory in a measurement, for the same reason."""

DISTANCES = (0, 0), (0, 6144), (3072, 0)
"""Distances in bytes to what the measurements of the bandwidth prefetch, into level 2 and into level 1 alone; 0 for the
line that is read. The second is 0.03 to 0.06 faster than the first on an AMD Zen 4, the third a quarter faster on an
Intel Xeon of 2024."""

BYTES, THREAD_BYTES = 1 << 28, 1 << 25
"""Buffer sizes in bytes for the bandwidth measurement, in total and per thread at least: larger than any cache."""

MIN_BYTES = 1 << 26
"""Smallest buffer in bytes, for a board with little memory: still larger than its caches."""


@dataclass(frozen=True)
class Roofline:
    """The limits of this machine.

    bandwidth : bytes of memory read per second
    peak : 8-bit multiplications and additions per second
    """

    bandwidth: float
    peak: float

    def seconds(self, bytes_read: float, operations: float) -> float:
        """The least time, in seconds, to read so many bytes and compute so many operations."""
        return max(bytes_read / self.bandwidth, operations / self.peak)


class RooflineMeasurement:
    """Threads and a buffer for several measurements: a virtual machine's bandwidth drifts with its neighbours' load.

    Every thread is bound to a core of its own: two threads on one core would measure half the machine.
    """

    def __init__(self, threads: int) -> None:
        self._pools = [ThreadPoolExecutor(1) for _ in range(threads)]
        self._share = readable_bytes(threads, machine.available_bytes()) // threads // 256 * 256
        self._data = np.frombuffer(machine.private_memory(threads * self._share), np.uint8)
        self._out = np.zeros((threads, VECTORS, 16), np.int32)
        self._count = COUNT
        self._readings: list[Roofline] = []

    def __enter__(self) -> RooflineMeasurement:
        for pool, processor in zip(self._pools, machine.core_processors(), strict=False):
            pool.submit(os.sched_setaffinity, 0, {processor}).result()
        self._time(self._fill)
        self._time(partial(self._dots, COUNT))  # loads the kernels, and builds them where they are missing
        while self._time(partial(self._dots, self._count)) < LEAST_S:
            self._count *= 2
        return self

    def __exit__(self, *_: object) -> None:
        for pool in self._pools:
            pool.shutdown()

    def read(self) -> Roofline:
        """Measure three times and keep the best values, which are returned."""
        found = [self._reading() for _ in range(3)]
        best = Roofline(max(one.bandwidth for one in found), max(one.peak for one in found))
        self._readings.append(best)
        return best

    def median(self) -> Roofline:
        """The median of the values kept by `read`."""
        bandwidth = statistics.median(one.bandwidth for one in self._readings)
        return Roofline(bandwidth, statistics.median(one.peak for one in self._readings))

    def _reading(self) -> Roofline:
        threads, products = len(self._pools), self._count * CHAINS * VECTORS * 4 * instruction_set().lanes
        reading = min(self._time(partial(self._read, *distances)) for distances in DISTANCES)
        multiplying = self._time(partial(self._dots, self._count))
        return Roofline(threads * PASSES * self._share / reading, threads * 2 * products / multiplying)

    def _fill(self, thread: int) -> None:
        """Write a thread's part of the buffer: memory is placed at the socket of the thread that touches it first."""
        self._data[thread * self._share : (thread + 1) * self._share] = 1

    def _read(self, far: int, near: int, thread: int) -> None:
        start, out = self._data.ctypes.data + thread * self._share, self._out[thread].ctypes.data
        for _ in range(PASSES):
            read(start, self._share, far, near, out)

    def _dots(self, count: int, thread: int) -> None:
        dots(count, self._out[thread].ctypes.data)

    def _time(self, function: Callable[[int], Any]) -> float:
        started = time.perf_counter()
        for job in [pool.submit(function, index) for index, pool in enumerate(self._pools)]:
            job.result()
        return time.perf_counter() - started


def readable_bytes(threads: int, available: int) -> int:
    """Bytes of the buffer for so many threads: at most a quarter of the `available` memory, at least MIN_BYTES."""
    return max(MIN_BYTES, min(max(BYTES, threads * THREAD_BYTES), available // 4))
