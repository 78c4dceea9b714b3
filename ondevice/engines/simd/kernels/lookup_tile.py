"""Scores of 16 keys at a time by table lookup: a key is some codes of 4 bits, a query has 16 bytes for each code.

The idea is that of NoMAD-Attention (Zhang et al., 2024) and of the fast scans of product quantisers before it (André et
al., 2015): a table fits a register, so one shuffle of bytes looks 16 to 64 products up. Sums are exact integers, so no
instruction set and no size of a tile changes them.

Codes lie in tiles of 64 bytes: 16 keys by 8 sub-quantisers, the first four in the low nibbles and the others in the
high ones. `vpermb` looks up in four tables at once, whatever the lane: the four codes of a key lie side by side there,
and a dot product with ones adds them. Elsewhere a lane of 16 bytes has one table, and holds one code of all 16 keys.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types

from ondevice.engines.simd.kernels import instruction_set
from ondevice.engines.simd.kernels.jit import LITERAL, emits
from ondevice.engines.simd.kernels.loop import Vectors, accumulate
from ondevice.engines.simd.kernels.vector import (
    F32,
    I8,
    I16,
    I32,
    I64,
    LANES,
    POINTER,
    VF32,
    VI32,
    call,
    constant,
    read,
    splat,
)

SHUFFLE = instruction_set.byte_shuffle(*instruction_set.target())
KEY_BYTES, CODE_BYTES = (4, 1) if SHUFFLE == "vpermb" else (1, 16)
"""In a tile: from a key's code to the next key's, and from a key's code to its next one of the same nibbles."""
TILE_BYTES = 64
CODES = 8
"""Sub-quantisers of a tile."""
SUMS = 8 if SHUFFLE in ("vpermb", "pshufb-512", "tbl") else 4
"""Pairs of a head and 16 keys that are summed together: as many as there are registers for."""

_TABLE = 16
_WIDTH = {"vpermb": 64, "pshufb-512": 64, "pshufb-256": 32}.get(SHUFFLE, 16)
"""Bytes that a shuffle looks up."""
_MOST_ADDED = 256
"""Bytes whose sum 16 bits hold: 256 * 255 < 2**16."""


