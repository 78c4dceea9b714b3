"""Matrix product of a weight tile, of any width, times float32 rows: for matrices whose input is not quantised.

Weights of 2, 4 and 8 bits lie as the other products read them. A block of plain numbers is [32][16]: bfloat16 or
float32, k by k. The epilogue is that of `step_tile`. Sums are of even and of odd k, each in order, whatever the rows.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils

from ondevice.engines.simd.kernels import instruction_set
from ondevice.engines.simd.kernels.codes import SPLIT_CODES
from ondevice.engines.simd.kernels.instruction_set import InstructionSet
from ondevice.engines.simd.kernels.jit import LITERAL, emits
from ondevice.engines.simd.kernels.loop import Vectors, accumulate
from ondevice.engines.simd.kernels.sizes import BLOCK, TILE
from ondevice.engines.simd.kernels.step_tile import finish
from ondevice.engines.simd.kernels.tile import prefetch_weights
from ondevice.engines.simd.kernels.vector import F32, I16, I32, I64, constant, fused, pointer_to, read, splat

FLOAT_BITS = (2, 4, 8, 16, 32)
"""Widths of weights; 16 bits are bfloat16."""
FLOAT_ROWS = 4
"""Rows of a pass: their sums of even and odd k fit in registers."""


@emits(types.void, LITERAL, LITERAL, *[types.int64] * 6)
def float_product(
    builder: Any, bits: int, rows: int, weights: Any, epilogue: Any, x: Any, blocks: Any, out: Any, stride: Any
) -> None:
    """out[r, n] = the epilogue of the sum over k of w[n, k] * x[r, k].

    Args:
        bits: of a weight, one of FLOAT_BITS.
        rows: 1 or FLOAT_ROWS.
        weights, epilogue: addresses of the tile's.
        x: address of float32[rows, 32 * blocks].
        blocks: at least 1.
        out: address of float32[rows, 16].
        stride: bytes from a row of `out` to the next.
    """
    isa = instruction_set.current()
    size = 4 * TILE * bits
    kind = ir.VectorType(F32, isa.lanes)
    row_bytes = builder.mul(blocks, I64(4 * BLOCK))
    with cgutils.for_range(builder, I64(TILE // isa.lanes)) as turn:
        lane = builder.mul(turn.index, I64(isa.lanes))

        def step(block: Any, sums: Vectors) -> Vectors:
            base = builder.add(weights, builder.mul(block, I64(size)))
            prefetch_weights(builder, pointer_to(builder, base), size * isa.lanes // TILE, rows)
            at = builder.add(x, builder.mul(block, I64(4 * BLOCK)))
            lines = [pointer_to(builder, builder.add(at, builder.mul(row_bytes, I64(row)))) for row in range(rows)]
            results = list(sums)
            for k, weight in enumerate(_weights(builder, isa, bits, base, lane)):
                for row, line in enumerate(lines):
                    place = 2 * row + k % 2
                    number = splat(builder, read(builder, line, F32, 4 * k), isa.lanes)
                    results[place] = fused(builder, weight, number, results[place])
            return results

        sums = accumulate(builder, blocks, [constant(0.0, kind)] * (2 * rows), step)
        for row in range(rows):
            total = builder.fadd(sums[2 * row], sums[2 * row + 1])
            done = finish(builder, total, builder.add(epilogue, builder.mul(lane, I64(4))))
            line = builder.add(builder.add(out, builder.mul(stride, I64(row))), builder.mul(lane, I64(4)))
            builder.store(done, pointer_to(builder, line), align=4)


def _weights(builder: Any, isa: InstructionSet, bits: int, base: Any, lane: Any) -> Vectors:
    """The 32 weights of a block, each <n x float> for the output rows from `lane` on, without their scale."""
    kind, wide = ir.VectorType(F32, isa.lanes), ir.VectorType(I32, isa.lanes)
    if bits > 8:
        at = pointer_to(builder, builder.add(base, builder.mul(lane, I64(bits // 8))))
        if bits == 32:
            return [read(builder, at, kind, 4 * TILE * k) for k in range(BLOCK)]
        halves = [read(builder, at, ir.VectorType(I16, isa.lanes), 2 * TILE * k, align=2) for k in range(BLOCK)]
        sixteen = constant(16, wide)
        return [builder.bitcast(builder.shl(builder.zext(half, wide), sixteen), kind) for half in halves]
    at = pointer_to(builder, builder.add(base, builder.mul(lane, I64(4))))
    found = []
    for codes, _ in SPLIT_CODES[bits](builder, isa, at, 0, 1):
        four = builder.bitcast(codes, wide)
        for byte in range(4):
            moved = builder.shl(four, constant(24 - 8 * byte, wide))
            if bits == 8 and isa.signed:
                found.append(builder.sitofp(builder.ashr(moved, constant(24, wide)), kind))
            else:
                code = builder.sitofp(builder.lshr(moved, constant(24, wide)), kind)
                found.append(builder.fsub(code, constant(float(1 << (bits - 1)), kind)))
    return found
