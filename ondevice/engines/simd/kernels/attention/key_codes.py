"""Product quantisation of keys: 4-bit codes, how they are learnt and written, and scores of keys by table lookup.

Every `width` numbers of a key (a sub-quantiser) are replaced by the number of the nearest of 16 centroids. A codebook
is float32[codes, width + 1, 16]: for each sub-quantiser its 16 centroids, number by number, then minus half their
squared lengths: with these added, the nearest centroid is the one whose product with a key is largest.

`look_up_tile` scores 16 keys at a time. A query has a table of 16 bytes for each sub-quantiser, its products with the
centroids; a key's score is the sum of the table entries of its codes. A table fits a register, so that one shuffle of
bytes looks up 16 to 64 products. The idea is from NoMAD-Attention (Zhang et al., 2024) and, before it, from fast scans
of product quantisers (André et al., 2015). Sums are exact integers, so no instruction set and no tile size changes
them.

Codes lie in tiles of 64 bytes: 16 keys by 8 sub-quantisers, the first four in the low nibbles, the others in the high
ones. For `vpermb`, which looks up in four tables at once in every lane, the four codes of a key are neighbours, and a
dot product with ones adds their entries. For other shuffles, which have one table per 16 bytes, 16 bytes hold one code
of all 16 keys.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir
from numba import types

from ondevice.engines.simd.kernels.contract.attention_memory import CENTROIDS, SPAN, UNIT
from ondevice.engines.simd.kernels.contract.instruction_sets import LANES
from ondevice.engines.simd.kernels.isa.dot import Vectors, accumulate
from ondevice.engines.simd.kernels.isa.jit import LITERAL, emits
from ondevice.engines.simd.kernels.isa.memory import read_f32, write_i8
from ondevice.engines.simd.kernels.isa.shuffle import byte_shuffle, look_up, look_up_wide
from ondevice.engines.simd.kernels.isa.vector import (
    F32,
    I8,
    I16,
    I32,
    I64,
    VF32,
    VI32,
    argmax_lanes,
    call,
    constant,
    element,
    fma,
    full,
    load,
    pointer_to,
    read,
    splat,
)
from ondevice.native.functions import kernel

SHUFFLE = byte_shuffle()
KEY_BYTES, CODE_BYTES = (4, 1) if SHUFFLE == "vpermb" else (1, 16)
"""Distances in bytes within a tile: from a key's code to the next key's, and to the same key's next code of its
nibbles."""
TILE_BYTES = 64
CODES = 8
"""Sub-quantisers of a tile."""
SUMS = 8 if SHUFFLE in ("vpermb", "pshufb-512", "tbl") else 4
"""Pairs of one head and 16 keys that are summed together: as many as there are registers for."""

_TABLE = 16
"""Bytes of a table."""
_WIDTH = {"vpermb": 64, "pshufb-512": 64, "pshufb-256": 32}.get(SHUFFLE, 16)
"""Bytes that one shuffle looks up."""
_MAX_ADDED = 256
"""Most bytes whose sum fits in 16 bits: 256 * 255 < 2**16."""


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
    """out[h, v] = scales[h] * sum over sub-quantisers s of table[h][s][code of s], float32[heads, SUMS / heads, 16].

    Args:
        heads: number of heads, a power of two up to SUMS.
        codes: address of the tiles of the first 16 keys.
        stride: bytes to the tiles of the next 16 keys.
        tiles: number of tiles of 16 keys, at least 1.
        tables: address of the first head's uint8[8 * tiles, 16].
        table_stride: bytes to the next head's.
        scales: address of float32[heads].
        out: address of the result.
    """
    if heads > SUMS:
        return  # compiled, but never called
    vectors = SUMS // heads
    starts = [builder.add(tables, builder.mul(table_stride, I64(head))) for head in range(heads)]
    keys = [builder.add(codes, builder.mul(stride, I64(vector))) for vector in range(vectors)]
    product = _by_dot_products if SHUFFLE == "vpermb" else _by_pairs
    sums = product(builder, starts, keys, tiles)
    for index, total in enumerate(sums):
        scale = read(builder, pointer_to(builder, scales), F32, 4 * (index // vectors))
        product = builder.fmul(builder.sitofp(total, VF32), splat(builder, scale, LANES))
        builder.store(product, element(builder, out, I64(index), 64), align=4)


def _by_dot_products(builder: Any, tables: list[Any], keys: list[Any], tiles: Any) -> Vectors:
    """`vpermb`: one shuffle looks up four codes of each key, and a dot product adds them to the key's 32-bit sum."""
    whole = ir.VectorType(I8, 64)
    ones, low = constant(1, whole), constant(15, whole)
    table_of_byte = ir.Constant(whole, [_TABLE * (byte % 4) for byte in range(64)])

    def step(index: Any, sums: Vectors) -> Vectors:
        wide = [read(builder, element(builder, key, index, TILE_BYTES), whole, align=1) for key in keys]
        sums = list(sums)
        for half in range(2):
            nibbles = [builder.lshr(code, constant(4, whole)) if half else builder.and_(code, low) for code in wide]
            places = [builder.or_(nibble, table_of_byte) for nibble in nibbles]
            for head, start in enumerate(tables):
                table = read(builder, element(builder, start, index, CODES * _TABLE), whole, 64 * half, align=1)
                for vector, place in enumerate(places):
                    at = head * len(keys) + vector
                    found = look_up_wide(builder, table, place)
                    sums[at] = call(builder, "llvm.x86.avx512.vpdpbusd.512", VI32, sums[at], found, ones)
        return sums

    return accumulate(builder, tiles, [constant(0, VI32)] * SUMS, step)


