"""Kernels for `simd.roofline`, which measures a machine's limits: one reads memory, one computes dot products only."""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types

from ondevice.engines.simd.kernels.contract import CHAINS, instruction_set
from ondevice.engines.simd.kernels.isa.dot import Vectors, accumulate, add_dots
from ondevice.engines.simd.kernels.isa.jit import emits
from ondevice.engines.simd.kernels.isa.memory import write_f32
from ondevice.engines.simd.kernels.isa.vector import I8, I32, constant, full, load, pointer_to, sum_lanes
from ondevice.native.functions import kernel


@kernel
def read(data: int, size: int, out: int) -> None:
    """Write the sum of float32[size / 4] at an address. What matters is the time that it takes to read them.

    size : bytes, a multiple of 256
    out : address of a float32
    """
    a = full(np.float32(0.0))
    b, c, d = a, a, a
    for at in range(data, data + size, 256):
        a, b, c, d = a + load(at), b + load(at + 64), c + load(at + 128), d + load(at + 192)
    write_f32(out, sum_lanes((a + b) + (c + d)))


@kernel
def dots(count: int, out: int) -> None:
    """Compute `count` dot products in each of CHAINS sums.

    out : address of a vector as wide as this CPU's: int8 that are multiplied with themselves; the int32 sums are
        written there
    """
    _dot_chains(count, out)


@emits(types.void, types.int64, types.int64)
def _dot_chains(builder: Any, count: Any, out: Any) -> None:
    isa = instruction_set()
    kind = ir.VectorType(I32, isa.lanes)
    pointer = pointer_to(builder, out)
    codes = builder.load(pointer, typ=ir.VectorType(I8, 4 * isa.lanes), align=4)

    def step(index: Any, sums: Vectors) -> Vectors:
        return [add_dots(builder, isa, 4, total, [codes], [codes]) for total in sums]

    total, *others = accumulate(builder, count, [constant(0, kind)] * CHAINS, step)
    for new in others:
        total = builder.add(total, new)
    builder.store(total, pointer, align=4)
