"""Matrix product of one weight tile: 16 output rows in blocks of 32 weights, times a group of rows of activations.

It takes 80 % of a forward's time: `tile_product`, for weights with a scale per block of 32, and perhaps a minimum,
times int8 activations with a scale per block. It is emitted as LLVM code for each format of weights and number of
rows. `epilogue_tiles` has the products of weights with a scale per output row. Layout of weights: `formats`; of
activations: `activations`.

How a block is summed: `start` is the bits of ORIGIN = 1.5 * 2**23 less zero * sum(q), where `zero` is the code of a
zero weight. The integer dot product is added to it. The bits of the result, read as a float32, are exactly ORIGIN +
dot, without a conversion. `shift` is -ORIGIN * scale, exactly, so one FMA with the activations' scale and `shift`
gives scale * dot, rounded once, and a second one multiplies by the weight's scale and adds to the sum. Scales that are
powers of two could do with a subtraction in place of the first FMA. On AMD Zen 4, whose FMAs take the unit of dot
products, that saves 7 % of the time at 8 rows and 1 % at up to 5. But the error of activations was 1.45 times as
large, and the loss (KL) of int8 weights twice.

Codes that are looked up in a table have become levels, bytes like those of 8-bit weights, when they are multiplied.

Weights with minimums are scale * code + minimum. Their zero code is 0, so `start` is the bits of ORIGIN and is not
stored; its place has `sum` = scale * sum(q) of the block. The minimum takes one more FMA per block, minimum * sum,
before that with the scale.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

from llvmlite import ir
from numba import types
from numba.core import cgutils

from ondevice.bundle_format.weight_format import WeightFormat
from ondevice.engines.simd.kernels.activations import (
    ACTIVATION_BYTES,
    ORIGIN,
    ORIGIN_BITS,
    PAIR_SCALE,
    PAIR_SHIFT,
    PAIR_START,
    PAIRED_ROWS,
    SCALE,
    SHIFT,
    START,
)
from ondevice.engines.simd.kernels.contract.entries import LINE
from ondevice.engines.simd.kernels.contract.instruction_sets import (
    AVX2,
    AVX512_VNNI,
    AVX_VNNI,
    InstructionSet,
    instruction_set,
)
from ondevice.engines.simd.kernels.contract.matrices import PAIRED_BYTES, PRODUCTS, TILE
from ondevice.engines.simd.kernels.formats import paired_codes, unpack
from ondevice.engines.simd.kernels.isa.dot import (
    Vectors,
    accumulate,
    add_dots,
    first_dots,
    groups_of_four,
    interleaved,
    keep_order,
    last_dots,
    multiply_pairs,
    separated,
    three_words,
    vectors_of_a_pass,
)
from ondevice.engines.simd.kernels.isa.jit import LITERAL, emits
from ondevice.engines.simd.kernels.isa.vector import (
    F32,
    I8,
    I16,
    I32,
    I64,
    L1,
    L1_ONLY,
    L2,
    constant,
    element,
    fused,
    pointer_to,
    prefetch,
    read,
    splat,
    widen_half,
)

SUMS = {AVX2: 10, AVX_VNNI: 12}
"""Sums of dot products that are in registers at a time on sets of 16 registers with 8 lanes, beside weights and
activations, and on AVX2 products. AVX-512 and the generic set have one for each row."""
AHEAD = 6144
"""Distance in bytes from the weights that are read to those that are prefetched."""
SCALES_AHEAD = 24
"""Blocks from the scales that are read to those that are prefetched, with AVX-512. Without it 2 to 4 rows of
SmolLM2-135M took 1.07 to 1.12 times as long on an Intel Xeon of 2024, whose last cache has all of its weights; at E2B's
shape it makes no difference."""
STREAM_AHEAD = 4096
"""The same for weights that are streamed."""
STREAM_ROWS = {4: 2, 8: 3}
"""Most rows with which weights of so many bits are streamed (`contract.steps.PackedMatrix`). More rows need the time
and the level-1 cache: then forwards of 3 and 4 rows of int4 took 1.12 and 1.08 times as long (AMD Zen 4)."""
CHUNK = 4096
"""Bytes of weights that one pass multiplies before the next pass continues, if a tile takes several passes. It is less
than AHEAD, so that the passes read memory evenly; if a pass ran over a whole tile, the first one would wait for memory
and the others not."""


@emits(types.void, LITERAL, LITERAL, *[types.int64] * 7)
def tile_product(
    builder: Any, product: int, rows: int, weights: Any, scales: Any, activations: Any, blocks: Any, out: Any,
    stride: Any, streamed: Any,
) -> None:  # fmt: skip
    """out[r, n] = sum over blocks of minimum[n] * sum[r] + scale[n] * (scale[r] * (w[n] . q[r])), block after block.

    Args:
        product: kind of product, one with activations in GROUPS. The minimums, and the first product, are those of
            GROUPS4_AFFINE alone.
        rows: number of rows of activations, 1..MAX_GROUP_ROWS.
        weights: address of the tile's codes.
        scales: address of the tile's scales, fp16[blocks, 16], or scales and minimums, fp16[blocks, 2, 16].
        activations: address of quantised blocks [blocks][rows].
        blocks: number of blocks, at least 1.
        out: address of float32[rows, 16].
        stride: bytes from a row of `out` to the next.
        streamed: whether the weights are streamed, 0 or 1: see `contract.steps.PackedMatrix`.
    """
    isa = instruction_set()
    kind = _PairedTile if isa.pairs and rows >= PAIRED_ROWS else _Tile
    form = next(form for (_, form), number in PRODUCTS.items() if number == product)
    ahead: Prefetched = [(I64(0), AHEAD, L2)]
    if isa is AVX512_VNNI and rows <= STREAM_ROWS[form.bits]:
        is_streamed = builder.icmp_signed("!=", streamed, I64(0))
        ahead = [
            (builder.select(is_streamed, I64(0), I64(AHEAD)), 0, L2),
            (builder.select(is_streamed, I64(STREAM_AHEAD), I64(0)), 0, L1_ONLY),
        ]
    elif isa is AVX512_VNNI:
        ahead.append((I64(0), 0, L1))  # see `prefetch_weights`
    tile = kind(isa, form, rows, weights, scales, activations, out, stride, ahead)
    vectors, whole = tile_vectors(isa, rows), TILE // isa.lanes
    every, zeros = range(whole * rows), [constant(0.0, ir.VectorType(F32, isa.lanes))] * (whole * rows)
    if vectors == whole and not tile.in_memory:
        tile.store(builder, I64(0), every, tile.add(builder, _Part(I64(0), I64(0), I64(0), blocks), zeros))
        return
    tile.store(builder, I64(0), every, zeros)
    if vectors == whole:
        tile.add(builder, _Part(I64(0), I64(0), I64(0), blocks), [])
        return
    chunk = I64(CHUNK // tile.block_bytes)
    chunks = builder.sdiv(builder.add(blocks, I64(CHUNK // tile.block_bytes - 1)), chunk)
    with cgutils.for_range(builder, chunks) as loop:
        first = builder.mul(loop.index, chunk)
        left = builder.sub(blocks, first)
        count = builder.select(builder.icmp_signed("<", left, chunk), left, chunk)
        with cgutils.for_range(builder, I64(whole // vectors)) as turn:
            lane = builder.mul(turn.index, I64(vectors * isa.lanes))
            own = range(vectors * rows)
            sums = tile.load(builder, lane, own)
            tile.store(builder, lane, own, tile.add(builder, _Part(turn.index, lane, first, count), sums))


def tile_vectors(isa: InstructionSet, rows: int) -> int:
    """Vectors of output rows that a pass of `tile_product` computes: see `vectors_of_a_pass`.

    With AVX2 and AVX-VNNI both of a tile share the loads of activations, which were one for each product.
    """
    return TILE // isa.lanes if isa in SUMS else vectors_of_a_pass(isa, rows)


Prefetched = list[tuple[Any, int, int]]
"""Distances or pointers, each with a constant offset that leads to what is prefetched, and the level of the cache that
this goes to."""


class _Part(NamedTuple):
    """The part of a tile that one pass computes.

    number : number of the pass, from 0
    lane : its first output row
    first : its first block
    count : its number of blocks
    """

    number: Any
    lane: Any
    first: Any
    count: Any


@dataclass(frozen=True)
class _Tile:
    """Emits the code of `tile_product`, whose arguments it holds.

    Sums are listed by vector of output rows, then by row of activations.

    ahead : the distances in bytes from the weights that are read to what is prefetched. Weights that may be streamed
        have two, of which the one not meant is 0: that line is in level 1 already, so that no branch and no second
        copy of the code is needed
    """

    isa: InstructionSet
    form: WeightFormat
    rows: int
    weights: Any
    scales: Any
    activations: Any
    out: Any
    stride: Any
    ahead: Prefetched

    @property
    def block_bytes(self) -> int:
        """Bytes of a block's weights."""
        return 4 * TILE * self.form.bits

    @property
    def by_line(self) -> bool:
        """Whether a block's cache lines are multiplied one after the other, each with several rows: see
        `_add_lines`. ARM adds products of all lines in 16 bits, or several vectors of rows share the loads of
        activations.
        """
        return not self.isa.by_lane

    @property
    def in_memory(self) -> bool:
        """Whether the sums lie in `out` while the products of a block are computed, because these take all registers.

        If a loop carries them, LLVM moves them, and what is computed, to the stack and back: 74 such instructions per
        block of int4 with AVX2 and 8 rows, of 608.
        """
        return self.isa in SUMS and self.rows > 2

    @property
    def row_bytes(self) -> int:
        """Bytes of a row's block of activations."""
        return PAIRED_BYTES if self.isa.pairs else ACTIVATION_BYTES

    def add(self, builder: Any, part: _Part, sums: Vectors) -> Vectors:
        """Emit a pass: the sums after its blocks, from the sums before."""
        isa, rows, size = self.isa, self.rows, self.block_bytes
        vectors = tile_vectors(isa, rows)
        share = size * vectors * isa.lanes // TILE
        weights = builder.add(self.weights, builder.mul(part.first, I64(size)))
        prefetched = builder.add(weights, builder.mul(part.number, I64(share)))
        aheads = [(builder.add(prefetched, distance), offset, level) for distance, offset, level in self.ahead]
        weights = builder.add(weights, builder.mul(part.lane, I64(4)))
        scale_bytes = (4 if self.form.affine else 2) * TILE
        scales = builder.add(self.scales, builder.mul(part.first, I64(scale_bytes)))
        scales = builder.add(scales, builder.mul(part.lane, I64(2)))
        record_bytes = self.row_bytes * rows
        activations = builder.add(self.activations, builder.mul(part.first, I64(record_bytes)))

        def step(block: Any, sums: Vectors) -> Vectors:
            ahead_at = [(element(builder, address, block, size), offset, level) for address, offset, level in aheads]
            codes_at, scales_at = element(builder, weights, block, size), element(builder, scales, block, scale_bytes)
            base = element(builder, activations, block, record_bytes)
            if isa is AVX512_VNNI:
                prefetch(builder, scales_at, SCALES_AHEAD * scale_bytes)
            if self.by_line:
                return self._add_lines(builder, codes_at, scales_at, base, ahead_at, sums)
            for line in range(0, share, LINE):
                _prefetch(builder, ahead_at, line)
            results, each = [], len(sums) // vectors
            for vector in range(vectors):
                factors = self._factors(builder, scales_at, vector)
                own = sums[vector * each : (vector + 1) * each]
                results += self.add_block(builder, codes_at, 4 * isa.lanes * vector, factors, base, own)
            return results

        return self.listed(builder, accumulate(builder, part.count, self.carried(builder, sums), step))

    def carried(self, builder: Any, sums: Vectors) -> Vectors:
        """The sums as a loop over blocks carries them."""
        return sums

    def listed(self, builder: Any, carried: Vectors) -> Vectors:
        """The sums that a loop has carried."""
        return carried

    def add_block(
        self, builder: Any, codes_at: Any, offset: int, factors: Vectors, base: Any, sums: Vectors
    ) -> Vectors:
        """Add a block's products to the sums of a vector of output rows, row of activations by row.

        Args:
            codes_at: pointer to the block's weights.
            offset: bytes from the start of a 64-byte vector to the part of these output rows.
            factors: their scales, <n x float>, and their minimums if the weights have any.
            base: pointer to the block's activations.
            sums: the sums, as a loop carries them.
        """
        codes, results = unpack(builder, self.isa, self.form, codes_at, offset), []
        for row, total in enumerate(sums):
            start, scale, shift = three_words(builder, self.isa, base, self.row_bytes * row + START)
            first = constant(ORIGIN_BITS, start.type) if self.form.affine else start
            groups = groups_of_four(builder, self.isa, base, self.row_bytes * row)
            dot = add_dots(builder, self.isa, self._bits, first, codes, groups)
            results.append(self._add_scaled(builder, total, dot, factors, start, scale, shift))
        return results

    def _add_scaled(
        self, builder: Any, total: Any, dot: Any, factors: Vectors, start: Any, scale: Any, shift: Any
    ) -> Any:
        """The sum `total` and a row's dot products of a block, `dot`, times both scales. If the weights have minimums,
        `start` has the bits of `sum`.
        """
        kind = total.type
        if self.form.affine:
            total = fused(builder, builder.bitcast(start, kind), factors[1], total)
        scale, shift = builder.bitcast(scale, kind), builder.bitcast(shift, kind)
        return fused(builder, fused(builder, builder.bitcast(dot, kind), scale, shift), factors[0], total)

    def _factors(self, builder: Any, scales_at: Any, vector: int) -> Vectors:
        """The scales of a block for a vector of output rows, <n x float>, and the minimums if the weights have any."""
        kind, column = ir.VectorType(I16, self.isa.lanes), 2 * self.isa.lanes * vector
        return [
            widen_half(builder, read(builder, scales_at, kind, column + at, align=2))
            for at in ((0, 2 * TILE) if self.form.affine else (0,))
        ]

    def _add_lines(
        self, builder: Any, codes_at: Any, scales_at: Any, base: Any, ahead_at: Prefetched, sums: Vectors
    ) -> Vectors:
        """Add a block's products to the sums: one cache line of weights after the other, multiplied with all rows, or
        with as many at a time as have SUMS.

        So loads and prefetches are spread over the block. Where they all came first, and the products row by row, the
        times of memory and of products added up: with 1, 5 and 8 rows a block of int4 took 18.6, 22.9 and 25.5 ns, by
        line 17.7, 19.9 and 23.3; with each prefetch before its line's products 17.8, 21.6 and 23.4 (Intel Xeon, AVX-512
        VNNI, two cores, weights in memory at 30 GB/s, which alone takes 19 ns).

        Args:
            codes_at, scales_at, base: pointers to the block's weights, scales and activations.
            ahead_at: the lines that this pass prefetches during the block.
            sums: the sums; none if they are `in_memory`.
        """
        rows, vectors, results = self.rows, tile_vectors(self.isa, self.rows), list(sums)
        turns = -(-rows * vectors // SUMS.get(self.isa, rows * vectors))
        together = -(-rows // turns)
        for first in range(0, rows, together):
            some = range(first, min(first + together, rows))
            dots = self._dots(builder, codes_at, base, [] if first else ahead_at, some)
            factors = [self._factors(builder, scales_at, vector) for vector in range(vectors)]
            for row in some:
                start, scale, shift = three_words(builder, self.isa, base, self.row_bytes * row + START)
                own = range(row, vectors * rows, rows)
                before = self.load(builder, I64(0), own) if self.in_memory else results[row::rows]
                after = [
                    self._add_scaled(builder, total, dots[row, vector], factors[vector], start, scale, shift)
                    for vector, total in enumerate(before)
                ]
                if self.in_memory:
                    self.store(builder, I64(0), own, after)
                else:
                    results[row::rows] = after
        return results

    def _dots(
        self, builder: Any, codes_at: Any, base: Any, ahead_at: Prefetched, some: range
    ) -> dict[tuple[int, int], Any]:
        """A block's dot products with some rows, <n x i32>, by row and vector of output rows: see `_add_lines`.

        Where registers are few, the products with an unpacked vector of weights end before the next is needed. LLVM
        would group the additions of a whole block otherwise, and unpack all of it first: 4 and 8 rows of affine int4
        took 28 and 52 ns, and take 19 and 39 (AMD Zen 3, one core, weights in level 1).

        Args:
            codes_at, base, ahead_at: as for `_add_lines`; nothing in `ahead_at` if another turn prefetches.
            some: the rows.
        """
        isa, form, bits = self.isa, self.form, self._bits
        origin = constant(ORIGIN_BITS, ir.VectorType(I32, isa.lanes))
        starts = dict.fromkeys(some, origin)
        if not form.affine:
            words = [read(builder, base, I32, self.row_bytes * row + START) for row in some]
            starts = {row: splat(builder, word, isa.lanes) for row, word in zip(some, words, strict=True)}
        vectors = range(tile_vectors(isa, self.rows))
        dots = {(row, vector): first_dots(isa, bits, starts[row]) for vector in vectors for row in some}
        passes, each = TILE // isa.lanes // len(vectors), 8 // form.bits
        for line in range(form.bits):
            codes = [
                unpack(builder, isa, form, codes_at, 4 * isa.lanes * vector, range(line, line + 1))
                for vector in vectors
            ]
            for first in range(0, each, 1 if isa in SUMS else each):
                part = slice(first, first + 1 if isa in SUMS else each)
                own = range(each * line, each * (line + 1))[part]
                for row in some:
                    groups = groups_of_four(builder, isa, base, self.row_bytes * row, own)
                    for vector in vectors:
                        total = dots[row, vector]
                        dots[row, vector] = add_dots(builder, isa, bits, total, codes[vector][part], groups)
                    if first == 0 and row == some[len(some) // 2] and line % passes == 0:
                        _prefetch(builder, ahead_at, LINE * (line // passes))
                if isa in SUMS:
                    dots = dict(zip(dots, keep_order(builder, list(dots.values())), strict=True))
        return {key: last_dots(builder, total, starts[key[0]]) for key, total in dots.items()}

    @property
    def _bits(self) -> int:
        """Bits of the codes that are multiplied: a table's levels are bytes."""
        return 8 if self.form.table else self.form.bits

    def load(self, builder: Any, lane: Any, chosen: Iterable[int]) -> Vectors:
        """Load sums, by their numbers, of the output rows from `lane` on from `out`."""
        kind = ir.VectorType(F32, self.isa.lanes)
        return [builder.load(self._pointer(builder, lane, index), typ=kind, align=4) for index in chosen]

    def store(self, builder: Any, lane: Any, chosen: Iterable[int], sums: Vectors) -> None:
        """Store sums, by their numbers, of the output rows from `lane` on to `out`."""
        for index, total in zip(chosen, sums, strict=True):
            builder.store(total, self._pointer(builder, lane, index), align=4)

    def _pointer(self, builder: Any, lane: Any, index: int) -> Any:
        vector, row = divmod(index, self.rows)
        column = builder.add(lane, I64(vector * self.isa.lanes))
        line = builder.add(self.out, builder.mul(self.stride, I64(row)))
        return pointer_to(builder, builder.add(line, builder.mul(column, I64(4))))


class _PairedTile(_Tile):
    """The same for instructions that multiply pairs of rows. Rows of activations lie in pairs, and a last single one in
    the order of numbers that pairs have.

    A loop carries the sums of rows r and s of a pair as r0 s0 r1 s1 and r2 s2 r3 s3, where 0..3 are output rows; of a
    single row, which is multiplied as both rows of a pair, as r0 r0 r1 r1 and r2 r2 r3 r3.
    """

    def carried(self, builder: Any, sums: Vectors) -> Vectors:
        found: Vectors = []
        for first in range(0, len(sums), self.rows):
            own = sums[first : first + self.rows]
            for row in range(0, self.rows, 2):
                found += interleaved(builder, own[row], own[min(row + 1, self.rows - 1)])
        return found

    def listed(self, builder: Any, carried: Vectors) -> Vectors:
        found: Vectors = []
        each = self.rows + self.rows % 2
        for first in range(0, len(carried), each):
            own = carried[first : first + each]
            rows = [row for pair in range(0, each, 2) for row in separated(builder, *own[pair : pair + 2])]
            found += rows[: self.rows]
        return found

    def add_block(
        self, builder: Any, codes_at: Any, offset: int, factors: Vectors, base: Any, sums: Vectors
    ) -> Vectors:
        weights = paired_codes(builder, self.isa, self.form, codes_at, offset)
        doubled, results = [interleaved(builder, each, each) for each in factors], []
        for row in range(0, self.rows, 2):
            activations, start, scale, shift = self._activations(builder, base, row)
            for place in range(2):
                result, total = sums[row + place], start
                if self.form.affine:
                    result = fused(builder, builder.bitcast(start, scale.type), doubled[1][place], result)
                    total = constant(ORIGIN_BITS, start.type)
                for pair, own in zip(weights, activations, strict=True):
                    total = multiply_pairs(builder, total, pair[place], own)
                value = builder.bitcast(total, scale.type)
                if self.form.affine:  # the same, rounded once too; with `shift` there would be too few registers
                    value = builder.fmul(builder.fsub(value, constant(float(ORIGIN), value.type)), scale)
                else:
                    value = fused(builder, value, scale, shift)
                results.append(fused(builder, value, doubled[0][place], result))
        return results

    def _activations(self, builder: Any, base: Any, row: int) -> tuple[Vectors, Any, Any, Any]:
        """The block of a pair of rows, or of a single last row twice: four vectors of codes, `start` (the bits of `sum`
        if the weights have minimums), `scale` and `shift`.
        """
        at, words, floats = self.row_bytes * row, ir.VectorType(I32, 4), ir.VectorType(F32, 4)
        if row + 1 < self.rows:
            codes = [read(builder, base, ir.VectorType(I8, 16), at + 16 * index) for index in range(4)]
            start = read(builder, base, words, at + PAIR_START)
            return codes, start, *(read(builder, base, floats, at + place) for place in (PAIR_SCALE, PAIR_SHIFT))
        halves = [read(builder, base, ir.VectorType(I8, 8), at + 8 * index) for index in range(4)]
        twice = ir.Constant(ir.VectorType(I32, 16), [lane % 8 for lane in range(16)])
        codes = [builder.shuffle_vector(half, half, twice) for half in halves]
        start = splat(builder, read(builder, base, I32, at + START), 4)
        return codes, start, *(splat(builder, read(builder, base, F32, at + place), 4) for place in (SCALE, SHIFT))


def _prefetch(builder: Any, lines: Prefetched, at: int) -> None:
    """Prefetch the lines `at` bytes after some, each into its level."""
    for pointer, offset, level in lines:
        prefetch(builder, pointer, offset + at, level)


def prefetch_weights(builder: Any, pointer: Any, size: int) -> None:
    """Prefetch `size` bytes of weights at AHEAD bytes from a pointer; after a tile's end they are the next tile's.

    The arithmetic of several rows fills the reorder window, so that loads alone start too late: without the prefetch, 5
    to 8 rows take 1.3 to 1.5 times as long (AMD Zen 4). Weights go to the level-2 cache, because activations need level
    1: 7 % faster at 5 to 8 rows (Zen 4), and 12 % at one row and 10 % at two on an Intel Xeon of 2024, whose level 1
    has room for fewer requests than its memory can answer. Zen 4 loses 2 % at one row. 4 or 12 KiB ahead is no better
    for several rows, and 6 % slower for one (Zen 4). If a tile takes several passes, each prefetches its share of every
    block.

    With AVX-512 and more rows than STREAM_ROWS, a second prefetch names the line that is being read. It moves no data,
    and yet 3, 5 and 8 rows of int4 from memory take 0.85, 0.82 and 0.92 of the time with it, 8 rows of int8 0.88, and
    forwards of E2B's shape with 3 to 8 rows 0.87 to 0.98 (Intel Xeon of 2024). The cause is not known: with weights in
    a cache both are equal, and to keep one prefetch per line in its place, which LLVM moves, gains nothing. A second
    one 512 bytes ahead, with the first 12 KiB ahead, is no better in forwards. AVX2 and AVX-VNNI gain nothing.
    """
    for line in range(0, size, LINE):
        prefetch(builder, pointer, AHEAD + line, L2)
