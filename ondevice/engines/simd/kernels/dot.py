"""Dot products of four 8-bit numbers per 32-bit lane, with the instructions of each instruction set. All are exact."""

from __future__ import annotations

from collections.abc import Sequence
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
from ondevice.engines.simd.kernels.vector import I8, I16, I32, call, constant, read, splat


def add_dots(
    builder: Any, isa: InstructionSet, bits: int, total: Any, weights: Sequence[Any], activations: Sequence[Any]
) -> Any:
    """total[i] + sum over v and j < 4 of weights[v][4i + j] * activations[v][4i + j], as <n x i32>.

    Args:
        isa: the instruction set; `isa.signed` says whether bytes of `weights` are signed.
        bits: fewer than 8 where `weights` are 0..15.
        total: <n x i32>.
        weights: vectors <4n x i8>, up to eight.
        activations: as many <4n x i8>, -127..127.
    """
    if isa == NEON:
        return _neon(builder, bits, total, weights, activations)
    for w, a in zip(weights, activations, strict=True):
        total = _dot4(builder, isa, bits, total, w, a)
    return total


def add_whole_dots(
    builder: Any, isa: InstructionSet, bits: int, total: Any, weights: Sequence[Any], activations: Sequence[Any]
) -> Any:
    """`add_dots` of activations -128..127; weights of 2 bits may be up to 12, and of 4 bits up to 15, where signed."""
    if isa == AVX2:
        if bits == 8:
            for w, a in zip(weights, activations, strict=True):
                total = _avx2_wide(builder, total, w, a)
            return total
        # a pair is at most 2 * 15 * 128, and eight of them fit in 16 bits
        pairs = None
        for w, a in zip(weights, activations, strict=True):
            own = call(builder, "llvm.x86.avx2.pmadd.ub.sw", ir.VectorType(I16, 16), w, a)
            pairs = own if pairs is None else builder.add(pairs, own)
        return builder.add(total, _add_words(builder, total.type, pairs))
    if isa == NEON and bits == 8:
        for w, a in zip(weights, activations, strict=True):  # two products of -128 do not fit in 16 bits
            halves = [_add_pairs(builder, total.type, _chain(builder, half, [w], [a])) for half in range(2)]
            total = builder.add(total, call(builder, "llvm.aarch64.neon.addp.v4i32", total.type, *halves))
        return total
    return add_dots(builder, isa, bits, total, weights, activations)


def groups_of_four(builder: Any, isa: InstructionSet, base: Any, offset: int) -> list[Any]:
    """The eight groups of four among 32 bytes, `offset` behind a pointer, each in all lanes of a vector of bytes.

    x86 repeats what it loads at no cost. ARM does not, but it takes one lane of a vector as an operand.
    """
    if isa.by_lane:
        kind = ir.VectorType(I32, 4)
        halves = [read(builder, base, kind, offset + at) for at in (0, 16)]
        groups = [
            builder.shuffle_vector(half, half, ir.Constant(kind, [lane] * 4)) for half in halves for lane in range(4)
        ]
    else:
        groups = [splat(builder, read(builder, base, I32, offset + 4 * j), isa.lanes) for j in range(8)]
    return [builder.bitcast(group, ir.VectorType(I8, 4 * isa.lanes)) for group in groups]


def _dot4(builder: Any, isa: InstructionSet, bits: int, total: Any, weights: Any, activations: Any) -> Any:
    """total[i] + sum over j < 4 of weights[4i + j] * activations[4i + j]."""
    if isa in (AVX512_VNNI, AVX_VNNI):
        width = 32 * isa.lanes
        return call(builder, f"llvm.x86.avx512.vpdpbusd.{width}", total.type, total, weights, activations)
    if isa == NEON_DOTPROD:
        return call(builder, "llvm.aarch64.neon.sdot.v4i32.v16i8", total.type, total, weights, activations)
    if isa == AVX2:
        return _avx2(builder, bits, total, weights, activations)
    return _generic(builder, total, weights, activations)


