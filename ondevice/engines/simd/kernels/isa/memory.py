"""Scalars at addresses (loads and stores, bits of floats), atomic counters, clock; the barrier of a forward's threads,
and how they share the units of a step.

Addresses are int64.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils

from ondevice.engines.simd.kernels.contract.entries import ARRIVALS, LINE, SLEEPERS, SPINS, THREADS, WAIT_TICKS
from ondevice.engines.simd.kernels.isa.jit import emits
from ondevice.engines.simd.kernels.isa.vector import F32, I8, I16, I32, I64, call, pointer_to, prefetch, widen_half
from ondevice.native.functions import kernel


@emits(types.float32, types.int64)
def read_f32(builder: Any, address: Any) -> Any:
    """The float32 at an address."""
    return builder.load(pointer_to(builder, address), typ=F32, align=4)


@emits(types.float32, types.int64)
def read_half(builder: Any, address: Any) -> Any:
    """The fp16 number at an address, as a float32."""
    bits = builder.load(pointer_to(builder, address), typ=ir.VectorType(I16, 1), align=2)
    return builder.extract_element(widen_half(builder, bits), I32(0))


@emits(types.void, types.int64, types.float32)
def write_f32(builder: Any, address: Any, value: Any) -> None:
    """Store a float32."""
    builder.store(value, pointer_to(builder, address), align=4)


@emits(types.void, types.int64, types.int32)
def write_i32(builder: Any, address: Any, value: Any) -> None:
    """Store an int32."""
    builder.store(value, pointer_to(builder, address), align=4)


@emits(types.int32, types.int64)
def read_i32(builder: Any, address: Any) -> Any:
    """The int32 at an address."""
    return builder.load(pointer_to(builder, address), typ=I32, align=4)


@emits(types.int32, types.int64)
def read_i16(builder: Any, address: Any) -> Any:
    """The int16 at an address."""
    return builder.sext(builder.load(pointer_to(builder, address), typ=I16, align=2), I32)


@emits(types.void, types.int64, types.int32)
def write_i16(builder: Any, address: Any, value: Any) -> None:
    """Store the lower half of an int32."""
    builder.store(builder.trunc(value, I16), pointer_to(builder, address), align=2)


@emits(types.int32, types.int64)
def read_i8(builder: Any, address: Any) -> Any:
    """The int8 at an address."""
    return builder.sext(builder.load(pointer_to(builder, address), typ=I8, align=1), I32)


@emits(types.void, types.int64, types.int32)
def write_i8(builder: Any, address: Any, value: Any) -> None:
    """Store the low byte of an int32."""
    builder.store(builder.trunc(value, I8), pointer_to(builder, address), align=1)


@emits(types.int64, types.int64)
def read_i64(builder: Any, address: Any) -> Any:
    """The int64 at an address."""
    return builder.load(pointer_to(builder, address), typ=I64, align=8)


@emits(types.void, types.int64, types.int64)
def write_i64(builder: Any, address: Any, value: Any) -> None:
    """Store an int64."""
    builder.store(value, pointer_to(builder, address), align=8)


@emits(types.int32, types.float32)
def float_bits(builder: Any, value: Any) -> Any:
    """The bits of a float32."""
    return builder.bitcast(value, I32)


@emits(types.float32, types.int32)
def bits_float(builder: Any, bits: Any) -> Any:
    """The float32 of these bits."""
    return builder.bitcast(bits, F32)


@emits(types.int64, types.int64, types.int64)
def fetch_add(builder: Any, address: Any, value: Any) -> Any:
    """Add to a shared int64 and return its value before (sequentially consistent).

    This thread's earlier writes are visible to threads that read the new value, and theirs to this one.
    """
    return builder.atomic_rmw("add", pointer_to(builder, address), value, "seq_cst")


@emits(types.int64, types.int64)
def read_shared(builder: Any, address: Any) -> Any:
    """Read a shared int64 (sequentially consistent): the writer's earlier writes are visible afterwards."""
    return builder.load_atomic(pointer_to(builder, address), "seq_cst", 8, typ=I64)


