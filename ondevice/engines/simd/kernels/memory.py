"""Intrinsics for scalars at addresses: loads and stores, bits of floats, and what the barrier of the threads needs.

Addresses are int64.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types

from ondevice.engines.simd.kernels.jit import emits
from ondevice.engines.simd.kernels.vector import F32, I8, I16, I32, I64, call, pointer_to, prefetch, widen_half


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


@emits(types.void, types.int64, types.int64)
def write_byte(builder: Any, address: Any, value: Any) -> None:
    """Store the lowest 8 bits of a number."""
    builder.store(builder.trunc(value, I8), pointer_to(builder, address), align=1)


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
    """Add to a shared int64 and return what it was before.

    Earlier writes of this thread become visible to one that reads the sum, and earlier ones of others to this thread.
    """
    return builder.atomic_rmw("add", pointer_to(builder, address), value, "acq_rel")


@emits(types.int64, types.int64)
def read_shared(builder: Any, address: Any) -> Any:
    """Read a shared int64; what its writer wrote before it is visible afterwards."""
    return builder.load_atomic(pointer_to(builder, address), "acquire", 8, typ=I64)


@emits(types.void, types.int64)
def prefetch_line(builder: Any, address: Any) -> None:
    """Ask for the cache line at an address, which need not be one that may be read."""
    prefetch(builder, pointer_to(builder, address))


@emits(types.void)
def pause(builder: Any) -> None:
    """Tell the core that this is a spin loop."""
    triple = builder.module.triple
    if triple.startswith("x86_64"):
        call(builder, "llvm.x86.sse2.pause", ir.VoidType())
    elif triple.startswith(("aarch64", "arm64")):
        call(builder, "llvm.aarch64.hint", ir.VoidType(), I32(1))


@emits(types.int64)
def ticks(builder: Any) -> Any:
    """A clock that costs a few nanoseconds, of a rate that nobody need know; 0 on processors where there is none."""
    triple = builder.module.triple
    if triple.startswith("x86_64"):
        return call(builder, "llvm.readcyclecounter", I64)
    if triple.startswith(("aarch64", "arm64")):
        # The cycle counter, which LLVM would read, is the system's own there. This clock is asked for by name, not in
        # assembly, for which numba's code generator has no parser: it ended the process.
        name = builder.module.add_metadata(["cntvct_el0"])
        return call(builder, "llvm.read_volatile_register.i64", I64, name)
    return I64(0)