def _by_pairs(builder: Any, tables: list[Any], keys: list[Any], tiles: Any) -> Vectors:
    """One table per 16 bytes; sums of 16 bits, which are added to sums of 32 bits before they can overflow."""
    whole, pairs = ir.VectorType(I8, _WIDTH), ir.VectorType(I16, _WIDTH // 2)
    parts = TILE_BYTES // _WIDTH
    most = I64(_MAX_ADDED // (2 * parts))
    before = builder.sub(tiles, I64(1))

    def segment(number: Any, totals: Vectors) -> Vectors:
        first = builder.mul(number, most)
        left = builder.sub(tiles, first)
        count = builder.select(builder.icmp_signed("<", left, most), left, most)

        def step(index: Any, sums: Vectors) -> Vectors:
            index, sums = builder.add(first, index), list(sums)
            for part in range(parts):
                wide = [
                    read(builder, element(builder, key, index, TILE_BYTES), whole, _WIDTH * part, align=1)
                    for key in keys
                ]
                for half in range(2):
                    shift, low = constant(4, whole), constant(15, whole)
                    places = [builder.lshr(code, shift) if half else builder.and_(code, low) for code in wide]
                    for head, start in enumerate(tables):
                        at = element(builder, start, index, CODES * _TABLE)
                        table = read(builder, at, whole, 64 * half + _WIDTH * part, align=1)
                        for vector, place in enumerate(places):
                            own = 2 * (head * len(keys) + vector)
                            found = look_up(builder, table, place)
                            sums[own : own + 2] = _added(builder, found, sums[own], sums[own + 1])
            return sums

        sums = accumulate(builder, count, [constant(0, pairs)] * (2 * SUMS), step)
        return [builder.add(total, _in_order(builder, *sums[2 * i : 2 * i + 2])) for i, total in enumerate(totals)]

    segments = builder.add(builder.sdiv(before, most), I64(1))
    return accumulate(builder, segments, [constant(0, VI32)] * SUMS, segment)


def _added(builder: Any, found: Any, a: Any, b: Any) -> list[Any]:
    """Add bytes to two sums of 16 bits, which `_in_order` reads.

    On ARM, which widens while it adds, a sums the first eight bytes and b the others. On x86, a sums pairs of bytes as
    16-bit numbers and b the upper byte of each pair: a shift and two additions, where widening would take two shuffles
    and two additions.
    """
    if SHUFFLE == "tbl" or not SHUFFLE:
        halves = [builder.zext(_lanes(builder, found, list(range(first, first + 8))), a.type) for first in (0, 8)]
        return [builder.add(a, halves[0]), builder.add(b, halves[1])]
    pairs = builder.bitcast(found, a.type)
    return [builder.add(a, pairs), builder.add(b, builder.lshr(pairs, constant(8, a.type)))]


def _in_order(builder: Any, a: Any, b: Any) -> Any:
    """<16 x i32>: the sums of 16 keys, in order, from the sums of `_added`, over all lanes of 16 bytes."""
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


def _lanes(builder: Any, a: Any, lanes: list[int], b: Any = None) -> Any:
    return builder.shuffle_vector(a, a if b is None else b, ir.Constant(ir.VectorType(I32, len(lanes)), lanes))


class Codebook(NamedTuple):
    """The codebook of one KV head.

    address : address of float32[codes, width + 1, 16]
    codes : number of sub-quantisers
    width : numbers of a key in each
    """

    address: int
    codes: int
    width: int


@kernel
def nearest(key: int, codebook: Codebook, code: int) -> Any:
    """The number of the centroid of sub-quantiser `code` that is nearest to the key, the lowest of equal ones."""
    at = codebook.address + code * (codebook.width + 1) * 64
    product = load(at + 64 * codebook.width)
    for i in range(codebook.width):
        product = fma(full(read_f32(key + 4 * (code * codebook.width + i))), load(at + 64 * i), product)
    return argmax_lanes(product)


@kernel
def write_codes(key: int, codebook: Codebook, position: int, out: int, stride: int) -> None:
    """Write the codes of a key to a cache of codes: spans of [UNIT][codes / 8] tiles.

    Args:
        key: address of float32[codes * width].
        codebook: the codebook of its KV head.
        position: the key's position.
        out: address of the first span's codes.
        stride: bytes to the next span's.
    """
    span, within = position // SPAN, position % SPAN
    at = out + span * stride + within % UNIT * 16 * (codebook.codes // 2) + within // UNIT * KEY_BYTES
    for first in range(0, codebook.codes, CODES):
        for i in range(CODES // 2):
            low, high = nearest(key, codebook, first + i), nearest(key, codebook, first + CODES // 2 + i)
            write_i8(at + first // CODES * TILE_BYTES + i * CODE_BYTES, np.int32(low | high << 4))


@kernel
def encode(keys: np.ndarray, codebooks: np.ndarray, first: int, out: int, stride: int) -> None:
    """Write the codes of keys with positions from `first` on.

    Args:
        keys: float32[n, kv_heads, codes * width]
        codebooks: float32[kv_heads, codes, width + 1, 16]
        first: position of the first key.
        out: address of uint8[spans, kv_heads, SPAN, codes / 2].
        stride: bytes from a span to the next.
    """
    heads, codes, width = codebooks.shape[0], codebooks.shape[1], codebooks.shape[2] - 1
    for n in range(len(keys)):
        for head in range(heads):
            key = keys.ctypes.data + 4 * (n * heads + head) * codes * width
            book = Codebook(codebooks.ctypes.data + 4 * head * codes * (width + 1) * CENTROIDS, codes, width)
            write_codes(key, book, first + n, out + head * SPAN * codes // 2, stride)


@kernel
def learn(  # noqa: PLR0912 - loops instead of slices, which allocate
    keys: np.ndarray, codebook: np.ndarray, steps: int, sums: np.ndarray, members: np.ndarray
) -> None:
    """Learn a codebook float32[codes, width + 1, 16] from keys float32[n, codes * width]: k-means of each
    sub-quantiser.

    It starts from evenly spaced keys and takes `steps` steps. The order of every sum is fixed. A centroid that is
    nearest to no key is unchanged.

    sums, members : float64[16, width] and int64[16], scratch
    """
    count, (codes, width) = len(keys), (codebook.shape[0], codebook.shape[1] - 1)
    book = Codebook(codebook.ctypes.data, codes, width)
    for code in range(codes):
        for centroid in range(CENTROIDS):
            for i in range(width):
                codebook[code, i, centroid] = keys[centroid * count // CENTROIDS, code * width + i]
        for step in range(steps + 1):
            for centroid in range(CENTROIDS):
                length = 0.0
                for i in range(width):
                    length += np.float64(codebook[code, i, centroid]) ** 2
                codebook[code, width, centroid] = -0.5 * length
            if step == steps:
                break
            for centroid in range(CENTROIDS):
                members[centroid] = 0
                for i in range(width):
                    sums[centroid, i] = 0.0
            for n in range(count):
                centroid = nearest(keys.ctypes.data + 4 * n * codes * width, book, code)
                members[centroid] += 1
                for i in range(width):
                    sums[centroid, i] += keys[n, code * width + i]
            for centroid in range(CENTROIDS):
                for i in range(width):
                    if members[centroid]:
                        codebook[code, i, centroid] = sums[centroid, i] / members[centroid]
