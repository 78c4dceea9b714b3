"""A packed matrix times rows of activations: tile by tile, a group of rows at a time.

The steps come first: a thread's share of the tiles of a matrix. `project` computes some tiles of out = activations @
weights.T, `gated` some blocks of f(gate) * up. The code of a tile's product is chosen by the matrix's kind of product
and the number of rows; `tiles` and `epilogue_tiles` emit it, for the layouts of `formats`.
"""

from __future__ import annotations

import inspect
from typing import Any, NamedTuple

import numpy as np
from numba import types

from ondevice.engines.simd.kernels.activations import MAX_GROUP_ROWS, group_address, sum_codes, write_input
from ondevice.engines.simd.kernels.contract.matrices import (
    EPILOGUE_BYTES,
    GROUPS,
    GROUPS4,
    GROUPS4_AFFINE,
    GROUPS4_E2M1,
    GROUPS4_TABLE,
    GROUPS8,
    PRODUCTS,
    STEPS2,
    STEPS4,
    STEPS8,
    TILE,
)
from ondevice.engines.simd.kernels.contract.steps import CLAMPED, RELU, SILU, Activate, Gated, PackedMatrix, Project
from ondevice.engines.simd.kernels.epilogue_tiles import FLOAT_BITS, FLOAT_ROWS, float_product, step_product
from ondevice.engines.simd.kernels.isa.dot import emit_cases
from ondevice.engines.simd.kernels.isa.jit import LITERAL, emits, read_step
from ondevice.engines.simd.kernels.isa.memory import bits_float, claim_part, first_unit, read_i64
from ondevice.engines.simd.kernels.isa.vector import (
    I64,
    clamped_swiglu,
    full,
    gelu,
    load,
    maximum,
    silu,
    softcap,
    store,
)
from ondevice.engines.simd.kernels.tiles import tile_product
from ondevice.native.functions import kernel


