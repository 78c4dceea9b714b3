"""A thread's share of the steps that multiply by matrices, and of what is done with the products: `projection_layouts`.

`words` is a step's row of the plan, int64[WIDTH], with the fields of its layout; `state` are the forward's slots;
`claims` is the address of the int64 from which threads claim the units of the step.
"""

from __future__ import annotations

import numpy as np

from ondevice.engines.simd.kernels.attention_rows import read_sequence, sequence_of, source_row
from ondevice.engines.simd.kernels.functions import exp
from ondevice.engines.simd.kernels.groups import count_groups, read_group
from ondevice.engines.simd.kernels.heads import part_bytes, rotated_head, to_key, to_value
from ondevice.engines.simd.kernels.inputs import group_address
from ondevice.engines.simd.kernels.jit import kernel
from ondevice.engines.simd.kernels.memory import bits_float, read_i64
from ondevice.engines.simd.kernels.norm import norm
from ondevice.engines.simd.kernels.project import (
    Activations,
    FloatRows,
    InputRows,
    PackedMatrix,
    gated,
    matrix_of,
    project,
)
from ondevice.engines.simd.kernels.projection_layouts import RELU, SILU, Activate, Gated, Head, Project
from ondevice.engines.simd.kernels.shares import claim_part, first_unit
from ondevice.engines.simd.kernels.slots import CACHE_BITS, CACHES, COSINES, ROTARY_STRIDE, SINES
from ondevice.engines.simd.kernels.step_layouts import read_step
from ondevice.engines.simd.kernels.vector import full, load, maximum, store


@kernel
def project_share(words: np.ndarray, state: np.ndarray, threads: int, claims: int) -> None:
    """out = softcap(activations @ matrix.T), float32[rows, 16 * tiles], of int8 activations and a quantised matrix.

    Threads claim tiles of 16 outputs.
    """
    step = read_step(Project, words)
    row_set, blocks, tiles, groups = step.row_set, step.blocks, step.tiles, step.groups
    matrix = PackedMatrix(step.product, step.tile_bytes, step.weights, step.scales, blocks)
    form, stride, cap = step.form, step.stride, bits_float(np.int32(step.cap))
    out = state[step.out_slot] if step.out_slot else step.out
    every = tiles * count_groups(groups)
    start, stop = claim_part(claims, every, threads)
    while start < stop:
        while start < stop:
            group = read_group(groups, start // tiles, state[row_set])
            first = start % tiles
            count = min(tiles - first, stop - start)
            project(
                matrix_of(matrix, group.matrix * tiles),
                Activations(group_address(form, step.activations, group.first, blocks), group.rows, form),
                FloatRows(out + group.first * stride, stride),
                cap,
                first,
                first + count,
            )
            start += count
        start, stop = claim_part(claims, every, threads)


@kernel
def gated_share(words: np.ndarray, state: np.ndarray, threads: int, claims: int, scratch: int) -> None:
    """out = gelu(activations @ gate.T) * up, quantised, int8[rows, 32 * units]; up = activations @ up.T, or `factor`.

    Threads claim units of 32 outputs. `scratch` is the address of this thread's working memory.
    """
    step = read_step(Gated, words)
    row_set, blocks, units, groups = step.row_set, step.blocks, step.units, step.groups
    matrix = PackedMatrix(step.product, step.tile_bytes, step.weights, step.scales, blocks)
    form, factor = step.form, FloatRows(step.factor, step.factor_stride)
    every, tiles = units * count_groups(groups), units * (2 if step.factor else 4)
    start, stop = claim_part(claims, every, threads)
    while start < stop:
        while start < stop:
            group = read_group(groups, start // units, state[row_set])
            first = start % units
            count = min(units - first, stop - start)
            gated(
                matrix_of(matrix, group.matrix * tiles),
                Activations(group_address(form, step.activations, group.first, blocks), group.rows, form),
                factor,
                InputRows(group_address(step.out_form, step.out, group.first, units), units, step.out_form),
                scratch,
                first,
                first + count,
            )
            start += count
        start, stop = claim_part(claims, every, threads)


@kernel
def head(words: np.ndarray, state: np.ndarray, thread: int, threads: int, scratch: int) -> None:
    """query = rotate(norm(query)) in place; rotate(norm(key)) and norm(value) go to a row of the sequence's cache.

    A unit is a head of a row, float32[size]. Keys and values are left out where the layer reads another layer's cache.
    `scratch` is the address of this thread's float32[size].
    """
    step = read_step(Head, words)
    row_set, x, stride, size = step.row_set, step.x, step.stride, step.size
    query_heads, kv_heads, key_norm = step.query_heads, step.kv_heads, step.key_norm
    kind, cache, eps = step.kind, CACHES + step.cache, bits_float(np.int32(step.eps))
    units = query_heads + (kv_heads if key_norm else 0)
    for unit in range(
        first_unit(state[row_set] * units, thread, threads), first_unit(state[row_set] * units, thread + 1, threads)
    ):
        row, number = unit // units, unit % units
        at = x + row * stride + 4 * number * size
        rotary = source_row(state, row_set, row) * state[ROTARY_STRIDE]
        cosines, sines = state[COSINES + kind] + rotary, state[SINES + kind] + rotary
        if number < query_heads:
            rotated_head(at, step.query_norm, cosines, sines, size, eps)
            continue
        number -= query_heads
        record = sequence_of(state, row_set, row)
        sequence = read_sequence(record, kind)
        cache_row = sequence.length - sequence.base + row - sequence.first_row
        bits, own = state[CACHE_BITS], number * part_bytes(state[CACHE_BITS], size)
        line = kv_heads * part_bytes(bits, size)
        norm(x + row * stride + 4 * (step.value + number * size), step.value_norm, scratch, size, eps)
        to_value(bits, scratch, read_i64(record + 8 * (cache + 1)) + own, cache_row, line, size)
        rotated_head(at, key_norm, cosines, sines, size, eps)
        to_key(bits, at, read_i64(record + 8 * cache) + own, cache_row, line, size)


@kernel
def activate(words: np.ndarray, state: np.ndarray, thread: int, threads: int) -> None:
    """out = function(source) + added, float32[rows, width], with the same `added` float32[width] for every row."""
    step = read_step(Activate, words)
    source, out, width, function, added = step.source, step.out, step.width, step.function, step.added
    lanes, zero, one = state[step.row_set] * (width // 16), full(np.float32(0.0)), full(np.float32(1.0))
    for unit in range(first_unit(lanes, thread, threads), first_unit(lanes, thread + 1, threads)):
        x = load(source + 64 * unit)
        if function == SILU:
            x = x / (one + exp(zero - x))
        elif function == RELU:
            x = maximum(x, zero)
        if added:
            x = x + load(added + 64 * (unit % (width // 16)))
        store(out + 64 * unit, x)
