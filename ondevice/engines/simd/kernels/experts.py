"""Steps of a layer's experts: score them, choose some for each row, group the rows by expert, sum their outputs.

The matrices of the chosen experts are multiplied by the steps of `project`, with groups of rows. Rows are sorted by
expert, so that an expert's weights are read once for all rows that chose it. A row's choice, its weights and the order
of its sum depend on the row only.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ondevice.engines.simd.kernels.activations import (
    MAX_GROUP_ROWS,
    ROW_BYTES,
    copy_block,
    inverse_rms,
    norm,
    norm_quantize_row,
)
from ondevice.engines.simd.kernels.contract.instruction_sets import LANES
from ondevice.engines.simd.kernels.contract.slots import EXPERTS_READ
from ondevice.engines.simd.kernels.contract.steps import Choose, Mix, Score, Spread
from ondevice.engines.simd.kernels.isa.jit import read_step
from ondevice.engines.simd.kernels.isa.memory import bits_float, first_unit, read_f32, read_i64, write_f32, write_i64
from ondevice.engines.simd.kernels.isa.vector import exp, fma, full, load, max_lanes, store
from ondevice.engines.simd.kernels.project import count_groups, read_group
from ondevice.engines.simd.kernels.rows import best_of
from ondevice.engines.simd.kernels.tables import dot
from ondevice.native.functions import kernel

PART = 16
"""Experts that are scored together: their part of the router, 180 KB for 26B-A4B, stays in the cache for all rows."""
_ZERO, _ONE, _ALONE = np.float32(0.0), np.float32(1.0), np.int64(1)
_ADDED = np.float32(1e-6)
"""Added to the sum of a row's sigmoids (Lfm2MoeTopKRouter)."""


@kernel
def score(words: np.ndarray, state: np.ndarray, thread: int, threads: int) -> None:
    """scores = norm(h) @ router.T + bias, or the sigmoids of that, float32[rows, experts]; activations = quantised
    norm(h).

    A unit of work is one row and PART experts.
    """
    step = read_step(Score, words)
    width, experts, eps = step.width, step.experts, bits_float(np.int32(step.eps))
    rows, parts = state[step.row_set], (step.experts + PART - 1) // PART
    line = width // 32 * ROW_BYTES
    for unit in range(first_unit(rows * parts, thread, threads), first_unit(rows * parts, thread + 1, threads)):
        part, row = unit // rows, unit % rows
        at = step.h + 4 * row * width
        scale = inverse_rms(at, width, eps)
        for expert in range(part * PART, min((part + 1) * PART, experts)):
            found = dot(step.weights + 4 * expert * width, at, width) * scale
            if step.bias:
                found += read_f32(step.bias + 4 * expert)
            if step.sigmoid:
                found = max_lanes(full(_ONE) / (full(_ONE) + exp(full(-found))))
            write_f32(step.scores + 4 * (row * experts + expert), found)
        if part == 0 and step.activations:
            to = step.activations + row * line
            norm_quantize_row(at, step.norm, to, np.int64(0), _ALONE, width, step.form, eps)


@kernel
def choose(words: np.ndarray, state: np.ndarray) -> None:
    """Choose the experts with the best scores for each row, the first of equal ones, and sort all pairs by expert.

    It runs on one thread.
    """
    step = read_step(Choose, words)
    rows, experts, top = state[step.row_set], step.experts, step.top
    chosen, counts, groups = step.chosen, step.counts, step.groups
    for expert in range(experts):
        write_i64(counts + 8 * expert, np.int64(0))
    for row in range(rows):
        own, weights = chosen + 8 * row * top, step.weights + 4 * row * top
        scores = step.scores + 4 * row * experts
        if step.selection:
            select(scores, step.selection_bias, experts, step.sigmoid, step.selection)
            best_of(step.selection, experts, own, top)
        else:
            best_of(scores, experts, own, top)
        if step.sigmoid:
            divide(scores, own, top, step.scale, weights)
        else:
            share_out(scores, own, top, experts if step.of_all else np.int64(0), step.scale, weights)
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
def select(scores: int, bias: int, experts: int, sigmoid: int, selection: int) -> None:
    """selection = sigmoids + bias, or the softmax of scores + bias, float32[experts]."""
    best, total = _ZERO, _ONE
    if not sigmoid:
        best, total = read_f32(scores), _ZERO
        for expert in range(experts):
            best = max(best, read_f32(scores + 4 * expert))
        for expert in range(experts):
            total += max_lanes(exp(full(read_f32(scores + 4 * expert) - best)))
    for expert in range(experts):
        found = read_f32(scores + 4 * expert)
        if not sigmoid:
            found = max_lanes(exp(full(found - best))) / total
        write_f32(selection + 4 * expert, found + read_f32(bias + 4 * expert))


@kernel
def share_out(scores: int, chosen: int, top: int, experts: int, scale: int, weights: int) -> None:
    """weights = softmax of the chosen scores, times the chosen experts' factors, float32[top].

    experts : the number of experts if the softmax is over the scores of all, else 0

    Numbers are written 16 at a time; those past the end fall where the next row's weights are written later.
    """
    best = read_f32(scores + 4 * read_i64(chosen))
    for i in range(top):  # a bias may have chosen another expert first
        best = max(best, read_f32(scores + 4 * read_i64(chosen + 8 * i)))
    for i in range(top):
        write_f32(weights + 4 * i, read_f32(scores + 4 * read_i64(chosen + 8 * i)) - best)
    for i in range(0, top, LANES):
        store(weights + 4 * i, exp(load(weights + 4 * i)))
    total = _ZERO
    for expert in range(experts):
        total += max_lanes(exp(full(read_f32(scores + 4 * expert) - best)))
    normalise(chosen, top, scale, weights, total if experts else sum_of(weights, top))


@kernel
def divide(scores: int, chosen: int, top: int, scale: int, weights: int) -> None:
    """weights = the chosen scores divided by their sum + 1e-6, times the chosen experts' factors, float32[top]."""
    for i in range(top):
        write_f32(weights + 4 * i, read_f32(scores + 4 * read_i64(chosen + 8 * i)))
    normalise(chosen, top, scale, weights, sum_of(weights, top) + _ADDED)


@kernel
def sum_of(weights: int, top: int) -> Any:
    """The sum of float32[top]."""
    total = _ZERO
    for i in range(top):
        total += read_f32(weights + 4 * i)
    return total


@kernel
def normalise(chosen: int, top: int, scale: int, weights: int, total: float) -> None:
    """weights = weights / total * the chosen experts' factors, float32[top]."""
    for i in range(top):
        own = read_f32(scale + 4 * read_i64(chosen + 8 * i))
        write_f32(weights + 4 * i, read_f32(weights + 4 * i) / total * own)


@kernel
def spread(words: np.ndarray, thread: int, threads: int) -> None:
    """out = the activations of each pair's row, in groups of up to MAX_GROUP_ROWS pairs of one expert."""
    step = read_step(Spread, words)
    blocks, count = step.blocks, count_groups(step.groups)
    line = blocks * ROW_BYTES
    pairs = read_i64(step.groups + 16 + 16 * count)
    start, stop = pairs * thread // threads, pairs * (thread + 1) // threads
    for number in range(count):
        group = read_group(step.groups, number, pairs)
        for pair in range(max(start, group.first), min(stop, group.first + group.rows)):
            source = step.source + read_i64(step.pairs + 8 * pair) * line
            row = pair - group.first
            place = row % MAX_GROUP_ROWS
            members = min(MAX_GROUP_ROWS, group.rows - (row - place))
            to = step.out + (pair - place) * line
            for block in range(blocks):
                copy_block(source + block * ROW_BYTES, to + block * members * ROW_BYTES, place, members)


@kernel
def mix(words: np.ndarray, state: np.ndarray, thread: int, threads: int) -> None:
    """x = norm(x) + norm(sum of weight * output), float32[rows, width], or without norms factor * x + that sum, or the
    sum alone.

    Outputs are added from the best expert on.
    """
    step = read_step(Mix, words)
    width, top, eps = step.width, step.top, bits_float(np.int32(step.eps))
    rows = state[step.row_set]
    for row in range(first_unit(rows, thread, threads), first_unit(rows, thread + 1, threads)):
        x, chosen, weights = step.x + 4 * row * width, step.chosen + 8 * row * top, step.weights + 4 * row * top
        own = step.outputs + 4 * width * read_i64(chosen)  # only this row reads the outputs of its pairs
        for i in range(0, 4 * width, 64):
            total = load(own + i) * full(read_f32(weights))
            for j in range(1, top):
                output = load(step.outputs + 4 * width * read_i64(chosen + 8 * j) + i)
                total = fma(output, full(read_f32(weights + 4 * j)), total)
            store(own + i, total)
        if step.weight:
            norm(own, step.norm, own, width, eps)
            norm(x, step.weight, x, width, eps)
            for i in range(0, 4 * width, 64):
                store(own + i, load(x + i) + load(own + i))
        elif step.factors:
            factor = full(read_f32(step.factors + 4 * row))
            for i in range(0, 4 * width, 64):
                store(own + i, fma(load(x + i), factor, load(own + i)))
        for i in range(0, 4 * width, 64):
            store(x + i, load(own + i))