@emits(types.int64, types.int64, types.int64)
def call_entry(builder: Any, function: Any, record: Any) -> Any:
    """Call an entry `by_record`, by the addresses of its C function and of its arguments."""
    kind = ir.FunctionType(I64, [I64])
    return builder.call(builder.inttoptr(function, kind.as_pointer()), [record])


@emits(types.void, types.int64)
def prefetch_line(builder: Any, address: Any) -> None:
    """Prefetch the cache line at an address. The address need not be readable."""
    prefetch(builder, pointer_to(builder, address))


@emits(types.void)
def pause(builder: Any) -> None:
    """Wait for some 20 ns in a spin loop: PAUSE, or ISB on ARM, where YIELD takes no time on most cores."""
    triple = builder.module.triple
    if triple.startswith("x86_64"):
        call(builder, "llvm.x86.sse2.pause", ir.VoidType())
    elif triple.startswith(("aarch64", "arm64")):
        call(builder, "llvm.aarch64.isb", ir.VoidType(), I32(15))


@emits(types.int64)
def ticks(builder: Any) -> Any:
    """A clock of unspecified rate that takes a few nanoseconds to read; 0 on processors without one."""
    triple = builder.module.triple
    if triple.startswith("x86_64"):
        return call(builder, "llvm.readcyclecounter", I64)
    if triple.startswith(("aarch64", "arm64")):
        # LLVM's cycle counter is reserved for the system on ARM. This clock is read through a named register: inline
        # assembly ended the process, because numba's code generator has no parser for it.
        name = builder.module.add_metadata(["cntvct_el0"])
        return call(builder, "llvm.read_volatile_register.i64", I64, name)
    return I64(0)


# The barrier: an int64 counts arrivals. A thread that arrives early spins, then sleeps, until the count is high enough.

_MOST_SPINS = 4_000
"""Reads of the counter before a thread sleeps: about 0.1 ms, longer than threads wait for each other on an idle
machine."""

_FEWEST_SPINS = 100
"""As many after a wait in which the thread slept, about 3 us. They double with each wait that they are enough for."""

_SPINS_FOR_NEXT = 20_000
"""Reads of the counter before an idle thread sleeps: about 0.5 ms, enough to choose tokens and to begin a draft."""

_FUTEX = {"x86_64": 202, "aarch64": 98}
"""Number of Linux's system call `futex`, by processor."""

_FUTEX_WAIT, _FUTEX_WAKE = 128, 129
"""Its operations, for threads of one process."""


def _futex(builder: Any, address: Any, operation: int, value: Any) -> None:
    number = _FUTEX[builder.module.triple.split("-")[0]]
    call(builder, "syscall", I64, I64(number), address, I64(operation), value, I64(0), I64(0), I64(0))


@emits(types.void, types.int64, types.int64)
def sleep_while(builder: Any, address: Any, value: Any) -> None:
    """Sleep until `wake_sleepers`, unless the int64 at an address has another value already. It may return earlier.

    On macOS, where this needs version 14.4, it sleeps for 20 microseconds.
    """
    if "linux" in builder.module.triple:
        _futex(builder, address, _FUTEX_WAIT, value)
    elif "windows" in builder.module.triple:
        known = builder.ptrtoint(cgutils.alloca_once_value(builder, value), I64)  # type: ignore[no-untyped-call]
        call(builder, "WaitOnAddress", I32, address, known, I64(8), I32(-1))
    else:
        call(builder, "usleep", I32, I32(20))


@emits(types.void, types.int64)
def wake_sleepers(builder: Any, address: Any) -> None:
    """Wake all threads that sleep in `sleep_while` at an address; on macOS they wake up by themselves."""
    if "linux" in builder.module.triple:
        _futex(builder, address, _FUTEX_WAKE, I64(2**31 - 1))
    elif "windows" in builder.module.triple:
        call(builder, "WakeByAddressAll", ir.VoidType(), address)


