"""The steps that choose experts for rows, and add what these have made of them; `projection_steps` has what multiplies.

Rows are sorted by expert, so that an expert's weights are read once for all rows that chose it. A row's choice, its
weights and the order of its sum depend on nothing but the row.
"""

from __future__ import annotations

import numpy as np

from ondevice.engines.simd.kernels.best import best_of
from ondevice.engines.simd.kernels.expert_layouts import Choose, Mix, Score, Spread
from ondevice.engines.simd.kernels.functions import exp
from ondevice.engines.simd.kernels.groups import count_groups, read_group
from ondevice.engines.simd.kernels.jit import kernel
from ondevice.engines.simd.kernels.memory import bits_float, read_f32, read_i64, write_f32, write_i64
from ondevice.engines.simd.kernels.norm import inverse_rms, norm, norm_quantize_row
from ondevice.engines.simd.kernels.shares import first_unit
from ondevice.engines.simd.kernels.slots import EXPERTS_READ
from ondevice.engines.simd.kernels.step_layouts import read_step
from ondevice.engines.simd.kernels.tables import dot
from ondevice.engines.simd.kernels.tile import ACTIVATION_BYTES, MOST_ROWS
from ondevice.engines.simd.kernels.vector import LANES, fma, full, load, store

PART = 16
"""Experts that a row is scored for at a time: their part of the router, 180 KB of 26B-A4B, stays in the cache while all
rows pass."""
_ZERO, _ALONE = np.float32(0.0), np.int64(1)


@kernel
def score(words: np.ndarray, state: np.ndarray, thread: int, threads: int) -> None:
    """scores = norm(h) @ router.T, float32[rows, experts]; activations = norm(h), quantised."""
    step = read_step(Score, words)
    width, experts, eps = step.width, step.experts, bits_float(np.int32(step.eps))
    rows, parts = state[step.row_set], (step.experts + PART - 1) // PART
    line = width // 32 * ACTIVATION_BYTES
    for unit in range(first_unit(rows * parts, thread, threads), first_unit(rows * parts, thread + 1, threads)):
        part, row = unit // rows, unit % rows
        at = step.h + 4 * row * width
        scale = inverse_rms(at, width, eps)
        for expert in range(part * PART, min((part + 1) * PART, experts)):
            found = dot(step.weights + 4 * expert * width, at, width) * scale
            write_f32(step.scores + 4 * (row * experts + expert), found)
        if part == 0:
            to = step.activations + row * line
            norm_quantize_row(at, step.norm, to, np.int64(0), _ALONE, width, step.form, eps)


@kernel
def choose(words: np.ndarray, state: np.ndarray) -> None:
    """The experts with the best scores of each row, of equal ones the first; then all pairs, sorted by expert."""
    step = read_step(Choose, words)
    rows, experts, top = state[step.row_set], step.experts, step.top
    chosen, counts, groups = step.chosen, step.counts, step.groups
    for expert in range(experts):
        write_i64(counts + 8 * expert, np.int64(0))
    for row in range(rows):
        own, weights = chosen + 8 * row * top, step.weights + 4 * row * top
        best_of(step.scores + 4 * row * experts, experts, own, top)
        share_out(step.scores + 4 * row * experts, own, top, step.scale, weights)
        for i in range(top):
            place = counts + 8 * read_i64(own + 8 * i)
            write_i64(place, read_i64(place) + 1)
    number, first = 0, np.int64(0)
    for expert in range(experts):
        count = read_i64(counts + 8 * expert)
        if count:
            write_i64(groups + 8 + 16 * number, np.int64(expert))
            write_i64(groups + 16 + 16 * number, first)
            number += 1
        write_i64(counts + 8 * expert, first)
        first += count
    write_i64(groups, np.int64(number))
    write_i64(groups + 16 + 16 * number, first)
    for row in range(rows):
        for i in range(row * top, (row + 1) * top):
            place = counts + 8 * read_i64(chosen + 8 * i)
            pair = read_i64(place)
            write_i64(place, pair + 1)
            write_i64(step.pairs + 8 * pair, np.int64(row))
            write_i64(chosen + 8 * i, pair)
    state[EXPERTS_READ] += number


@kernel
def share_out(scores: int, chosen: int, top: int, scale: int, weights: int) -> None:
    """weights = softmax of the chosen scores, times the chosen experts' scale, float32[top].

    Sixteen at a time, the last of them past the end, where the next row's weights will be.
    """
    best = read_f32(scores + 4 * read_i64(chosen))
    for i in range(top):
        write_f32(weights + 4 * i, read_f32(scores + 4 * read_i64(chosen + 8 * i)) - best)
    for i in range(0, top, LANES):
        store(weights + 4 * i, exp(load(weights + 4 * i)))
    total = _ZERO
    for i in range(top):
        total += read_f32(weights + 4 * i)
    for i in range(top):
        own = read_f32(scale + 4 * read_i64(chosen + 8 * i))
        write_f32(weights + 4 * i, read_f32(weights + 4 * i) / total * own)


@kernel
def spread(words: np.ndarray, thread: int, threads: int) -> None:
    """out = the activations of every pair's row, grouped by expert."""
    step = read_step(Spread, words)
    blocks, count = step.blocks, count_groups(step.groups)
    line = blocks * ACTIVATION_BYTES
    pairs = read_i64(step.groups + 16 + 16 * count)
    start, stop = pairs * thread // threads, pairs * (thread + 1) // threads
    for number in range(count):
        group = read_group(step.groups, number, pairs)
        for pair in range(max(start, group.first), min(stop, group.first + group.rows)):
            source = step.source + read_i64(step.pairs + 8 * pair) * line
            row = pair - group.first
            place = row % MOST_ROWS
            members = min(MOST_ROWS, group.rows - (row - place))
            to = step.out + (pair - place) * line + place * ACTIVATION_BYTES
            for block in range(blocks):
                for i in range(0, ACTIVATION_BYTES, 8):
                    write_i64(to + block * members * ACTIVATION_BYTES + i, read_i64(source + i))
                source += ACTIVATION_BYTES


@kernel
def mix(words: np.ndarray, state: np.ndarray, thread: int, threads: int) -> None:
    """x = norm(x) + norm(sum of weight * output), float32[rows, width]: the best expert's output first."""
    step = read_step(Mix, words)
    width, top, eps = step.width, step.top, bits_float(np.int32(step.eps))
    rows = state[step.row_set]
    for row in range(first_unit(rows, thread, threads), first_unit(rows, thread + 1, threads)):
        x, chosen, weights = step.x + 4 * row * width, step.chosen + 8 * row * top, step.weights + 4 * row * top
        own = step.outputs + 4 * width * read_i64(chosen)  # no other row reads the outputs of this one's experts
        for i in range(0, 4 * width, 64):
            total = load(own + i) * full(read_f32(weights))
            for j in range(1, top):
                output = load(step.outputs + 4 * width * read_i64(chosen + 8 * j) + i)
                total = fma(output, full(read_f32(weights + 4 * j)), total)
            store(own + i, total)
        norm(own, step.norm, own, width, eps)
        norm(x, step.weight, x, width, eps)
        for i in range(0, 4 * width, 64):
            store(x + i, load(x + i) + load(own + i))
