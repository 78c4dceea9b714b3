"""Matrix product of a weight tile with one scale for each of its rows, times up to 8 rows of int8 codes.

The activations have a static scale, so that no scale is inside the loop: sums of products stay int32 to the end, which
no order and no number of ways can change. A tile's epilogue is float32[2][16], the factor and the output step of its
rows: out = sum * factor, then clamp(round(out / step), -128, 127) * step where the step is not 0.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils

from ondevice.engines.simd.kernels import instruction_set
from ondevice.engines.simd.kernels.codes import SPLIT_CODES, most_ways
from ondevice.engines.simd.kernels.dot import add_whole_dots, groups_of_four
from ondevice.engines.simd.kernels.instruction_set import InstructionSet
from ondevice.engines.simd.kernels.jit import LITERAL, emits
from ondevice.engines.simd.kernels.loop import Vectors, accumulate
from ondevice.engines.simd.kernels.sizes import TILE
from ondevice.engines.simd.kernels.tile import CHUNK, prefetch_weights
from ondevice.engines.simd.kernels.vector import F32, I32, I64, constant, pointer_to, read, splat

EPILOGUE_BYTES = 2 * TILE * 4
"""Of a tile's factors and steps."""


@emits(types.void, LITERAL, LITERAL, *[types.int64] * 6)
def step_product(
    builder: Any, bits: int, rows: int, weights: Any, epilogue: Any, codes: Any, blocks: Any, out: Any, stride: Any
) -> None:
    """out[r, n] = the epilogue of the sum over k of w[n, k] * codes[r, k].

    Args:
        bits: of a weight.
        rows: of codes, 1..8.
        weights, epilogue: addresses of the tile's.
        codes: address of a group of rows in the form STEPS, their sums included.
        blocks: at least 1.
        out: address of float32[rows, 16].
        stride: bytes from a row of `out` to the next.
    """
    isa = instruction_set.current()
    tile = _StepTile(builder, isa, bits, rows, weights, epilogue, codes, blocks, out, stride)
    if isa.vectors_of_a_pass(rows) == TILE // isa.lanes:
        tile.whole()
    else:
        tile.in_passes()


class _StepTile:
    """Emits the code of one product. Sums are by vector of output rows, row of codes, and way."""

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
        self._vectors = isa.vectors_of_a_pass(rows)
        self._block_bytes = 4 * TILE * bits
        # A sum waits for itself, so one row takes several; eight rows leave room for two of each, AVX2 for one.
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
        """Some output rows after others, by chunks of weights: see `tile.CHUNK`. Sums wait in `out`, as integers."""
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
        """What a sum of unsigned codes of weights begins with: -zero times the sum of the row's codes."""
        zero = (0 if self._isa.signed else 128) if self._bits == 8 else 1 << (self._bits - 1)
        builder, row = self._builder, index % self._rows
        sums = builder.add(self._codes, builder.mul(self._blocks, I64(36 * self._rows)))
        total = read(builder, pointer_to(builder, sums), I32, 4 * row)
        return splat(builder, builder.mul(total, I32(-zero)), self._isa.lanes)

    def _pass(self, number: Any, lane: Any, first: Any, count: Any) -> Vectors:
        """The sums of some blocks, a vector for each vector of output rows and row of codes."""
        builder, isa, rows, size = self._builder, self._isa, self._rows, self._block_bytes
        share = size * self._vectors * isa.lanes // TILE
        base = builder.add(self._weights, builder.mul(first, I64(size)))
        ahead = builder.add(base, builder.mul(number, I64(share)))
        weights = builder.add(base, builder.mul(lane, I64(4)))
        codes = builder.add(self._codes, builder.mul(first, I64(32 * rows)))

        def step(block: Any, sums: Vectors) -> Vectors:
            prefetch_weights(
                builder, pointer_to(builder, builder.add(ahead, builder.mul(block, I64(size)))), share, rows
            )
            at = pointer_to(builder, builder.add(weights, builder.mul(block, I64(size))))
            row_at = pointer_to(builder, builder.add(codes, builder.mul(block, I64(32 * rows))))
            results = list(sums)
            for vector in range(self._vectors):
                split = SPLIT_CODES[self._bits](builder, isa, at, 4 * isa.lanes * vector, self._ways)
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
        """The sum of all ways; in some, codes were higher up in their bytes, and products with them."""
        total = None
        for way, own in enumerate(sums):
            place = self._place(way)
            lowered = self._builder.ashr(own, constant(place, self._kind)) if place else own
            total = lowered if total is None else self._builder.add(total, lowered)
        return total

    def _place(self, way: int) -> int:
        return 0 if self._ways == 1 else self._bits * (way % self._ways)

    def _finished(self, lane: Any, index: int, total: Any) -> Any:
        """The epilogue of a sum."""
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
    """A sum <n x float> after the epilogue, whose factors of these output rows lie at an address."""
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
