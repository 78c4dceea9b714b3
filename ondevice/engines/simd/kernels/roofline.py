"""Kernels that measure the limits of a machine: one reads memory, one does nothing but dot products."""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types

from ondevice.engines.simd.kernels import instruction_set
from ondevice.engines.simd.kernels.dot import add_dots
from ondevice.engines.simd.kernels.jit import emits, kernel
from ondevice.engines.simd.kernels.loop import Vectors, accumulate
from ondevice.engines.simd.kernels.vector import I8, I32, constant, full, load, pointer_to, sum_lanes

CHAINS = 12
"""Independent sums: more than any CPU has dot products in flight."""


@kernel
def read(data: int, size: int) -> Any:
    """The sum of float32[size / 4] at an address, for the time that reading takes; `size` is a multiple of 256."""
    a = full(np.float32(0.0))
    b, c, d = a, a, a
    for at in range(data, data + size, 256):
        a, b, c, d = a + load(at), b + load(at + 64), c + load(at + 128), d + load(at + 192)
    return sum_lanes((a + b) + (c + d))


@kernel
def dots(count: int, out: int) -> None:
    """`count` dot products in each of CHAINS sums.

    out : address of a vector of this CPU, in bytes what is multiplied with itself, afterwards the int32 sums
    """
    _dot_chains(count, out)


@emits(types.void, types.int64, types.int64)
def _dot_chains(builder: Any, count: Any, out: Any) -> None:
    isa = instruction_set.current()
    kind = ir.VectorType(I32, isa.lanes)
    pointer = pointer_to(builder, out)
    codes = builder.load(pointer, typ=ir.VectorType(I8, 4 * isa.lanes), align=4)

    def step(index: Any, sums: Vectors) -> Vectors:
        return [add_dots(builder, isa, 4, total, [codes], [codes]) for total in sums]

    total, *others = accumulate(builder, count, [constant(0, kind)] * CHAINS, step)
    for new in others:
        total = builder.add(total, new)
    builder.store(total, pointer, align=4)