def _avx2(builder: Any, bits: int, total: Any, weights: Any, activations: Any) -> Any:
    """|w| * (a with the sign of w), unsigned times signed; a pair sums to at most 2 * 128 * 127, which 16 bits hold."""
    if bits == 8:
        activations = call(builder, "llvm.x86.avx2.psign.b", weights.type, activations, weights)
        weights = call(builder, "llvm.abs.v32i8", weights.type, weights, ir.Constant(ir.IntType(1), 0))
    pairs = call(builder, "llvm.x86.avx2.pmadd.ub.sw", ir.VectorType(I16, 16), weights, activations)
    return builder.add(total, _add_words(builder, total.type, pairs))


def _add_words(builder: Any, kind: Any, words: Any) -> Any:
    return call(builder, "llvm.x86.avx2.pmadd.wd", kind, words, constant(1, words.type))


def _avx2_wide(builder: Any, total: Any, weights: Any, activations: Any) -> Any:
    """Bytes with a sign, the even and the odd ones as words: for products that `_avx2` has no room for."""
    words, eight = ir.VectorType(I16, 16), constant(8, ir.VectorType(I16, 16))
    w, a = (builder.bitcast(value, words) for value in (weights, activations))
    even = [builder.ashr(builder.shl(value, eight), eight) for value in (w, a)]
    odd = [builder.ashr(value, eight) for value in (w, a)]
    for pair in (even, odd):
        total = builder.add(total, call(builder, "llvm.x86.avx2.pmadd.wd", total.type, *pair))
    return total


def _neon(builder: Any, bits: int, total: Any, weights: Sequence[Any], activations: Sequence[Any]) -> Any:
    """As many products as 16 bits hold are added there: eight of 4 bits, 8 * 15 * 127, and two of 8, 2 * 128 * 127."""
    if bits < 8:
        low, high = (_chain(builder, half, weights, activations) for half in range(2))
        pairs = call(builder, "llvm.aarch64.neon.addp.v8i16", low.type, low, high)  # 30,480 at most
        return builder.add(total, _add_pairs(builder, total.type, pairs))
    wide: list[Any] = [None, None]
    for first in range(0, len(weights), 2):
        for half in range(2):
            chain = _chain(builder, half, weights[first : first + 2], activations[first : first + 2])
            pairs = _add_pairs(builder, total.type, chain)
            wide[half] = pairs if wide[half] is None else builder.add(wide[half], pairs)
    return builder.add(total, call(builder, "llvm.aarch64.neon.addp.v4i32", total.type, *wide))


def _chain(builder: Any, half: int, weights: Sequence[Any], activations: Sequence[Any]) -> Any:
    """Products of the low or high eight bytes of all vectors, added in 16 bits: one instruction for each vector."""
    bytes8 = ir.Constant(ir.VectorType(I32, 8), list(range(8 * half, 8 * half + 8)))
    total = None
    for pair in zip(weights, activations, strict=True):
        halves = [builder.shuffle_vector(value, value, bytes8) for value in pair]
        product = call(builder, "llvm.aarch64.neon.smull.v8i16", ir.VectorType(I16, 8), *halves)
        total = product if total is None else builder.add(total, product)
    return total


def _add_pairs(builder: Any, kind: Any, halves: Any) -> Any:
    return call(builder, "llvm.aarch64.neon.saddlp.v4i32.v8i16", kind, halves)


def _generic(builder: Any, total: Any, weights: Any, activations: Any) -> Any:
    """One byte of every lane after the other, in 32 bits: for any CPU."""
    wide = [builder.bitcast(value, total.type) for value in (weights, activations)]
    for byte in range(4):
        left, right = constant(24 - 8 * byte, total.type), constant(24, total.type)
        w, a = (builder.ashr(builder.shl(value, left), right) for value in wide)
        total = builder.add(total, builder.mul(w, a))
    return total
