"""Kernels for `simd.roofline`, which measures a machine's limits: one reads memory, one computes dot products only."""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types

from ondevice.engines.simd.kernels.contract.entries import CHAINS, LINE, VECTORS
from ondevice.engines.simd.kernels.contract.instruction_sets import AVX2, NEON, instruction_set
from ondevice.engines.simd.kernels.isa.dot import Vectors, accumulate, add_dots
from ondevice.engines.simd.kernels.isa.jit import emits
from ondevice.engines.simd.kernels.isa.memory import write_f32
from ondevice.engines.simd.kernels.isa.vector import (
    I8,
    I32,
    I64,
    L1_ONLY,
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


@kernel
def read(data: int, size: int, ahead: int, out: int) -> None:
    """Write the sum of float32[size / 4] at an address. What matters is the time that it takes to read them.

    size : bytes, a multiple of 256
    ahead : distance in bytes to what is prefetched; with 0, the CPU alone finds out what is read next
    out : address of a float32
    """
    a = full(np.float32(0.0))
    b, c, d = a, a, a
    for at in range(data, data + size, 256):
        _prefetch_four_lines(at + ahead)
        a, b, c, d = a + load(at), b + load(at + 64), c + load(at + 128), d + load(at + 192)
    write_f32(out, sum_lanes((a + b) + (c + d)))


@emits(types.void, types.int64)
def _prefetch_four_lines(builder: Any, address: Any) -> None:
    """Prefetch 256 bytes into level 1 alone, as streamed weights are (`tiles`)."""
    for offset in range(0, 256, LINE):
        prefetch(builder, pointer_to(builder, address), offset, L1_ONLY)


@kernel
def dots(count: int, out: int) -> None:
    """Compute `count` times VECTORS dot products in each of CHAINS sums.

    out : address of VECTORS vectors as wide as this CPU's, of bytes 0..15, as 4-bit weights are. In turn t of `count`,
        chain c multiplies each group of four bytes with those of the int32 t + c. The int32 sums over all are written
        there.
    """
    _dot_chains(count, out)


@emits(types.void, types.int64, types.int64)
def _dot_chains(builder: Any, count: Any, out: Any) -> None:
    """Emit the loop. Every product has other numbers: those that repeat, LLVM computes once (with AVX2, whose products
    are not added to a sum by the same instruction, the peak was then read as four times what it is).
    """
    isa = instruction_set()
    kind, size = ir.VectorType(I32, isa.lanes), 4 * isa.lanes
    places = [element(builder, out, I64(vector), size) for vector in range(VECTORS)]
    codes = [builder.load(place, typ=ir.VectorType(I8, size), align=4) for place in places]
    together = VECTORS if isa in (AVX2, NEON) else 1  # those add products in 16 bits; others wait for the sum before

    def step(turn: Any, sums: Vectors) -> Vectors:
        numbers = [builder.add(builder.trunc(turn, I32), I32(chain)) for chain in range(CHAINS)]
        activations = [builder.bitcast(splat(builder, number, isa.lanes), codes[0].type) for number in numbers]
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
