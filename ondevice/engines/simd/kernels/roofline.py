"""Kernels for `simd.roofline`, which measures a machine's limits: one reads memory, one computes dot products only."""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types

from ondevice.engines.simd.kernels.contract.entries import CHAINS, LINE, VECTORS
from ondevice.engines.simd.kernels.contract.instruction_sets import AVX2, GENERIC, NEON, instruction_set
from ondevice.engines.simd.kernels.isa.dot import Vectors, accumulate, add_dots
from ondevice.engines.simd.kernels.isa.jit import emits
from ondevice.engines.simd.kernels.isa.memory import write_f32
from ondevice.engines.simd.kernels.isa.vector import (
    I8,
    I32,
    I64,
    L1_ONLY,
    L2,
    constant,
    element,
    full,
    load,
    pointer_to,
    prefetch,
    splat,
    sum_lanes,
)
from ondevice.native.functions import kernel

NUMBERS = CHAINS if instruction_set() in (AVX2, NEON, GENERIC) else 2
"""Vectors of activations that `dots` multiplies in a turn: with sets that take several instructions for a dot product
and its addition to a sum, one for each sum."""


@kernel
def read(data: int, size: int, far: int, near: int, out: int) -> None:
    """Write the sum of float32[size / 4] at an address. What matters is the time that it takes to read them.

    size : bytes, a multiple of 256
    far, near : distances in bytes to what is prefetched into level 2, and into level 1 alone; with 0, the CPU finds out
        what is read next
    out : address of a float32
    """
    a = full(np.float32(0.0))
    b, c, d = a, a, a
    for at in range(data, data + size, 256):
        _prefetch_four_lines(at + far, at + near)
        a, b, c, d = a + load(at), b + load(at + 64), c + load(at + 128), d + load(at + 192)
    write_f32(out, sum_lanes((a + b) + (c + d)))


@emits(types.void, types.int64, types.int64)
def _prefetch_four_lines(builder: Any, far: Any, near: Any) -> None:
    """Prefetch 256 bytes into level 2, and others into level 1 alone, as weights are (`tiles`)."""
    for offset in range(0, 256, LINE):
        prefetch(builder, pointer_to(builder, far), offset, L2)
        prefetch(builder, pointer_to(builder, near), offset, L1_ONLY)


@kernel
def dots(count: int, out: int) -> None:
    """Compute `count` times VECTORS dot products in each of CHAINS sums.

    out : address of VECTORS vectors as wide as this CPU's, of bytes 0..15, as 4-bit weights are. In turn t of `count`,
        chain c multiplies each group of four bytes with those of the int32 t + c % NUMBERS. The int32 sums over all are
        written there.
    """
    _dot_chains(count, out)


@emits(types.void, types.int64, types.int64)
def _dot_chains(builder: Any, count: Any, out: Any) -> None:
    """Emit the loop.

    Where a product is not added to a sum by the same instruction, every product has other numbers: those that repeat,
    LLVM computes once (with AVX2 the peak was then read as four times what it is). Elsewhere they are two: twelve do
    not fit in registers beside weights and sums, and an Intel Xeon of 2024 reached 0.92 of what it does with two.
    """
    isa = instruction_set()
    kind, size = ir.VectorType(I32, isa.lanes), 4 * isa.lanes
    places = [element(builder, out, I64(vector), size) for vector in range(VECTORS)]
    codes = [builder.load(place, typ=ir.VectorType(I8, size), align=4) for place in places]
    together = VECTORS if isa in (AVX2, NEON) else 1  # those add products in 16 bits; others wait for the sum before

    def step(turn: Any, sums: Vectors) -> Vectors:
        numbers = [builder.add(builder.trunc(turn, I32), I32(number)) for number in range(NUMBERS)]
        repeated = [builder.bitcast(splat(builder, number, isa.lanes), codes[0].type) for number in numbers]
        activations = [repeated[chain % NUMBERS] for chain in range(CHAINS)]
        totals = sums
        for first in range(0, VECTORS, together):
            own = codes[first : first + together]
            totals = [
                add_dots(builder, isa, 4, total, own, [each] * together)
                for total, each in zip(totals, activations, strict=True)
            ]
        return totals

    total, *others = accumulate(builder, count, [constant(0, kind)] * CHAINS, step)
    for new in others:
        total = builder.add(total, new)
    builder.store(total, places[0], align=4)