@kernel
def wait_for_all(counters: int, thread: int, target: int) -> None:
    """Count this thread's arrival, then wait until there are `target` arrivals, and add the ticks that it took to the
    thread's line of the counters. The count is never reset.

    Sleeping frees the core for the thread that the others wait for. With other programs running, the system puts two
    threads on one core and leaves them there. They should then take turns at once: with one other program, two threads
    that always spun for 0.1 ms and napped for 20 us took 27 ms for a forward of 3.5 ms, these 7 ms (SmolLM2 on two
    cores of an AMD Zen 3). With sched_yield a single barrier took 6 ms.
    """
    arrivals, sleepers = counters + LINE * ARRIVALS, counters + LINE * SLEEPERS
    if fetch_add(arrivals, np.int64(1)) + 1 >= target:
        if read_shared(sleepers) > 0:
            wake_sleepers(arrivals)
        return
    own, arrived = counters + LINE * (THREADS + thread), ticks()
    spins, most = 0, max(read_i64(own + 8 * SPINS), _FEWEST_SPINS)
    while spins < most and read_shared(arrivals) < target:
        spins += 1
        pause()
    if spins < most:
        write_i64(own + 8 * SPINS, min(2 * most, _MOST_SPINS))
    else:
        write_i64(own + 8 * SPINS, _FEWEST_SPINS)
        fetch_add(sleepers, np.int64(1))  # before the count is read again: whoever arrives last sees one of the two
        seen = read_shared(arrivals)
        while seen < target:
            sleep_while(arrivals, seen)
            seen = read_shared(arrivals)
        fetch_add(sleepers, np.int64(-1))
    write_i64(own + 8 * WAIT_TICKS, read_i64(own + 8 * WAIT_TICKS) + ticks() - arrived)


@kernel
def spin_for_next(counter: int, beyond: int) -> None:
    """Spin, 0.5 ms at most, until there are more than `beyond` arrivals: a sleeping thread takes 0.1 ms to wake up.

    To read the first 8 MB of the next plan's weights meanwhile gained nothing: 0.96 to 1.03 of the tokens per second,
    plain and with one draft (SmolLM2, AMD Zen 3).
    """
    spins = 0
    while read_shared(counter) <= beyond and spins < _SPINS_FOR_NEXT:
        spins += 1
        pause()


# Shares of a step's units: fixed, claimed one after the other from one counter, or claimed first from a thread's own.


@kernel
def first_unit(units: int, thread: int, threads: int) -> int:
    """The first unit of a thread's equal share of `units`. The share ends where the next thread's begins."""
    return units * thread // threads


@kernel
def claim(counter: int, size: int) -> Any:
    """Claim the next `size` units of a step, and return the number of the first one. Faster cores claim more often."""
    return fetch_add(counter, np.int64(size))


_FROM_FRONT = np.int64(2**32 - 1)
"""Bits of a counter of `claim_part` that count the units claimed from the front of a share; the upper ones count those
from its end."""


@kernel
def claim_part(claims: int, units: int, thread: int, threads: int) -> tuple[int, int]:
    """Claim a part of a step's units; returns (start, stop), with start == stop if none is left.

    A thread claims its equal share from front to end, and when nothing of it is left, units from the end of another
    thread's (work stealing; Blumofe and Leiserson, 1999). So it reads the weights of its share as one stream, and a
    thread that is stopped keeps the others waiting for one part. A part is a quarter of what is left of the share.

    Parts that all threads claim from one counter, each of half their share of what is left (factoring), break the
    stream: the prefetches at a part's end are for another thread, and the next part begins without any. In matrices of
    36 tiles, six times for each thread: forwards of 1 to 3 rows took 1.06 to 1.07 times as long (SmolLM2, AMD Zen 3).

    Args:
        claims: address of the first thread's counter, LINE bytes before the next one's.
        units: number of units, less than 2**32.
        thread, threads: number of this thread, and how many take part.
    """
    for turn in range(threads):
        owner = (thread + turn) % threads
        counter = claims + LINE * owner
        start, stop = first_unit(units, owner, threads), first_unit(units, owner + 1, threads)
        claimed = read_shared(counter)
        left = stop - start - (claimed & _FROM_FRONT) - (claimed >> 32)
        if left > 0:
            size = (left + 3) // 4
            claimed = fetch_add(counter, size if turn == 0 else size << 32)
            start, stop = start + (claimed & _FROM_FRONT), stop - (claimed >> 32)
            if start < stop:  # others may have claimed units since the counter was read
                return (start, min(start + size, stop)) if turn == 0 else (max(start, stop - size), stop)
    return units, units
