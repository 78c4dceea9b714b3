"""Dot products of four 8-bit numbers per 32-bit lane, with the instructions of each instruction set. All are exact.

The functions emit LLVM code; they are called by the emitters of products in `tiles` and `attention`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from llvmlite import ir

from ondevice.engines.simd.kernels.contract.instruction_sets import (
    AVX2,
    AVX512_VNNI,
    AVX_VNNI,
    NEON,
    NEON_DOTPROD,
    NEON_I8MM,
    InstructionSet,
)
from ondevice.engines.simd.kernels.isa.vector import I8, I16, I32, I64, call, constant, read, splat


def add_dots(
    builder: Any, isa: InstructionSet, bits: int, total: Any, weights: Sequence[Any], activations: Sequence[Any]
) -> Any:
    """total[i] + sum over v and j < 4 of weights[v][4i + j] * activations[v][4i + j], as <n x i32>.

    Args:
        isa: the instruction set; `isa.signed` says whether the bytes of `weights` are signed.
        bits: bits of a weight; with fewer than 8, `weights` are 0..15.
        total: <n x i32>, or a sum of `first_dots`.
        weights: up to eight vectors <4n x i8>.
        activations: as many vectors <4n x i8>, of -127..127.
    """
    if isa == NEON:
        return _neon(builder, bits, total, weights, activations)
    if isa == AVX2 and bits < 8:
        return _avx2_narrow(builder, total, weights, activations)
    for w, a in zip(weights, activations, strict=True):
        total = _dot4(builder, isa, total, w, a)
    return total


def first_dots(isa: InstructionSet, bits: int, start: Any) -> Any:
    """The sum before the first products of a block that `add_dots` adds in several calls; `last_dots` is its end.

    It is `start`, <n x i32>; or, where products of a whole block are added in 16 bits, zeros <2n x i16>.
    """
    return constant(0, ir.VectorType(I16, 2 * isa.lanes)) if isa == AVX2 and bits < 8 else start


def last_dots(builder: Any, total: Any, start: Any) -> Any:
    """`start` and the products that have been added to a sum of `first_dots`, <n x i32>."""
    return total if total.type == start.type else builder.add(start, _add_words(builder, start.type, total))


def keep_order(builder: Any, vectors: list[Any], *, loads: bool = False) -> list[Any]:
    """The same x86 vectors, whose values LLVM must have computed here, before what follows: an empty inline assembly
    that reads and writes them. With `loads`, later loads follow too: it may write memory.
    """
    kinds = [vector.type for vector in vectors]
    both = ",".join(["=x"] * len(kinds) + [str(place) for place in range(len(kinds))] + ["~{memory}"] * loads)
    result = kinds[0] if len(kinds) == 1 else ir.LiteralStructType(kinds)
    made = builder.call(ir.InlineAsm(ir.FunctionType(result, kinds), "", both, side_effect=True), vectors)
    return [made] if len(kinds) == 1 else [builder.extract_value(made, place) for place in range(len(kinds))]


def add_whole_dots(
    builder: Any, isa: InstructionSet, bits: int, total: Any, weights: Sequence[Any], activations: Sequence[Any]
) -> Any:
    """`add_dots` for activations -128..127. If bytes are signed, weights of 2 bits are at most 12, of 4 bits at most
    15.
    """
    if isa == AVX2 and bits == 8:
        for w, a in zip(weights, activations, strict=True):
            total = _avx2_wide(builder, total, w, a)
        return total
    if isa == NEON and bits == 8:
        for w, a in zip(weights, activations, strict=True):  # two products of -128 do not fit in 16 bits
            halves = [_add_pairs(builder, total.type, _chain(builder, half, [w], [a])) for half in range(2)]
            total = builder.add(total, call(builder, "llvm.aarch64.neon.addp.v4i32", total.type, *halves))
        return total
    return add_dots(builder, isa, bits, total, weights, activations)


def groups_of_four(
    builder: Any, isa: InstructionSet, base: Any, offset: int, chosen: Iterable[int] = range(8)
) -> list[Any]:
    """Groups of four bytes of 32 bytes at `offset` from a pointer, each repeated in all 32-bit lanes of a vector.

    On x86 a load can repeat a group at no cost. On ARM a dot product can take one lane of a vector as its operand.
    """
    if isa.by_lane:
        kind = ir.VectorType(I32, 4)
        halves = [read(builder, base, kind, offset + at) for at in (0, 16)]
        groups = [
            builder.shuffle_vector(halves[j // 4], halves[j // 4], ir.Constant(kind, [j % 4] * 4)) for j in chosen
        ]
    else:
        groups = [splat(builder, read(builder, base, I32, offset + 4 * j), isa.lanes) for j in chosen]
    return [builder.bitcast(group, ir.VectorType(I8, 4 * isa.lanes)) for group in groups]


def three_words(builder: Any, isa: InstructionSet, base: Any, offset: int) -> list[Any]:
    """The three int32 at `offset` bytes from a pointer, each repeated in all lanes of a vector.

    On ARM one load of 16 bytes that end with them serves all three, and an FMA can take one lane as its operand.
    """
    kind = ir.VectorType(I32, isa.lanes)
    if isa.by_lane:
        words = read(builder, base, kind, offset - 4)
        return [builder.shuffle_vector(words, words, ir.Constant(kind, [lane] * 4)) for lane in (1, 2, 3)]
    return [splat(builder, read(builder, base, I32, offset + at), isa.lanes) for at in (0, 4, 8)]


def vectors_of_a_pass(isa: InstructionSet, rows: int) -> int:
    """Vectors of output rows that a pass over a tile computes; about four sums are then computed at a time.

    Each addition to a sum waits for the one before, so a single sum is slow; and several vectors share the loads of
    activations. On ARM, one row takes 0.95 (Cortex-A76) and 0.80 (A72) of the cycles of four passes, two rows 0.97 and
    0.89. More sums would need more registers than the weights leave. x86 has 16 registers without AVX-512.
    """
    return max(1, 4 // rows) if isa.by_lane else 1


def multiply_pairs(builder: Any, total: Any, weights: Any, activations: Any) -> Any:
    """total[2i + j] + sum over k < 8 of weights[8i + k] * activations[8j + k], as <4 x i32>, for i and j of 0 and 1.

    Args:
        total: <4 x i32>.
        weights, activations: <16 x i8>, two rows of eight signed bytes.
    """
    return call(builder, "llvm.aarch64.neon.smmla.v4i32.v16i8", total.type, total, weights, activations)


def interleaved(builder: Any, a: Any, b: Any) -> tuple[Any, Any]:
    """The 32-bit lanes a0 b0 a1 b1 and a2 b2 a3 b3 of two vectors of 128 bits."""
    words = ir.VectorType(I32, 4)
    x, y = (builder.bitcast(each, words) for each in (a, b))
    low, high = (builder.shuffle_vector(x, y, ir.Constant(words, lanes)) for lanes in ([0, 4, 1, 5], [2, 6, 3, 7]))
    return builder.bitcast(low, a.type), builder.bitcast(high, a.type)


def separated(builder: Any, low: Any, high: Any) -> tuple[Any, Any]:
    """The vectors a and b of which `interleaved` makes low and high, four lanes of 32 bits each."""
    even, odd = (ir.Constant(ir.VectorType(I32, 4), lanes) for lanes in ([0, 2, 4, 6], [1, 3, 5, 7]))
    return builder.shuffle_vector(low, high, even), builder.shuffle_vector(low, high, odd)


def _dot4(builder: Any, isa: InstructionSet, total: Any, weights: Any, activations: Any) -> Any:
    """total[i] + sum over j < 4 of weights[4i + j] * activations[4i + j]."""
    if isa in (AVX512_VNNI, AVX_VNNI):
        width = 32 * isa.lanes
        return call(builder, f"llvm.x86.avx512.vpdpbusd.{width}", total.type, total, weights, activations)
    if isa in (NEON_DOTPROD, NEON_I8MM):
        return call(builder, "llvm.aarch64.neon.sdot.v4i32.v16i8", total.type, total, weights, activations)
    if isa == AVX2:
        return _avx2(builder, total, weights, activations)
    return _generic(builder, total, weights, activations)


def _avx2(builder: Any, total: Any, weights: Any, activations: Any) -> Any:
    """|w| * (a with the sign of w), unsigned times signed. A pair is at most 2 * 128 * 127, which fits in 16 bits."""
    activations = call(builder, "llvm.x86.avx2.psign.b", weights.type, activations, weights)
    weights = call(builder, "llvm.abs.v32i8", weights.type, weights, ir.Constant(ir.IntType(1), 0))
    return builder.add(total, _add_words(builder, total.type, _multiply_bytes(builder, weights, activations)))


def _avx2_narrow(builder: Any, total: Any, weights: Sequence[Any], activations: Sequence[Any]) -> Any:
    """Weights 0..15: up to eight pairs of products are added in 16 bits, 8 * 2 * 15 * 128 at most."""
    pairs = [_multiply_bytes(builder, w, a) for w, a in zip(weights, activations, strict=True)]
    words = functools.reduce(builder.add, pairs)
    return builder.add(total, words if total.type == words.type else _add_words(builder, total.type, words))


def _multiply_bytes(builder: Any, unsigned: Any, signed: Any) -> Any:
    """Sums of two neighbouring products of bytes, in 16 bits."""
    return call(builder, "llvm.x86.avx2.pmadd.ub.sw", ir.VectorType(I16, 16), unsigned, signed)


def _add_words(builder: Any, kind: Any, words: Any) -> Any:
    return call(builder, "llvm.x86.avx2.pmadd.wd", kind, words, constant(1, words.type))


def _avx2_wide(builder: Any, total: Any, weights: Any, activations: Any) -> Any:
    """Signed bytes, even and odd ones widened to 16 bits: for products whose pairs do not fit in the 16 bits of
    `_avx2`.
    """
    words, eight = ir.VectorType(I16, 16), constant(8, ir.VectorType(I16, 16))
    w, a = (builder.bitcast(value, words) for value in (weights, activations))
    even = [builder.ashr(builder.shl(value, eight), eight) for value in (w, a)]
    odd = [builder.ashr(value, eight) for value in (w, a)]
    for pair in (even, odd):
        total = builder.add(total, call(builder, "llvm.x86.avx2.pmadd.wd", total.type, *pair))
    return total


def _neon(builder: Any, bits: int, total: Any, weights: Sequence[Any], activations: Sequence[Any]) -> Any:
    """Products are added in 16 bits while they fit: eight with 4-bit weights, 8 * 15 * 127; two of 8 bits, 2 * 128 *
    127.
    """
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
    """Products of the low (half 0) or high eight bytes of all vectors, added in 16 bits: one instruction per vector."""
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
    """Byte after byte of every lane, in 32 bits: for any CPU."""
    wide = [builder.bitcast(value, total.type) for value in (weights, activations)]
    for byte in range(4):
        left, right = constant(24 - 8 * byte, total.type), constant(24, total.type)
        w, a = (builder.ashr(builder.shl(value, left), right) for value in wide)
        total = builder.add(total, builder.mul(w, a))
    return total


def emit_cases(builder: Any, value: Any, choices: Sequence[int], emit: Callable[[int], None]) -> None:
    """Emit code for each choice, and a switch over an i64 that is one of them at run time.

    Args:
        builder: at the end of a basic block; afterwards at the end of the block after the switch.
        value: the choice.
        choices: all that `value` can be.
        emit: emits the code of a choice.
    """
    cases = [builder.append_basic_block(f"case{choice}") for choice in choices]
    after = builder.append_basic_block("after")
    switch = builder.switch(value, cases[-1])
    for choice, case in zip(choices, cases, strict=True):
        if case is not cases[-1]:
            switch.add_case(I64(choice), case)
        builder.position_at_end(case)
        emit(choice)
        builder.branch(after)
    builder.position_at_end(after)


Vectors = list[Any]
"""LLVM values of vector type."""


def accumulate(builder: Any, count: Any, sums: Vectors, step: Callable[[Any, Vectors], Vectors]) -> Vectors:
    """Emit a loop whose sums stay in registers, and return their values after it.

    Args:
        builder: at the end of a basic block; afterwards at the end of the block after the loop.
        count: i64, number of iterations, at least 1.
        sums: values before the loop.
        step: emits the body: takes the index, 0..count - 1, and the sums before it, and returns the sums after it.
    """
    before, loop, after = builder.block, builder.append_basic_block("step"), builder.append_basic_block("done")
    builder.branch(loop)
    builder.position_at_end(loop)
    index = builder.phi(I64)
    carried = [builder.phi(total.type) for total in sums]
    results = step(index, carried)
    next_index, last = builder.add(index, I64(1)), builder.block  # the body may have loops of its own
    for phi, first, new in zip([index, *carried], [I64(0), *sums], [next_index, *results], strict=True):
        phi.add_incoming(first, before)
        phi.add_incoming(new, last)
    builder.cbranch(builder.icmp_signed("<", next_index, count), loop, after)
    builder.position_at_end(after)
    return results
