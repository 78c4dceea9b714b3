"""Quantised matrices times quantised activations: tiles shared among threads, rows in passes of up to eight."""

from __future__ import annotations

import inspect
from typing import Any, NamedTuple

import numpy as np
from numba import types

from ondevice.engines.simd.kernels.codes import INT4_NUMBER
from ondevice.engines.simd.kernels.functions import gelu, tanh
from ondevice.engines.simd.kernels.jit import LITERAL, emits, kernel
from ondevice.engines.simd.kernels.quantize import activation_address, quantize_block
from ondevice.engines.simd.kernels.sizes import TILE
from ondevice.engines.simd.kernels.tile import ACTIVATION_BYTES, MOST_ROWS, tile_product
from ondevice.engines.simd.kernels.vector import I64, full, load, store

SCRATCH_BYTES = MOST_ROWS * 4 * TILE * 4
"""Per thread: four tiles of eight rows."""


class PackedMatrix(NamedTuple):
    """A quantised matrix, as `pack` writes it: tiles of 16 rows, each with `blocks` blocks of 32 weights in a row."""

    number: int
    """Of the format of its weights: see `codes`."""
    tile_bytes: int
    """Of a tile's weights; the layout is in `tile`."""
    weights: int
    """Address of the first tile's."""
    scales: int
    """Address of the first tile's: fp16[tile][block][16]."""
    blocks: int
    """Of a row: its weights / 32."""


class Activations(NamedTuple):
    """Quantised rows that are multiplied with a matrix, as wide as its rows."""

    address: int
    """Of all rows', in groups of up to MOST_ROWS rows: see `quantize`."""
    rows: int


class FloatRows(NamedTuple):
    """Rows of float32."""

    address: int
    stride: int
    """Bytes to the next row."""


class QuantizedRows(NamedTuple):
    """Where quantised rows go, as many as there are activations."""

    address: int
    """Of all rows', in groups of up to MOST_ROWS rows: see `quantize`."""
    blocks: int
    """Of a row: its numbers / 32."""
    zero: int
    """The code of a zero weight in the matrix that reads them."""


@emits(types.void, LITERAL, *[types.int64] * 7)
def product_of_rows(
    builder: Any, bits: int, rows: Any, weights: Any, scales: Any, activations: Any, blocks: Any, out: Any, stride: Any
) -> None:
    """`tile_product` for a number of rows, 1..MOST_ROWS, that is known only when the kernel runs: a switch over it."""
    emit = inspect.unwrap(tile_product)  # the function that emits its code
    cases = [builder.append_basic_block(f"rows{number}") for number in range(1, MOST_ROWS + 1)]
    after = builder.append_basic_block("after")
    switch = builder.switch(rows, cases[-1])
    for number, case in enumerate(cases, 1):
        if case is not cases[-1]:
            switch.add_case(I64(number), case)
        builder.position_at_end(case)
        emit(builder, bits, number, weights, scales, activations, blocks, out, stride)
        builder.branch(after)
    builder.position_at_end(after)


@kernel
def product4(rows: int, weights: int, scales: int, activations: int, blocks: int, out: int, stride: int) -> None:
    """`tile_product` of 4-bit weights."""
    product_of_rows(4, rows, weights, scales, activations, blocks, out, stride)


@kernel
def product8(rows: int, weights: int, scales: int, activations: int, blocks: int, out: int, stride: int) -> None:
    """`tile_product` of 8-bit weights."""
    product_of_rows(8, rows, weights, scales, activations, blocks, out, stride)


@kernel
def product(matrix: PackedMatrix, tile: int, rows: int, activations: int, out: int, stride: int) -> None:
    """out[r, n] = row n of one tile . row r of the activations, for 1..MOST_ROWS rows.

    Args:
        tile: number of the tile in its matrix.
        rows: of activations.
        activations: address of these rows' group.
        out: address of float32[rows, 16].
        stride: bytes from a row of `out` to the next.
    """
    weights = matrix.weights + tile * matrix.tile_bytes
    scales = matrix.scales + tile * matrix.blocks * 2 * TILE
    if matrix.number == INT4_NUMBER:
        product4(rows, weights, scales, activations, matrix.blocks, out, stride)
    else:
        product8(rows, weights, scales, activations, matrix.blocks, out, stride)


@kernel
def project(matrix: PackedMatrix, activations: Activations, out: FloatRows, cap: float, start: int, stop: int) -> None:
    """Tiles start..stop of matrix times activations, float32[rows, n]; with a cap > 0, cap * tanh(product / cap)."""
    for tile in range(start, stop):
        for first in range(0, activations.rows, MOST_ROWS):
            members = min(MOST_ROWS, activations.rows - first)
            group = activations.address + first * matrix.blocks * ACTIVATION_BYTES
            at = out.address + first * out.stride + tile * 4 * TILE
            product(matrix, tile, members, group, at, out.stride)
            if cap > 0:
                softcap(at, out.stride, members, cap)


@kernel
def softcap(out: int, stride: int, rows: int, cap: float) -> None:
    """cap * tanh(x / cap) in place, for float32[rows, 16] at `stride` bytes."""
    inverse = np.float32(1.0) / cap
    for row in range(rows):
        at = out + row * stride
        store(at, full(cap) * tanh(load(at) * full(inverse)))


@kernel
def gated(
    matrix: PackedMatrix,
    activations: Activations,
    factor: FloatRows,
    out: QuantizedRows,
    scratch: int,
    start: int,
    stop: int,
) -> None:
    """Units start..stop of gelu(gate) * up, quantised: a unit is a block of 32 outputs.

    Args:
        matrix: two tiles of gate, then two of up, for each unit; or gate alone.
        factor: where the matrix is gate alone, what takes the place of up: [rows, 32 * out.blocks]; else its address
            is 0.
        scratch: address of SCRATCH_BYTES of this thread.
    """
    stride = 4 * TILE * 4
    tiles = 2 if factor.address else 4
    for unit in range(start, stop):
        for first in range(0, activations.rows, MOST_ROWS):
            members = min(MOST_ROWS, activations.rows - first)
            group = activations.address + first * matrix.blocks * ACTIVATION_BYTES
            for i in range(tiles):
                product(matrix, tiles * unit + i, members, group, scratch + i * 4 * TILE, stride)
            for row in range(members):
                gate = scratch + row * stride
                up = factor.address + (first + row) * factor.stride + unit * 128 if factor.address else gate + 128
                low, high = gelu(load(gate)) * load(up), gelu(load(gate + 64)) * load(up + 64)
                to = activation_address(out.address, first + row, activations.rows, unit, out.blocks)
                quantize_block(low, high, out.zero, to)
