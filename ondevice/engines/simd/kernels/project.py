"""Quantised matrices times quantised activations: tiles shared among threads, rows in passes of up to eight."""

from __future__ import annotations

import numpy as np

from ondevice.engines.simd.kernels.functions import gelu, tanh
from ondevice.engines.simd.kernels.jit import kernel
from ondevice.engines.simd.kernels.quantize import activation_address, quantize_block
from ondevice.engines.simd.kernels.tile import ACTIVATION_BYTES, MOST_ROWS, TILE, tile_product
from ondevice.engines.simd.kernels.vector import full, load, store

SCRATCH_BYTES = MOST_ROWS * 4 * TILE * 4
"""Per thread: four tiles of eight rows."""


@kernel
def product4(rows: int, weights: int, scales: int, records: int, blocks: int, out: int, stride: int) -> None:
    """`tile_product` of 4-bit weights for 1..8 rows."""
    if rows == 1:
        tile_product(4, 1, weights, scales, records, blocks, out, stride)
    elif rows == 2:
        tile_product(4, 2, weights, scales, records, blocks, out, stride)
    elif rows == 3:
        tile_product(4, 3, weights, scales, records, blocks, out, stride)
    elif rows == 4:
        tile_product(4, 4, weights, scales, records, blocks, out, stride)
    elif rows == 5:
        tile_product(4, 5, weights, scales, records, blocks, out, stride)
    elif rows == 6:
        tile_product(4, 6, weights, scales, records, blocks, out, stride)
    elif rows == 7:
        tile_product(4, 7, weights, scales, records, blocks, out, stride)
    else:
        tile_product(4, 8, weights, scales, records, blocks, out, stride)


@kernel
def product8(rows: int, weights: int, scales: int, records: int, blocks: int, out: int, stride: int) -> None:
    """`tile_product` of 8-bit weights for 1..8 rows."""
    if rows == 1:
        tile_product(8, 1, weights, scales, records, blocks, out, stride)
    elif rows == 2:
        tile_product(8, 2, weights, scales, records, blocks, out, stride)
    elif rows == 3:
        tile_product(8, 3, weights, scales, records, blocks, out, stride)
    elif rows == 4:
        tile_product(8, 4, weights, scales, records, blocks, out, stride)
    elif rows == 5:
        tile_product(8, 5, weights, scales, records, blocks, out, stride)
    elif rows == 6:
        tile_product(8, 6, weights, scales, records, blocks, out, stride)
    elif rows == 7:
        tile_product(8, 7, weights, scales, records, blocks, out, stride)
    else:
        tile_product(8, 8, weights, scales, records, blocks, out, stride)


@kernel
def product(
    bits: int, tile: int, rows: int, weights: int, scales: int, records: int, blocks: int, out: int, stride: int
) -> None:
    """Tile `tile` of a packed matrix of `bits` times 1..8 rows."""
    scales += tile * blocks * 2 * TILE
    if bits == 4:
        product4(rows, weights + tile * blocks * 16 * TILE, scales, records, blocks, out, stride)
    else:
        product8(rows, weights + tile * blocks * 32 * TILE, scales, records, blocks, out, stride)


@kernel
def project(
    bits: int,
    start: int,
    stop: int,
    rows: int,
    weights: int,
    scales: int,
    records: int,
    blocks: int,
    out: int,
    stride: int,
    cap: float,
) -> None:
    """Tiles start..stop of out[rows, n], float32; with a cap > 0, cap * tanh(out / cap)."""
    for tile in range(start, stop):
        for first in range(0, rows, MOST_ROWS):
            members = min(MOST_ROWS, rows - first)
            at = out + first * stride + tile * 4 * TILE
            product(
                bits, tile, members, weights, scales, records + first * blocks * ACTIVATION_BYTES, blocks, at, stride
            )
            if cap > 0:
                softcap(at, stride, members, cap)


@kernel
def softcap(out: int, stride: int, rows: int, cap: float) -> None:
    inverse = np.float32(1.0) / cap
    for row in range(rows):
        at = out + row * stride
        store(at, full(cap) * tanh(load(at) * full(inverse)))


@kernel
def gated(
    bits: int,
    start: int,
    stop: int,
    units: int,
    rows: int,
    weights: int,
    scales: int,
    records: int,
    blocks: int,
    out: int,
    zero: int,
    factor: int,
    factor_stride: int,
    scratch: int,
) -> None:
    """Units start..stop of gelu(gate) * up, quantised: a unit is a block of 32 outputs.

    Args:
        units: of the whole matrix: the blocks of `out`.
        out: address of records for `rows` rows.
        zero: of the matrix that reads `out`.
        factor: 0 where the matrix holds two tiles of gate, then two of up, for each unit; else it holds gate alone
            and this is the address of the other factor, float32[rows, 32 * units] at `factor_stride` bytes.
        scratch: SCRATCH_BYTES of this thread.
    """
    stride = 4 * TILE * 4
    tiles = 2 if factor else 4
    for unit in range(start, stop):
        for first in range(0, rows, MOST_ROWS):
            members = min(MOST_ROWS, rows - first)
            group = records + first * blocks * ACTIVATION_BYTES
            for i in range(tiles):
                at = scratch + i * 4 * TILE
                product(bits, tiles * unit + i, members, weights, scales, group, blocks, at, stride)
            for row in range(members):
                gate = scratch + row * stride
                up = factor + (first + row) * factor_stride + unit * 128 if factor else gate + 128
                low, high = gelu(load(gate)) * load(up), gelu(load(gate + 64)) * load(up + 64)
                quantize_block(low, high, zero, activation_address(out, first + row, rows, unit, units))
