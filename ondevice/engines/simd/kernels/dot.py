"""Dot products of four 8-bit numbers per 32-bit lane, with the instructions of each instruction set. All are exact."""

from __future__ import annotations

from typing import Any

from llvmlite import ir

from ondevice.engines.simd.kernels.instruction_set import (
    AVX2,
    AVX512_VNNI,
    AVX_VNNI,
    NEON,
    NEON_DOTPROD,
    InstructionSet,
)
from ondevice.engines.simd.kernels.vector import I16, I32, call, constant


def dot4(builder: Any, isa: InstructionSet, bits: int, total: Any, weights: Any, activations: Any) -> Any:
    """total[i] + sum over j < 4 of weights[4i + j] * activations[4i + j], as <n x i32>.

    Args:
        isa: the instruction set; `isa.signed` says whether bytes of `weights` are signed.
        bits: 4 where `weights` are 0..15, else 8.
        total: <n x i32>.
        weights: <4n x i8>.
        activations: <4n x i8>, -127..127.
    """
    if isa in (AVX512_VNNI, AVX_VNNI):
        width = 32 * isa.lanes
        return call(builder, f"llvm.x86.avx512.vpdpbusd.{width}", total.type, total, weights, activations)
    if isa == NEON_DOTPROD:
        return call(builder, "llvm.aarch64.neon.sdot.v4i32.v16i8", total.type, total, weights, activations)
    if isa == AVX2:
        return _avx2(builder, bits, total, weights, activations)
    if isa == NEON:
        return _neon(builder, total, weights, activations)
    return _generic(builder, total, weights, activations)


def _avx2(builder: Any, bits: int, total: Any, weights: Any, activations: Any) -> Any:
    """|w| * (a with the sign of w), unsigned times signed; a pair sums to at most 2 * 128 * 127, which 16 bits hold."""
    if bits == 8:
        activations = call(builder, "llvm.x86.avx2.psign.b", weights.type, activations, weights)
        weights = call(builder, "llvm.abs.v32i8", weights.type, weights, ir.Constant(ir.IntType(1), 0))
    pairs = call(builder, "llvm.x86.avx2.pmadd.ub.sw", ir.VectorType(I16, 16), weights, activations)
    ones = constant(1, pairs.type)
    return builder.add(total, call(builder, "llvm.x86.avx2.pmadd.wd", total.type, pairs, ones))


def _neon(builder: Any, total: Any, weights: Any, activations: Any) -> Any:
    """Products in 16 bits, whose pairs are added twice."""
    quarters = []
    for part in range(2):
        half = ir.Constant(ir.VectorType(I32, 8), list(range(8 * part, 8 * part + 8)))
        wide = [
            builder.sext(builder.shuffle_vector(value, value, half), ir.VectorType(I16, 8))
            for value in (weights, activations)
        ]
        quarters.append(call(builder, "llvm.aarch64.neon.saddlp.v4i32.v8i16", total.type, builder.mul(*wide)))
    return builder.add(total, call(builder, "llvm.aarch64.neon.addp.v4i32", total.type, *quarters))


def _generic(builder: Any, total: Any, weights: Any, activations: Any) -> Any:
    """One byte of every lane after the other, in 32 bits: for any CPU."""
    wide = [builder.bitcast(value, total.type) for value in (weights, activations)]
    for byte in range(4):
        left, right = constant(24 - 8 * byte, total.type), constant(24, total.type)
        w, a = (builder.ashr(builder.shl(value, left), right) for value in wide)
        total = builder.add(total, builder.mul(w, a))
    return total
