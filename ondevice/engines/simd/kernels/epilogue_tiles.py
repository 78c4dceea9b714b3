"""Matrix products of one weight tile whose sums end in an epilogue: a scale per output row, and perhaps a step.

- `step_product`: integer weights times int8 activations with one static scale.
- `float_product`: weights of any width times float32 rows, for matrices whose input is not quantised.

The epilogue of a tile is float32[2, 16]: factors of the output rows, and the step to which a product is rounded then, 0
for none. Layout of weights: `formats`; of activations: `activations`. `tiles` has the product of weights in groups.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils

from ondevice.engines.simd.kernels.contract.instruction_sets import InstructionSet, instruction_set
from ondevice.engines.simd.kernels.contract.matrices import BLOCK, TILE
from ondevice.engines.simd.kernels.formats import UNPACK_SPLIT, most_ways
from ondevice.engines.simd.kernels.isa.dot import (
    Vectors,
    accumulate,
    add_whole_dots,
    groups_of_four,
    vectors_of_a_pass,
)
from ondevice.engines.simd.kernels.isa.jit import LITERAL, emits
from ondevice.engines.simd.kernels.isa.vector import (
    F32,
    I16,
    I32,
    I64,
    constant,
    fused,
    pointer_to,
    read,
    splat,
)
from ondevice.engines.simd.kernels.tiles import CHUNK, prefetch_weights

# Weights with one scale per output row. The activations have one static scale, so no scale is inside the loop: sums
# stay int32 to the end, and neither their order nor the number of ways changes them.


@emits(types.void, LITERAL, LITERAL, *[types.int64] * 6)
def step_product(
    builder: Any, bits: int, rows: int, weights: Any, epilogue: Any, codes: Any, blocks: Any, out: Any, stride: Any
) -> None:
    """out[r, n] = epilogue of the sum over k of w[n, k] * codes[r, k].

    Args:
        bits: bits of a weight, 2, 4 or 8.
        rows: number of rows of codes, 1..MAX_GROUP_ROWS.
        weights, epilogue: addresses of the tile's codes and epilogue.
        codes: address of a group of rows in the form STEPS, with their sums.
        blocks: number of blocks, at least 1.
        out: address of float32[rows, 16].
        stride: bytes from a row of `out` to the next.
    """
    isa = instruction_set()
    tile = _StepTile(builder, isa, bits, rows, weights, epilogue, codes, blocks, out, stride)
    if vectors_of_a_pass(isa, rows) == TILE // isa.lanes:
        tile.whole()
    else:
        tile.in_passes()


class _StepTile:
    """Emits the code of `step_product`. Sums are listed by vector of output rows, then row of codes, then way."""

    def __init__(
        self,
        builder: Any,
        isa: InstructionSet,
        bits: int,
        rows: int,
        weights: Any,
        epilogue: Any,
        codes: Any,
        blocks: Any,
        out: Any,
        stride: Any,
    ) -> None:
        self._builder, self._isa, self._bits, self._rows = builder, isa, bits, rows
        self._weights, self._epilogue, self._codes = weights, epilogue, codes
        self._blocks, self._out, self._stride = blocks, out, stride
        self._vectors = vectors_of_a_pass(isa, rows)
        self._block_bytes = 4 * TILE * bits
        # Each addition to a sum waits for the one before. So one row has several sums; eight rows leave registers for
        # two each, on AVX2 for one.
        room = (8 if isa.lanes == 8 else 16) // (rows * self._vectors)
        self._sums = next(count for count in (8, 4, 2, 1) if count <= max(1, room))
        self._ways = min(self._sums, most_ways(isa, bits))
        self._kind = ir.VectorType(I32, isa.lanes)

    def whole(self) -> None:
        """All output rows in one pass."""
        lane = I64(0)
        for index, total in enumerate(self._pass(I64(0), lane, I64(0), self._blocks)):
            self._write(lane, index, self._finished(lane, index, self._builder.add(total, self._start(index))))

    def in_passes(self) -> None:
        """Several passes of some output rows each, by CHUNK bytes of weights. Between chunks, sums are in `out` as
        int32.
        """
        builder, passes = self._builder, TILE // self._isa.lanes // self._vectors
        chunk = I64(max(1, CHUNK // self._block_bytes))
        chunks = builder.sdiv(builder.add(self._blocks, builder.sub(chunk, I64(1))), chunk)
        for lane in range(0, TILE, self._isa.lanes * self._vectors):
            for index in range(self._vectors * self._rows):
                self._write(I64(lane), index, builder.bitcast(self._start(index), self._float))
        with cgutils.for_range(builder, chunks) as loop:
            first = builder.mul(loop.index, chunk)
            left = builder.sub(self._blocks, first)
            count = builder.select(builder.icmp_signed("<", left, chunk), left, chunk)
            with cgutils.for_range(builder, I64(passes)) as turn:
                lane = builder.mul(turn.index, I64(self._vectors * self._isa.lanes))
                for index, total in enumerate(self._pass(turn.index, lane, first, count)):
                    before = builder.load(self._pointer(lane, index), typ=self._kind, align=4)
                    self._write(lane, index, builder.bitcast(builder.add(before, total), self._float))
        with cgutils.for_range(builder, I64(passes)) as turn:
            lane = builder.mul(turn.index, I64(self._vectors * self._isa.lanes))
            for index in range(self._vectors * self._rows):
                total = builder.load(self._pointer(lane, index), typ=self._kind, align=4)
                self._write(lane, index, self._finished(lane, index, total))

    @property
    def _float(self) -> Any:
        return ir.VectorType(F32, self._isa.lanes)

    def _start(self, index: int) -> Any:
        """The start value of a sum of unsigned weight codes: -zero times the sum of the row's codes."""
        zero = (0 if self._isa.signed else 128) if self._bits == 8 else 1 << (self._bits - 1)
        builder, row = self._builder, index % self._rows
        sums = builder.add(self._codes, builder.mul(self._blocks, I64(36 * self._rows)))
        total = read(builder, pointer_to(builder, sums), I32, 4 * row)
        return splat(builder, builder.mul(total, I32(-zero)), self._isa.lanes)

    def _pass(self, number: Any, lane: Any, first: Any, count: Any) -> Vectors:
        """Emit a pass over some blocks: one sum for each vector of output rows and row of codes."""
        builder, isa, rows, size = self._builder, self._isa, self._rows, self._block_bytes
        share = size * self._vectors * isa.lanes // TILE
        base = builder.add(self._weights, builder.mul(first, I64(size)))
        ahead = builder.add(base, builder.mul(number, I64(share)))
        weights = builder.add(base, builder.mul(lane, I64(4)))
        codes = builder.add(self._codes, builder.mul(first, I64(32 * rows)))

        def step(block: Any, sums: Vectors) -> Vectors:
            prefetch_weights(builder, pointer_to(builder, builder.add(ahead, builder.mul(block, I64(size)))), share)
            at = pointer_to(builder, builder.add(weights, builder.mul(block, I64(size))))
            row_at = pointer_to(builder, builder.add(codes, builder.mul(block, I64(32 * rows))))
            results = list(sums)
            for vector in range(self._vectors):
                split = UNPACK_SPLIT[self._bits](builder, isa, at, 4 * isa.lanes * vector, self._ways)
                for row in range(rows):
                    groups = groups_of_four(builder, isa, row_at, 32 * row)
                    for way in range(self._sums):
                        place = (vector * rows + row) * self._sums + way
                        mine = range(way, len(split), self._sums)
                        own, others = [split[j][0] for j in mine], [groups[j] for j in mine]
                        results[place] = add_whole_dots(builder, isa, self._bits, results[place], own, others)
            return results

        zeros = [constant(0, self._kind)] * (self._vectors * rows * self._sums)
        sums = accumulate(builder, count, zeros, step)
        return [self._joined(sums[at : at + self._sums]) for at in range(0, len(sums), self._sums)]

    def _joined(self, sums: Vectors) -> Any:
        """The sum over all ways; the products of a way whose codes were shifted up are shifted down first."""
        total = None
        for way, own in enumerate(sums):
            place = self._place(way)
            lowered = self._builder.ashr(own, constant(place, self._kind)) if place else own
            total = lowered if total is None else self._builder.add(total, lowered)
        return total

    def _place(self, way: int) -> int:
        return 0 if self._ways == 1 else self._bits * (way % self._ways)

    def _finished(self, lane: Any, index: int, total: Any) -> Any:
        """A sum after the epilogue."""
        at = self._builder.add(lane, I64(index // self._rows * self._isa.lanes))
        at = self._builder.add(self._epilogue, self._builder.mul(at, I64(4)))
        return finish(self._builder, self._builder.sitofp(total, self._float), at)

    def _write(self, lane: Any, index: int, value: Any) -> None:
        self._builder.store(value, self._pointer(lane, index), align=4)

    def _pointer(self, lane: Any, index: int) -> Any:
        builder = self._builder
        vector, row = divmod(index, self._rows)
        column = builder.add(lane, I64(vector * self._isa.lanes))
        line = builder.add(self._out, builder.mul(self._stride, I64(row)))
        return pointer_to(builder, builder.add(line, builder.mul(column, I64(4))))


def finish(builder: Any, total: Any, epilogue: Any) -> Any:
    """Apply the epilogue to sums <n x float>; `epilogue` is the address of these output rows' factors."""
    kind = total.type
    factors, steps = (read(builder, pointer_to(builder, epilogue), kind, offset) for offset in (0, 4 * TILE))
    value = builder.fmul(total, factors)
    ratio = builder.fdiv(value, steps)
    least, most, shift = (constant(number, kind) for number in (-128.0, 127.0, 12582912.0))
    ratio = builder.select(builder.fcmp_ordered(">", least, ratio), least, ratio)
    ratio = builder.select(builder.fcmp_ordered("<", most, ratio), most, ratio)
    whole = builder.fsub(builder.fadd(ratio, shift), shift)
    none = builder.fcmp_ordered("==", steps, constant(0.0, kind))
    return builder.select(none, value, builder.fmul(whole, steps))


# Matrices whose input is not quantised. Every output is two sums, of even and of odd k, each in order, whatever the
# number of rows. The epilogue is that of `step_product`.

FLOAT_BITS = (2, 4, 8, 16, 32)
"""Widths of weights in bits; 16 bits are bfloat16."""
FLOAT_ROWS = 4
"""Rows of a full product: their sums of even and odd k fit in registers."""


@emits(types.void, LITERAL, LITERAL, *[types.int64] * 6)
def float_product(
    builder: Any, bits: int, rows: int, weights: Any, epilogue: Any, x: Any, blocks: Any, out: Any, stride: Any
) -> None:
    """out[r, n] = epilogue of the sum over k of w[n, k] * x[r, k].

    Args:
        bits: bits of a weight, one of FLOAT_BITS.
        rows: 1 or FLOAT_ROWS.
        weights, epilogue: addresses of the tile's weights and epilogue.
        x: address of float32[rows, 32 * blocks].
        blocks: number of blocks, at least 1.
        out: address of float32[rows, 16].
        stride: bytes from a row of `out` to the next.
    """
    isa = instruction_set()
    size = 4 * TILE * bits
    kind = ir.VectorType(F32, isa.lanes)
    row_bytes = builder.mul(blocks, I64(4 * BLOCK))
    with cgutils.for_range(builder, I64(TILE // isa.lanes)) as turn:
        lane = builder.mul(turn.index, I64(isa.lanes))

        def step(block: Any, sums: Vectors) -> Vectors:
            base = builder.add(weights, builder.mul(block, I64(size)))
            prefetch_weights(builder, pointer_to(builder, base), size * isa.lanes // TILE)
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
    """The weights of a block without scale: for each of 32 k, <n x float> for the output rows from `lane` on."""
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
    for codes, _ in UNPACK_SPLIT[bits](builder, isa, at, 0, 1):
        four = builder.bitcast(codes, wide)
        for byte in range(4):
            moved = builder.shl(four, constant(24 - 8 * byte, wide))
            if bits == 8 and isa.signed:
                found.append(builder.sitofp(builder.ashr(moved, constant(24, wide)), kind))
            else:
                code = builder.sitofp(builder.lshr(moved, constant(24, wide)), kind)
                found.append(builder.fsub(code, constant(float(1 << (bits - 1)), kind)))
    return found
