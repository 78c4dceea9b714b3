"""Matrices times activations: tiles shared among threads, rows in passes of up to eight."""

from __future__ import annotations

import inspect
from typing import Any, NamedTuple

import numpy as np
from numba import types

from ondevice.engines.simd.kernels.codes import (
    GROUPS4,
    GROUPS8,
    STEPS2,
    STEPS4,
    STEPS8,
)
from ondevice.engines.simd.kernels.float_tile import FLOAT_BITS, FLOAT_ROWS, float_product
from ondevice.engines.simd.kernels.functions import gelu, tanh
from ondevice.engines.simd.kernels.inputs import group_address, sum_codes, write_input
from ondevice.engines.simd.kernels.jit import LITERAL, emits, kernel
from ondevice.engines.simd.kernels.sizes import TILE
from ondevice.engines.simd.kernels.step_tile import EPILOGUE_BYTES, step_product
from ondevice.engines.simd.kernels.tile import MOST_ROWS, tile_product
from ondevice.engines.simd.kernels.vector import I64, full, load, store

SCRATCH_BYTES = MOST_ROWS * 4 * TILE * 4
"""Per thread: four tiles of eight rows."""


class PackedMatrix(NamedTuple):
    """A matrix as `pack` writes it: tiles of 16 rows, each with `blocks` blocks of 32 weights in a row."""

    product: int
    """The kind of its product: see `codes`."""
    tile_bytes: int
    """Of a tile's weights; `int2` and its siblings have their layout."""
    weights: int
    """Address of the first tile's."""
    scales: int
    """Address of the first tile's: fp16[block][16] where weights are in groups, else its epilogue: see `step_tile`."""
    blocks: int
    """Of a row: its weights / 32."""


class Activations(NamedTuple):
    """Rows that are multiplied with a matrix, as wide as its rows."""

    address: int
    """Of all rows', in groups of up to MOST_ROWS rows: see `inputs`."""
    rows: int
    form: int
    """Of the rows: see `inputs`."""


class FloatRows(NamedTuple):
    """Rows of float32."""

    address: int
    stride: int
    """Bytes to the next row."""


class InputRows(NamedTuple):
    """Where rows go that another matrix reads, as many as there are activations."""

    address: int
    """Of all rows', in groups of up to MOST_ROWS rows: see `inputs`."""
    blocks: int
    """Of a row: its numbers / 32."""
    form: int
    """Of the rows, as the matrix that reads them needs it: see `inputs`."""


@emits(types.void, LITERAL, LITERAL, *[types.int64] * 7)
def product_of_rows(
    builder: Any, scaled: int, bits: int, rows: Any, weights: Any, scales: Any, inputs: Any, blocks: Any, out: Any,
    stride: Any,
) -> None:  # fmt: skip
    """`tile_product`, or `step_product` where `scaled` is 0, for a number of rows, 1..MOST_ROWS, that is known only
    when the kernel runs: a switch over it.
    """
    emit = inspect.unwrap(tile_product if scaled else step_product)  # the function that emits its code
    cases = [builder.append_basic_block(f"rows{number}") for number in range(1, MOST_ROWS + 1)]
    after = builder.append_basic_block("after")
    switch = builder.switch(rows, cases[-1])
    for number, case in enumerate(cases, 1):
        if case is not cases[-1]:
            switch.add_case(I64(number), case)
        builder.position_at_end(case)
        emit(builder, bits, number, weights, scales, inputs, blocks, out, stride)
        builder.branch(after)
    builder.position_at_end(after)


@kernel
def groups4(rows: int, weights: int, scales: int, inputs: int, blocks: int, out: int, stride: int) -> None:
    """`tile_product` of 4-bit weights."""
    product_of_rows(1, 4, rows, weights, scales, inputs, blocks, out, stride)


@kernel
def groups8(rows: int, weights: int, scales: int, inputs: int, blocks: int, out: int, stride: int) -> None:
    """`tile_product` of 8-bit weights."""
    product_of_rows(1, 8, rows, weights, scales, inputs, blocks, out, stride)


@kernel
def steps2(rows: int, weights: int, scales: int, inputs: int, blocks: int, out: int, stride: int) -> None:
    """`step_product` of 2-bit weights."""
    product_of_rows(0, 2, rows, weights, scales, inputs, blocks, out, stride)


@kernel
def steps4(rows: int, weights: int, scales: int, inputs: int, blocks: int, out: int, stride: int) -> None:
    """`step_product` of 4-bit weights."""
    product_of_rows(0, 4, rows, weights, scales, inputs, blocks, out, stride)


@kernel
def steps8(rows: int, weights: int, scales: int, inputs: int, blocks: int, out: int, stride: int) -> None:
    """`step_product` of 8-bit weights."""
    product_of_rows(0, 8, rows, weights, scales, inputs, blocks, out, stride)