@emits(types.void, LITERAL, *[types.int64] * 7)
def look_up_tile(
    builder: Any,
    heads: int,
    codes: Any,
    stride: Any,
    tiles: Any,
    tables: Any,
    table_stride: Any,
    scales: Any,
    out: Any,
) -> None:
    """out[h, v] = scales[h] * sum over s of table[h][s][code of s], float32[heads, SUMS / heads, 16].

    Args:
        heads: a power of two up to SUMS.
        codes: address of the tiles of the first 16 keys.
        stride: bytes to those of the next 16.
        tiles: of 16 keys, at least 1.
        tables: address of the first head's uint8[8 * tiles, 16].
        table_stride: bytes to the next head's.
        scales: address of float32[heads].
        out: address of the result.
    """
    if heads > SUMS:
        return  # no kernel asks for it here
    vectors = SUMS // heads
    starts = [builder.add(tables, builder.mul(table_stride, I64(head))) for head in range(heads)]
    keys = [builder.add(codes, builder.mul(stride, I64(vector))) for vector in range(vectors)]
    product = _by_dot_products if SHUFFLE == "vpermb" else _by_pairs
    sums = product(builder, starts, keys, tiles)
    for index, total in enumerate(sums):
        scale = read(builder, builder.inttoptr(scales, POINTER), F32, 4 * (index // vectors))
        product = builder.fmul(builder.sitofp(total, VF32), splat(builder, scale, LANES))
        builder.store(product, builder.inttoptr(builder.add(out, I64(64 * index)), POINTER), align=4)


def _by_dot_products(builder: Any, tables: list[Any], keys: list[Any], tiles: Any) -> Vectors:
    """Four tables in a shuffle, and their four bytes added into the key's 32 bits."""
    whole = ir.VectorType(I8, 64)
    ones, low = constant(1, whole), constant(15, whole)
    table_of_byte = ir.Constant(whole, [_TABLE * (byte % 4) for byte in range(64)])

    def step(index: Any, sums: Vectors) -> Vectors:
        wide = [read(builder, _pointer(builder, key, index, TILE_BYTES), whole, align=1) for key in keys]
        sums = list(sums)
        for half in range(2):
            nibbles = [builder.lshr(code, constant(4, whole)) if half else builder.and_(code, low) for code in wide]
            places = [builder.or_(nibble, table_of_byte) for nibble in nibbles]
            for head, start in enumerate(tables):
                table = read(builder, _pointer(builder, start, index, CODES * _TABLE), whole, 64 * half, align=1)
                for vector, place in enumerate(places):
                    at = head * len(keys) + vector
                    found = call(builder, "llvm.x86.avx512.permvar.qi.512", whole, table, place)
                    sums[at] = call(builder, "llvm.x86.avx512.vpdpbusd.512", VI32, sums[at], found, ones)
        return sums

    return accumulate(builder, tiles, [constant(0, VI32)] * SUMS, step)


def _by_pairs(builder: Any, tables: list[Any], keys: list[Any], tiles: Any) -> Vectors:
    """One table for 16 bytes; sums of 16 bits, which are added to those of 32 before they can overflow."""
    whole, pairs = ir.VectorType(I8, _WIDTH), ir.VectorType(I16, _WIDTH // 2)
    parts = TILE_BYTES // _WIDTH
    most = I64(_MOST_ADDED // (2 * parts))
    before = builder.sub(tiles, I64(1))

    def segment(number: Any, totals: Vectors) -> Vectors:
        first = builder.mul(number, most)
        left = builder.sub(tiles, first)
        count = builder.select(builder.icmp_signed("<", left, most), left, most)

        def step(index: Any, sums: Vectors) -> Vectors:
            index, sums = builder.add(first, index), list(sums)
            for part in range(parts):
                wide = [
                    read(builder, _pointer(builder, key, index, TILE_BYTES), whole, _WIDTH * part, align=1)
                    for key in keys
                ]
                for half in range(2):
                    shift, low = constant(4, whole), constant(15, whole)
                    places = [builder.lshr(code, shift) if half else builder.and_(code, low) for code in wide]
                    for head, start in enumerate(tables):
                        at = _pointer(builder, start, index, CODES * _TABLE)
                        table = read(builder, at, whole, 64 * half + _WIDTH * part, align=1)
                        for vector, place in enumerate(places):
                            own = 2 * (head * len(keys) + vector)
                            found = _shuffled(builder, table, place)
                            sums[own : own + 2] = _added(builder, found, sums[own], sums[own + 1])
            return sums

        sums = accumulate(builder, count, [constant(0, pairs)] * (2 * SUMS), step)
        return [builder.add(total, _in_order(builder, *sums[2 * i : 2 * i + 2])) for i, total in enumerate(totals)]

    segments = builder.add(builder.sdiv(before, most), I64(1))
    return accumulate(builder, segments, [constant(0, VI32)] * SUMS, segment)


def _added(builder: Any, found: Any, a: Any, b: Any) -> list[Any]:
    """Two sums of 16 bits with some bytes added, as `_in_order` reads them.

    On ARM a has the first eight bytes and b the others: it widens while it adds. On x86 a has pairs of bytes, of which
    b has the upper ones: a shift and two additions, where widening takes two shuffles and two additions.
    """
    if SHUFFLE == "tbl" or not SHUFFLE:
        halves = [builder.zext(_lanes(builder, found, list(range(first, first + 8))), a.type) for first in (0, 8)]
        return [builder.add(a, halves[0]), builder.add(b, halves[1])]
    pairs = builder.bitcast(found, a.type)
    return [builder.add(a, pairs), builder.add(b, builder.lshr(pairs, constant(8, a.type)))]


def _in_order(builder: Any, a: Any, b: Any) -> Any:
    """The sums of 16 keys, <16 x i32>, of what `_added` has summed, over all lanes of 16 bytes."""
    if SHUFFLE == "tbl" or not SHUFFLE:
        return builder.zext(_lanes(builder, a, list(range(16)), b), VI32)
    count = a.type.count
    even = builder.sub(a, builder.shl(b, constant(8, b.type)))  # modulo 2**16, as a is
    total = None
    for first in range(0, count, 8):
        order = [lane for i in range(first, first + 8) for lane in (i, count + i)]
        lane = builder.zext(_lanes(builder, even, order, b), VI32)
        total = lane if total is None else builder.add(total, lane)
    return total


def _shuffled(builder: Any, table: Any, places: Any) -> Any:
    """table[places] within each 16 bytes; places 0..15."""
    names = {
        "pshufb-512": "llvm.x86.avx512.pshuf.b.512",
        "pshufb-256": "llvm.x86.avx2.pshuf.b",
        "pshufb-128": "llvm.x86.ssse3.pshuf.b.128",
        "tbl": "llvm.aarch64.neon.tbl1.v16i8",
    }
    if SHUFFLE:
        return call(builder, names[SHUFFLE], table.type, table, places)
    found = ir.Constant(table.type, ir.Undefined)
    for lane in range(_WIDTH):  # byte after byte: for any CPU
        place = builder.extract_element(places, I32(lane))
        found = builder.insert_element(found, builder.extract_element(table, place), I32(lane))
    return found


def _lanes(builder: Any, a: Any, lanes: list[int], b: Any = None) -> Any:
    return builder.shuffle_vector(a, a if b is None else b, ir.Constant(ir.VectorType(I32, len(lanes)), lanes))


def _pointer(builder: Any, base: Any, index: Any, stride: int) -> Any:
    return builder.inttoptr(builder.add(base, builder.mul(index, I64(stride))), POINTER)
