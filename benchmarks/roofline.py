"""What this machine could do: how fast all threads read memory, and how many dot-product operations they manage."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types

from ondevice.engines.simd.kernels import instruction_set
from ondevice.engines.simd.kernels.dot import dot4
from ondevice.engines.simd.kernels.jit import intrinsic, kernel
from ondevice.engines.simd.kernels.vector import I8, I32, I64, POINTER, constant, full, load, sum_lanes

_CHAINS = 12
"""Independent sums: more than any CPU has dot products in flight."""

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


def measure(threads: int, rounds: int = 9) -> Roofline:
    """The best of some rounds, every thread on a core of its own."""
    data = np.ones(_BYTES // 4, np.float32)
    share = data.nbytes // threads // 256 * 256
    count = 1 << 18
    lanes = instruction_set.current().lanes
    out = np.zeros((threads, 16), np.int32)
    with _Pinned(threads) as pinned:
        read = min(pinned.time(lambda i: _read(data.ctypes.data + i * share, share)) for _ in range(rounds))
        dots = min(pinned.time(lambda i: _dots(count, out[i].ctypes.data)) for _ in range(rounds))
    return Roofline(data.nbytes / read, threads * count * _CHAINS * lanes * 8 / dots)


class _Pinned:
    """One thread on each core: two that share one would measure half a machine."""

    def __init__(self, threads: int) -> None:
        self._pools = [ThreadPoolExecutor(1) for _ in range(threads)]

    def __enter__(self) -> _Pinned:
        if hasattr(os, "sched_setaffinity"):
            cores = sorted(os.sched_getaffinity(0))
            for pool, core in zip(self._pools, cores, strict=False):
                pool.submit(os.sched_setaffinity, 0, {core}).result()
        return self

    def __exit__(self, *_: object) -> None:
        for pool in self._pools:
            pool.shutdown()

    def time(self, function: Callable[[int], Any]) -> float:
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