@kernel
def project_share(words: np.ndarray, state: np.ndarray, thread: int, threads: int, claims: int) -> None:
    """out = softcap(activations @ matrix.T + bias), float32[rows, 16 * tiles]. Threads claim tiles of 16 outputs.

    With groups of rows, each of which has its own matrix, the tiles of all groups are claimed as one list.
    """
    step = read_step(Project, words)
    row_set, matrix, tiles, groups = step.row_set, step.matrix, step.tiles, step.groups
    form, stride, cap = step.form, step.stride, bits_float(np.int32(step.cap))
    out = state[step.out_slot] if step.out_slot else step.out
    every = tiles * count_groups(groups)
    start, stop = claim_part(claims, every, thread, threads)
    while start < stop:
        while start < stop:
            group = read_group(groups, start // tiles, state[row_set])
            first = start % tiles
            count = min(tiles - first, stop - start)
            project(
                matrix_of(matrix, group.matrix * tiles),
                Activations(group_address(form, step.activations, group.first, matrix.blocks), group.rows, form),
                FloatRows(out + group.first * stride, stride),
                cap,
                first,
                first + count,
            )
            start += count
        start, stop = claim_part(claims, every, thread, threads)


@kernel
def gated_share(words: np.ndarray, state: np.ndarray, thread: int, threads: int, claims: int, scratch: int) -> None:
    """out = function(activations @ gate.T) * (activations @ up.T, or `factor`), quantised, [rows, 32 * units].

    Threads claim units of 32 outputs. `scratch` is the address of this thread's working memory.
    """
    step = read_step(Gated, words)
    row_set, matrix, units, groups = step.row_set, step.matrix, step.units, step.groups
    form, factor = step.form, FloatRows(step.factor, step.factor_stride)
    every, tiles = units * count_groups(groups), units * (2 if step.factor else 4)
    start, stop = claim_part(claims, every, thread, threads)
    while start < stop:
        while start < stop:
            group = read_group(groups, start // units, state[row_set])
            first = start % units
            count = min(units - first, stop - start)
            gated(
                matrix_of(matrix, group.matrix * tiles),
                Activations(group_address(form, step.activations, group.first, matrix.blocks), group.rows, form),
                factor,
                step.function,
                InputRows(group_address(step.out_form, step.out, group.first, units), units, step.out_form),
                scratch,
                first,
                first + count,
            )
            start += count
        start, stop = claim_part(claims, every, thread, threads)


@kernel
def activate(words: np.ndarray, state: np.ndarray, thread: int, threads: int) -> None:
    """out = function(source) + added, float32[rows, width]; `added` is float32[width]. Units are 16 numbers."""
    step = read_step(Activate, words)
    source, out, width, function, added = step.source, step.out, step.width, step.function, step.added
    lanes, zero = state[step.row_set] * (width // 16), full(np.float32(0.0))
    for unit in range(first_unit(lanes, thread, threads), first_unit(lanes, thread + 1, threads)):
        x = load(source + 64 * unit)
        if function == SILU:
            x = silu(x)
        elif function == RELU:
            x = maximum(x, zero)
        if added:
            x = x + load(added + 64 * (unit % (width // 16)))
        store(out + 64 * unit, x)


class Group(NamedTuple):
    """Neighbouring rows that are multiplied with the same matrix: all rows, or those that chose one expert.

    matrix : number of the matrix
    first : number of the first row
    rows : number of rows
    """

    matrix: int
    first: int
    rows: int


_NONE: Any = np.int64(0)


@kernel
def count_groups(groups: int) -> Any:
    """The number of groups of rows.

    groups : address of the groups, see `contract.steps.Choose`; 0 if all rows are one group
    """
    return read_i64(groups) if groups else np.int64(1)


@kernel
def read_group(groups: int, number: int, rows: int) -> Group:
    """One of the groups at an address; with address 0, the group of all `rows` rows."""
    if not groups:
        return Group(_NONE, _NONE, rows)
    at = groups + 8 + 16 * number
    first = read_i64(at + 8)
    return Group(read_i64(at), first, read_i64(at + 24) - first)


# Some tiles of one matrix.


class Activations(NamedTuple):
    """Rows that are multiplied with a matrix. Layout: `activations`.

    address : address of the first group of up to MAX_GROUP_ROWS rows
    rows : number of rows
    form : form of the rows
    """

    address: int
    rows: int
    form: int


class FloatRows(NamedTuple):
    """Rows of float32.

    address : address of the first row
    stride : bytes to the next row
    """

    address: int
    stride: int


class InputRows(NamedTuple):
    """The destination of rows that another matrix reads, as many as there are activations. Layout: `activations`.

    address : address of the first group of up to MAX_GROUP_ROWS rows
    blocks : blocks of a row
    form : form of the rows, as the matrix that reads them needs it
    """

    address: int
    blocks: int
    form: int


@kernel
def project(matrix: PackedMatrix, activations: Activations, out: FloatRows, cap: float, start: int, stop: int) -> None:
    """out = activations @ weights.T + bias for tiles start..stop - 1, float32; with a cap > 0, the softcap of that."""
    sum_codes(activations.form, activations.address, activations.rows, matrix.blocks)
    for tile in range(start, stop):
        for first in range(0, activations.rows, MAX_GROUP_ROWS):
            members = min(MAX_GROUP_ROWS, activations.rows - first)
            group = group_address(activations.form, activations.address, first, matrix.blocks)
            at = out.address + first * out.stride + tile * 4 * TILE
            product(matrix, tile, members, group, at, out.stride)
            add_bias(matrix, tile, members, at, out.stride)
            softcap(at, out.stride, members, TILE, cap)


@kernel
def add_bias(matrix: PackedMatrix, tile: int, rows: int, out: int, stride: int) -> None:
    """Add the bias of a tile's outputs, if the matrix has one, to float32[rows, 16], `stride` bytes from row to row."""
    if matrix.bias:
        bias = load(matrix.bias + 4 * TILE * tile)
        for row in range(rows):
            store(out + row * stride, load(out + row * stride) + bias)


@kernel
def gated(
    matrix: PackedMatrix,
    activations: Activations,
    factor: FloatRows,
    function: int,
    out: InputRows,
    scratch: int,
    start: int,
    stop: int,
) -> None:
    """Blocks start..stop - 1 of function(activations @ gate.T) * up, in the form of the matrix that reads them.

    Args:
        matrix: for each block of 32 outputs two tiles of gate, then two of up; or two tiles of gate only.
        activations: the input rows.
        factor: in place of up if the matrix has gate only, float32[rows, 32 * out.blocks]; else its address is 0.
        function: `contract.steps.SILU`, CLAMPED, or GELU.
        out: the destination.
        scratch: address of SCRATCH_BYTES of this thread.
        start, stop: blocks of outputs.
    """
    stride = 4 * TILE * 4
    tiles = 2 if factor.address else 4
    sum_codes(activations.form, activations.address, activations.rows, matrix.blocks)
    for unit in range(start, stop):
        for first in range(0, activations.rows, MAX_GROUP_ROWS):
            members = min(MAX_GROUP_ROWS, activations.rows - first)
            group = group_address(activations.form, activations.address, first, matrix.blocks)
            for i in range(tiles):
                product(matrix, tiles * unit + i, members, group, scratch + i * 4 * TILE, stride)
                add_bias(matrix, tiles * unit + i, members, scratch + i * 4 * TILE, stride)
            for row in range(members):
                gate = scratch + row * stride
                up = factor.address + (first + row) * factor.stride + unit * 128 if factor.address else gate + 128
                low, high = load(gate), load(gate + 64)
                if function == SILU:
                    low, high = silu(low) * load(up), silu(high) * load(up + 64)
                elif function == CLAMPED:
                    low, high = clamped_swiglu(low, load(up)), clamped_swiglu(high, load(up + 64))
                else:
                    low, high = gelu(low) * load(up), gelu(high) * load(up + 64)
                write_input(low, high, out.form, out.address, first + row, activations.rows, unit, out.blocks)


# One tile.


@kernel
def product(matrix: PackedMatrix, tile: int, rows: int, inputs: int, out: int, stride: int) -> None:
    """out[r, n] = row n of one tile . row r of the activations, for 1..MAX_GROUP_ROWS rows.

    Args:
        matrix: the matrix.
        tile: number of the tile in the matrix.
        rows: number of rows of activations.
        inputs: address of the group of these rows, in the form that the matrix reads.
        out: address of float32[rows, 16].
        stride: bytes from a row of `out` to the next.
    """
    kind, blocks = matrix.product, matrix.blocks
    weights = matrix.weights + tile * matrix.tile_bytes
    scales = matrix.scales + tile * scale_bytes(kind, blocks)
    if kind == GROUPS4:
        groups4(rows, weights, scales, inputs, blocks, out, stride, matrix.streamed)
    elif kind == GROUPS8:
        groups8(rows, weights, scales, inputs, blocks, out, stride, matrix.streamed)
    elif kind == GROUPS4_AFFINE:
        groups4_affine(rows, weights, scales, inputs, blocks, out, stride, matrix.streamed)
    elif kind == GROUPS4_TABLE:
        groups4_table(rows, weights, scales, inputs, blocks, out, stride, matrix.streamed)
    elif kind == GROUPS4_E2M1:
        groups4_e2m1(rows, weights, scales, inputs, blocks, out, stride, matrix.streamed)
    elif kind == STEPS2:
        steps2(rows, weights, scales, inputs, blocks, out, stride, matrix.streamed)
    elif kind == STEPS4:
        steps4(rows, weights, scales, inputs, blocks, out, stride, matrix.streamed)
    elif kind == STEPS8:
        steps8(rows, weights, scales, inputs, blocks, out, stride, matrix.streamed)
    else:
        floats(matrix.tile_bytes // (4 * TILE * blocks), rows, weights, scales, inputs, blocks, out, stride)


@kernel
def matrix_of(matrix: PackedMatrix, tiles: int) -> PackedMatrix:
    """The matrix that begins `tiles` tiles after another one of the same width and format."""
    weights = matrix.weights + tiles * matrix.tile_bytes
    scales = matrix.scales + tiles * scale_bytes(matrix.product, matrix.blocks)
    bias = matrix.bias + 4 * TILE * tiles if matrix.bias else matrix.bias
    return PackedMatrix(matrix.product, matrix.tile_bytes, weights, scales, matrix.blocks, bias, matrix.streamed)


@kernel
def scale_bytes(product: int, blocks: int) -> Any:
    """Bytes of a tile's scales and minimums, or of its epilogue."""
    if product == GROUPS4_AFFINE:
        return 4 * TILE * blocks
    in_groups = product in (GROUPS4, GROUPS4_TABLE, GROUPS4_E2M1, GROUPS8)
    return 2 * TILE * blocks if in_groups else EPILOGUE_BYTES


@emits(types.void, LITERAL, *[types.int64] * 8)
def product_of_rows(
    builder: Any, kind: int, rows: Any, weights: Any, scales: Any, inputs: Any, blocks: Any, out: Any, stride: Any,
    streamed: Any,
) -> None:  # fmt: skip
    """The product of a kind for 1..MAX_GROUP_ROWS rows: a switch over the number at run time."""
    layout, form = next(each for each, product in PRODUCTS.items() if product == kind)
    operands = weights, scales, inputs, blocks, out, stride

    def of_rows(number: int) -> None:
        # Without the decorator: the functions that emit code.
        if layout == GROUPS:
            inspect.unwrap(tile_product)(builder, kind, number, *operands, streamed)
        else:
            inspect.unwrap(step_product)(builder, form.bits, number, *operands)

    emit_cases(builder, rows, range(1, MAX_GROUP_ROWS + 1), of_rows)


def product_kernel(kind: int) -> Any:
    """A kernel of one kind of product: `product_of_rows`."""

    @kernel
    def multiply(
        rows: int, weights: int, scales: int, inputs: int, blocks: int, out: int, stride: int, streamed: int
    ) -> None:
        product_of_rows(kind, rows, weights, scales, inputs, blocks, out, stride, streamed)

    return multiply


groups4, groups8 = product_kernel(GROUPS4), product_kernel(GROUPS8)
groups4_affine = product_kernel(GROUPS4_AFFINE)
groups4_table, groups4_e2m1 = product_kernel(GROUPS4_TABLE), product_kernel(GROUPS4_E2M1)
steps2, steps4, steps8 = (product_kernel(kind) for kind in (STEPS2, STEPS4, STEPS8))


@emits(types.void, LITERAL, *[types.int64] * 7)
def float_product_of(
    builder: Any, rows: int, bits: Any, weights: Any, scales: Any, inputs: Any, blocks: Any, out: Any, stride: Any
) -> None:
    """`float_product` for weights of any width in FLOAT_BITS: a switch over the bits at run time."""
    # Not by `emit_cases`, whose last case takes all other values: it would read a narrower weight beyond its tile.
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
    """`float_product` for any number of rows. Rows that do not fill FLOAT_ROWS go one by one, with the same bits."""
    row = 0
    while row < rows:
        x, to = inputs + 128 * blocks * row, out + stride * row
        if rows - row < FLOAT_ROWS:
            float_product_of(1, bits, weights, scales, x, blocks, to, stride)
            row += 1
        else:
            float_product_of(FLOAT_ROWS, bits, weights, scales, x, blocks, to, stride)
            row += FLOAT_ROWS
