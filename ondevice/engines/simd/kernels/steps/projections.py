"""Steps that multiply rows with a matrix, and the functions between two of them: a thread's share of each.

`words` is the step's row of the plan, int64[WIDTH], with the fields of its layout; `state` holds the forward's slots;
`claims` is the address of the int64 from which threads claim units.
"""

from __future__ import annotations

import numpy as np

from ondevice.engines.simd.kernels.isa.jit import kernel, optional
from ondevice.engines.simd.kernels.isa.memory import bits_float
from ondevice.engines.simd.kernels.isa.vector import full, load, maximum, silu, store
from ondevice.engines.simd.kernels.matmul.activations import group_address
from ondevice.engines.simd.kernels.matmul.project import (
    Activations,
    FloatRows,
    InputRows,
    PackedMatrix,
    count_groups,
    gated,
    matrix_of,
    project,
    read_group,
)
from ondevice.engines.simd.kernels.steps.access import claim_part, first_unit, read_step
from ondevice.engines.simd.kernels.steps.layouts import RELU, SILU, Activate, Gated, Project


@kernel
def project_share(words: np.ndarray, state: np.ndarray, threads: int, claims: int) -> None:
    """out = softcap(activations @ matrix.T), float32[rows, 16 * tiles]. Threads claim tiles of 16 outputs.

    With groups of rows, each of which has its own matrix, the tiles of all groups are claimed as one list.
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
    """out = function(activations @ gate.T) * (activations @ up.T, or `factor`), quantised, [rows, 32 * units].

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
                step.function,
                InputRows(group_address(step.out_form, step.out, group.first, units), units, step.out_form),
                scratch,
                first,
                first + count,
            )
            start += count
        start, stop = claim_part(claims, every, threads)


@optional("heads")
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
