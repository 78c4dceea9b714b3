"""Scalars at addresses, and the atomics that threads meet on."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types

from ondevice.engines.simd.kernels.jit import intrinsic
from ondevice.engines.simd.kernels.vector import F32, I16, I32, I64, POINTER, call, widen_half


@intrinsic
def read_f32(typing: Any, address: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.load(builder.inttoptr(args[0], POINTER), typ=F32, align=4)

    return types.float32(types.int64), generate


@intrinsic
def read_half(typing: Any, address: Any) -> Any:
    """An fp16 number, as a float32."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        bits = builder.load(builder.inttoptr(args[0], POINTER), typ=ir.VectorType(I16, 1), align=2)
        return builder.extract_element(widen_half(builder, bits), I32(0))

    return types.float32(types.int64), generate


@intrinsic
def write_f32(typing: Any, address: Any, value: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        builder.store(args[1], builder.inttoptr(args[0], POINTER), align=4)
        return context.get_dummy_value()

    return types.void(types.int64, types.float32), generate


@intrinsic
def write_i32(typing: Any, address: Any, value: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        builder.store(args[1], builder.inttoptr(args[0], POINTER), align=4)
        return context.get_dummy_value()

    return types.void(types.int64, types.int32), generate


@intrinsic
def read_i64(typing: Any, address: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.load(builder.inttoptr(args[0], POINTER), typ=I64, align=8)

    return types.int64(types.int64), generate


@intrinsic
def write_i64(typing: Any, address: Any, value: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        builder.store(args[1], builder.inttoptr(args[0], POINTER), align=8)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate


@intrinsic
def float_bits(typing: Any, value: Any) -> Any:
    """The bits of a float32."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], I32)

    return types.int32(types.float32), generate


@intrinsic
def bits_float(typing: Any, value: Any) -> Any:
    """The float32 of these bits."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], F32)

    return types.float32(types.int32), generate


@intrinsic
def fetch_add(typing: Any, address: Any, value: Any) -> Any:
    """Add to a shared int64 and return what it was; all earlier writes of this thread become visible with it."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.atomic_rmw("add", builder.inttoptr(args[0], POINTER), args[1], "acq_rel")

    return types.int64(types.int64, types.int64), generate


@intrinsic
def read_shared(typing: Any, address: Any) -> Any:
    """Read a shared int64; what its writer wrote before is visible afterwards."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.load_atomic(builder.inttoptr(args[0], POINTER), "acquire", 8, typ=I64)

    return types.int64(types.int64), generate


@intrinsic
def pause(typing: Any) -> Any:
    """Tell the core that this is a spin loop."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        triple = builder.module.triple
        if triple.startswith("x86_64"):
            call(builder, "llvm.x86.sse2.pause", ir.VoidType())
        elif triple.startswith(("aarch64", "arm64")):
            call(builder, "llvm.aarch64.hint", ir.VoidType(), I32(1))
        return context.get_dummy_value()

    return types.void(), generate