@emits(types.void, LITERAL, *[types.int64] * 7)
def float_product_of(
    builder: Any, rows: int, bits: Any, weights: Any, scales: Any, inputs: Any, blocks: Any, out: Any, stride: Any
) -> None:
    """`float_product` of weights of as many bits as the kernel is told when it runs: a switch over them."""
    emit = inspect.unwrap(float_product)
    after = builder.append_basic_block("after")
    switch = builder.switch(bits, after)
    for width in FLOAT_BITS:
        case = builder.append_basic_block(f"bits{width}")
        switch.add_case(I64(width), case)
        builder.position_at_end(case)
        emit(builder, width, rows, weights, scales, inputs, blocks, out, stride)
        builder.branch(after)
    builder.position_at_end(after)


@kernel
def floats(bits: int, rows: int, weights: int, scales: int, inputs: int, blocks: int, out: int, stride: int) -> None:
    """`float_product` of any number of rows: those that fill no pass go one by one, with the same bits."""
    row = 0
    while row < rows:
        x, to = inputs + 128 * blocks * row, out + stride * row
        if rows - row < FLOAT_ROWS:
            float_product_of(1, bits, weights, scales, x, blocks, to, stride)
            row += 1
        else:
            float_product_of(FLOAT_ROWS, bits, weights, scales, x, blocks, to, stride)
            row += FLOAT_ROWS


@kernel
def matrix_of(matrix: PackedMatrix, tiles: int) -> PackedMatrix:
    """The matrix that begins so many tiles behind another of equal width."""
    weights = matrix.weights + tiles * matrix.tile_bytes
    scales = matrix.scales + tiles * scale_bytes(matrix.product, matrix.blocks)
    return PackedMatrix(matrix.product, matrix.tile_bytes, weights, scales, matrix.blocks)


@kernel
def scale_bytes(product: int, blocks: int) -> Any:
    """Of a tile's scales, or its epilogue."""
    return 2 * TILE * blocks if product <= GROUPS8 else EPILOGUE_BYTES


@kernel
def product(matrix: PackedMatrix, tile: int, rows: int, inputs: int, out: int, stride: int) -> None:
    """out[r, n] = row n of one tile . row r of the activations, for 1..MOST_ROWS rows.

    Args:
        tile: number of the tile in its matrix.
        rows: of activations.
        inputs: address of these rows' group, in the form that the matrix reads.
        out: address of float32[rows, 16].
        stride: bytes from a row of `out` to the next.
    """
    kind, blocks = matrix.product, matrix.blocks
    weights = matrix.weights + tile * matrix.tile_bytes
    scales = matrix.scales + tile * scale_bytes(kind, blocks)
    if kind == GROUPS4:
        groups4(rows, weights, scales, inputs, blocks, out, stride)
    elif kind == GROUPS8:
        groups8(rows, weights, scales, inputs, blocks, out, stride)
    elif kind == STEPS2:
        steps2(rows, weights, scales, inputs, blocks, out, stride)
    elif kind == STEPS4:
        steps4(rows, weights, scales, inputs, blocks, out, stride)
    elif kind == STEPS8:
        steps8(rows, weights, scales, inputs, blocks, out, stride)
    else:
        floats(matrix.tile_bytes // (4 * TILE * blocks), rows, weights, scales, inputs, blocks, out, stride)


@kernel
def project(matrix: PackedMatrix, activations: Activations, out: FloatRows, cap: float, start: int, stop: int) -> None:
    """Tiles start..stop of matrix times activations, float32[rows, n]; with a cap > 0, cap * tanh(product / cap)."""
    sum_codes(activations.form, activations.address, activations.rows, matrix.blocks)
    for tile in range(start, stop):
        for first in range(0, activations.rows, MOST_ROWS):
            members = min(MOST_ROWS, activations.rows - first)
            group = group_address(activations.form, activations.address, first, matrix.blocks)
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
    out: InputRows,
    scratch: int,
    start: int,
    stop: int,
) -> None:
    """Units start..stop of gelu(gate) * up, for the matrix that reads it: a unit is a block of 32 outputs.

    Args:
        matrix: two tiles of gate, then two of up, for each unit; or gate alone.
        factor: where the matrix is gate alone, what takes the place of up: [rows, 32 * out.blocks]; else its address
            is 0.
        scratch: address of SCRATCH_BYTES of this thread.
    """
    stride = 4 * TILE * 4
    tiles = 2 if factor.address else 4
    sum_codes(activations.form, activations.address, activations.rows, matrix.blocks)
    for unit in range(start, stop):
        for first in range(0, activations.rows, MOST_ROWS):
            members = min(MOST_ROWS, activations.rows - first)
            group = group_address(activations.form, activations.address, first, matrix.blocks)
            for i in range(tiles):
                product(matrix, tiles * unit + i, members, group, scratch + i * 4 * TILE, stride)
            for row in range(members):
                gate = scratch + row * stride
                up = factor.address + (first + row) * factor.stride + unit * 128 if factor.address else gate + 128
                low, high = gelu(load(gate)) * load(up), gelu(load(gate + 64)) * load(up + 64)
                write_input(low, high, out.form, out.address, first + row, activations.rows, unit, out.blocks)
