"""What this machine could do: how fast all threads read memory, and how many dot-product operations they manage."""

from __future__ import annotations

import mmap
import os
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from llvmlite import ir
from numba import types

from ondevice.engines.simd.kernels import instruction_set
from ondevice.engines.simd.kernels.dot import dot4
from ondevice.engines.simd.kernels.jit import intrinsic, kernel
from ondevice.engines.simd.kernels.vector import I8, I32, I64, POINTER, constant, full, load, sum_lanes

_CHAINS = 12
"""Independent sums: more than any CPU has dot products in flight."""

_COUNT = 1 << 20
"""Dot products in each: 25 milliseconds, so that waking the threads does not count."""

_BYTES = 1 << 30
"""Beyond any cache."""


@dataclass(frozen=True)
class Roofline:
    bandwidth: float
    """Bytes read in a second."""
    peak: float
    """8-bit multiplications and additions in a second."""

    def seconds(self, bytes_read: float, operations: float) -> float:
        """The least time that work can take."""
        return max(bytes_read / self.bandwidth, operations / self.peak)


def _large_pages(size: int) -> npt.NDArray[np.float32]:
    """Memory as fast as a mapped file's: on 4 KiB pages, address translation costs a tenth."""
    room = mmap.mmap(-1, size)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        room.madvise(mmap.MADV_HUGEPAGE)
    data = np.frombuffer(room, np.float32)
    data[:] = 1
    return data


class Gauge:
    """Measures again and again, because a virtual machine's bandwidth drifts with its neighbours.

    Every thread has a core of its own: two that share one would measure half a machine.
    """

    def __init__(self, threads: int) -> None:
        self._pools = [ThreadPoolExecutor(1) for _ in range(threads)]
        self._data = _large_pages(_BYTES)
        self._out = np.zeros((threads, 16), np.int32)
        self._readings: list[Roofline] = []

    def __enter__(self) -> Gauge:
        if hasattr(os, "sched_setaffinity"):
            cores = sorted(os.sched_getaffinity(0))
            for pool, core in zip(self._pools, cores, strict=False):
                pool.submit(os.sched_setaffinity, 0, {core}).result()
        self._reading()  # compiles
        return self

    def __exit__(self, *_: object) -> None:
        for pool in self._pools:
            pool.shutdown()

    def read(self) -> None:
        """Take the best of three readings."""
        found = [self._reading() for _ in range(3)]
        best = Roofline(max(one.bandwidth for one in found), max(one.peak for one in found))
        self._readings.append(best)

    def median(self) -> Roofline:
        """Of all that was read."""
        bandwidth = statistics.median(one.bandwidth for one in self._readings)
        return Roofline(bandwidth, statistics.median(one.peak for one in self._readings))

    def _reading(self) -> Roofline:
        threads, lanes = len(self._pools), instruction_set.current().lanes
        share = self._data.nbytes // threads // 256 * 256
        first = self._data.ctypes.data
        reading = self._time(lambda i: _read(first + i * share, share))
        dots = self._time(lambda i: _dots(_COUNT, self._out[i].ctypes.data))
        return Roofline(threads * share / reading, threads * _COUNT * _CHAINS * lanes * 8 / dots)

    def _time(self, function: Callable[[int], Any]) -> float:
        started = time.perf_counter()
        for job in [pool.submit(function, index) for index, pool in enumerate(self._pools)]:
            job.result()
        return time.perf_counter() - started


@kernel
def _read(data: int, size: int) -> Any:
    """Read `size` bytes, a multiple of 256, at an address."""
    a = full(np.float32(0.0))
    b, c, d = a, a, a
    for at in range(data, data + size, 256):
        a, b, c, d = a + load(at), b + load(at + 64), c + load(at + 128), d + load(at + 192)
    return sum_lanes((a + b) + (c + d))


@kernel
def _dots(count: int, out: int) -> None:
    _dot_chains(count, out)


@intrinsic
def _dot_chains(typing: Any, count: Any, out: Any) -> Any:
    """`count` dot products in each of several chains, their sum at `out`."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        isa = instruction_set.current()
        kind = ir.VectorType(I32, isa.lanes)
        pointer = builder.inttoptr(args[1], POINTER)
        codes = builder.load(pointer, typ=ir.VectorType(I8, 4 * isa.lanes), align=4)
        before = builder.block
        loop, after = builder.append_basic_block("loop"), builder.append_basic_block("after")
        builder.branch(loop)
        builder.position_at_end(loop)
        index = builder.phi(I64)
        index.add_incoming(I64(0), before)
        sums = [builder.phi(kind) for _ in range(_CHAINS)]
        following = [dot4(builder, isa, 4, total, codes, codes) for total in sums]
        for total, new in zip(sums, following, strict=True):
            total.add_incoming(constant(0, kind), before)
            total.add_incoming(new, loop)
        after_index = builder.add(index, I64(1))
        index.add_incoming(after_index, loop)
        builder.cbranch(builder.icmp_signed("<", after_index, args[0]), loop, after)
        builder.position_at_end(after)
        total = following[0]
        for new in following[1:]:
            total = builder.add(total, new)
        builder.store(total, pointer, align=4)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate
