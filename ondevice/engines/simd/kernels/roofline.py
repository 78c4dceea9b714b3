"""What a machine's limits are measured with: reading memory, and dot products alone."""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types

from ondevice.engines.simd.kernels import instruction_set
from ondevice.engines.simd.kernels.dot import dot4
from ondevice.engines.simd.kernels.jit import intrinsic, kernel
from ondevice.engines.simd.kernels.loop import Vectors, accumulate
from ondevice.engines.simd.kernels.vector import I8, I32, POINTER, constant, full, load, sum_lanes

CHAINS = 12
"""Independent sums: more than any CPU has dot products in flight."""


@kernel
def read(data: int, size: int) -> Any:
    """Read `size` bytes, a multiple of 256, at an address."""
    a = full(np.float32(0.0))
    b, c, d = a, a, a
    for at in range(data, data + size, 256):
        a, b, c, d = a + load(at), b + load(at + 64), c + load(at + 128), d + load(at + 192)
    return sum_lanes((a + b) + (c + d))


@kernel
def dots(count: int, out: int) -> None:
    """`count` dot products in each chain; `out` is the address of a vector: what is multiplied, then the sum."""
    _dot_chains(count, out)


@intrinsic
def _dot_chains(typing: Any, count: Any, out: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        isa = instruction_set.current()
        kind = ir.VectorType(I32, isa.lanes)
        pointer = builder.inttoptr(args[1], POINTER)
        codes = builder.load(pointer, typ=ir.VectorType(I8, 4 * isa.lanes), align=4)

        def step(index: Any, sums: Vectors) -> Vectors:
            return [dot4(builder, isa, 4, total, codes, codes) for total in sums]

        total, *others = accumulate(builder, args[0], [constant(0, kind)] * CHAINS, step)
        for new in others:
            total = builder.add(total, new)
        builder.store(total, pointer, align=4)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate
