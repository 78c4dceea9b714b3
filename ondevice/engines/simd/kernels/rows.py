"""Steps on whole rows and the steps of a shortlist: for each, a function that runs a thread's share.

`words` is the step's row of the plan, int64[WIDTH], with the fields of its layout; `state` holds the forward's slots.
Units are rows, shared equally among the threads.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ondevice.engines.simd.kernels.activations import add_normed, norm, norm_quantize_row, quantize_row
from ondevice.engines.simd.kernels.attention.query_key_value import copy
from ondevice.engines.simd.kernels.attention.scratch import source_row
from ondevice.engines.simd.kernels.contract.slots import ALL, CANDIDATES, LOGITS, TOKENS, WANTED
from ondevice.engines.simd.kernels.contract.steps import (
    CandidateLogits,
    CentroidScores,
    ChooseClusters,
    Embed,
    PerLayer,
    Residual,
    Select,
)
from ondevice.engines.simd.kernels.isa.jit import read_step
from ondevice.engines.simd.kernels.isa.memory import bits_float, first_unit, read_f32, read_i64, write_f32, write_i64
from ondevice.engines.simd.kernels.isa.vector import fma, full, load, max_lanes, store, tanh
from ondevice.engines.simd.kernels.tables import dot, dot_row, prefetch_row, read_row
from ondevice.native.functions import kernel

_WANTED = np.int64(WANTED)
"""With a plain int, the functions that it is passed to would be compiled once more, for another type."""

_ONE = np.float32(1.0)


@kernel
def embed(words: np.ndarray, state: np.ndarray, thread: int, threads: int) -> None:
    """out[row] = table[tokens[row]] * factor, float32[width], for all rows of the forward."""
    step = read_step(Embed, words)
    factor = bits_float(np.int32(step.factor))
    rows = state[ALL]
    for row in range(first_unit(rows, thread, threads), first_unit(rows, thread + 1, threads)):
        token = read_i64(state[TOKENS] + 8 * row)
        out = step.out + row * step.out_stride
        read_row(step.table, token, factor, out)


@kernel
def residual(words: np.ndarray, state: np.ndarray, thread: int, threads: int) -> None:
    """h = (h + norm(x)) * scalar, float32[rows, width], in place; then activations = quantised norm(h), or quantised h.

    If the address of x is 0, h is unchanged; if that of the norm's weight is 0, x itself is added. With an `out_slot`,
    norm(h), or h without a norm, is also written to the address in that slot.
    """
    step = read_step(Residual, words)
    width, activations, form, eps = step.width, step.activations, step.form, bits_float(np.int32(step.eps))
    rows = state[step.row_set]
    for row in range(first_unit(rows, thread, threads), first_unit(rows, thread + 1, threads)):
        at = step.h + 4 * row * width
        if step.x and not step.weight:
            add(at, step.x + 4 * row * width, step.scalar, width)
        elif step.x:
            add_normed(at, step.x + 4 * row * width, step.weight, step.scalar, width, eps)
        if step.out_slot:
            out = state[step.out_slot] + 4 * row * width
            if step.next_weight:
                norm(at, step.next_weight, out, width, eps)
            else:
                copy(at, out, width)
            if activations:
                quantize_row(out, activations, row, rows, width, form)
        elif step.next_weight:
            norm_quantize_row(at, step.next_weight, activations, row, rows, width, form, eps)
        elif activations:
            quantize_row(at, activations, row, rows, width, form)


@kernel
def add(h: int, x: int, scalar: int, width: int) -> None:
    """h = (h + x) * scalar, float32[width]; `scalar` is the address of one float32, 0 for the factor 1."""
    factor = full(read_f32(scalar) if scalar else _ONE)
    for i in range(0, 4 * width, 64):
        store(h + i, (load(h + i) + load(x + i)) * factor)


@kernel
def per_layer(words: np.ndarray, state: np.ndarray, thread: int, threads: int) -> None:
    """context = (norm(context * context_factor) + table[tokens] * row_factor) * factor, float32[rows, layers, size].

    It runs in place, for all rows of the forward. The norm is over the `size` numbers of a layer.
    """
    step = read_step(PerLayer, words)
    layers, size, eps = step.layers, step.size, bits_float(np.int32(step.eps))
    context_factor, factor = full(bits_float(np.int32(step.context_factor))), full(bits_float(np.int32(step.factor)))
    row_factor = bits_float(np.int32(step.row_factor))
    own, width = step.scratch + 4 * thread * layers * size, layers * size
    rows = state[ALL]
    for row in range(first_unit(rows, thread, threads), first_unit(rows, thread + 1, threads)):
        token = read_i64(state[TOKENS] + 8 * row)
        read_row(step.table, token, row_factor, own)
        at = step.context + 4 * row * width
        for i in range(0, 4 * width, 64):
            store(at + i, load(at + i) * context_factor)
        for layer in range(layers):
            norm(at + 4 * layer * size, step.weight, at + 4 * layer * size, size, eps)
        for i in range(0, 4 * width, 64):
            store(at + i, (load(at + i) + load(own + i)) * factor)


@kernel
def select(words: np.ndarray, state: np.ndarray, thread: int, threads: int) -> None:
    """out[row] = source[wanted[row]], float32[width], for the wanted rows."""
    step = read_step(Select, words)
    bytes_of_row = 4 * step.width
    rows = state[WANTED]
    for row in range(first_unit(rows, thread, threads), first_unit(rows, thread + 1, threads)):
        at, to = step.source + bytes_of_row * source_row(state, _WANTED, row), step.out + bytes_of_row * row
        for i in range(0, bytes_of_row, 64):
            store(to + i, load(at + i))


# Shortlists: a drafter scores the tokens of a few clusters instead of the whole vocabulary.

AHEAD = 4
"""Distance in candidates from the table row that is multiplied to the one that is prefetched, if rows lie scattered."""


@kernel
def centroid_scores(words: np.ndarray, thread: int, threads: int) -> None:
    """out = weights @ x, float32[clusters], for centroids float32[clusters, width] and one row x."""
    step = read_step(CentroidScores, words)
    width = step.width
    for row in range(first_unit(step.clusters, thread, threads), first_unit(step.clusters, thread + 1, threads)):
        write_f32(step.out + 4 * row, dot(step.weights + 4 * width * row, step.x, width))


@kernel
def shortlist(words: np.ndarray, thread: int, threads: int) -> None:
    """chosen[row] = indices of the `top` largest scores of a row, largest first; the lower index first if scores are
    equal.
    """
    step = read_step(ChooseClusters, words)
    for row in range(first_unit(step.rows, thread, threads), first_unit(step.rows, thread + 1, threads)):
        best_of(step.scores + 4 * row * step.stride, step.clusters, step.chosen + 8 * row * step.top, step.top)


@kernel
def best_of(scores: int, count: int, chosen: int, top: int) -> None:
    """chosen = indices of the `top` largest of float32[count] scores, largest first; equal scores by index."""
    taken = 0
    for i in range(count):
        found = read_f32(scores + 4 * i)
        if taken == top and not found > read_f32(scores + 4 * read_i64(chosen + 8 * (top - 1))):
            continue
        at = taken if taken < top else top - 1
        while at > 0 and found > read_f32(scores + 4 * read_i64(chosen + 8 * (at - 1))):
            write_i64(chosen + 8 * at, read_i64(chosen + 8 * (at - 1)))
            at -= 1
        write_i64(chosen + 8 * at, np.int64(i))
        taken = min(taken + 1, top)


@kernel
def _candidate(chosen: int, ids: int, per_cluster: int, number: int) -> Any:
    """The index of a candidate among the tokens of all clusters, and its token id."""
    place = read_i64(chosen + 8 * (number // per_cluster)) * per_cluster + number % per_cluster
    return place, read_i64(ids + 8 * place)


@kernel
def candidate_logits(words: np.ndarray, state: np.ndarray, thread: int, threads: int) -> None:
    """logits[i] = softcap(table row . x) and candidates[i] = token id, for all tokens of a row's chosen clusters, in
    order.

    logits are float32[rows, top * per_cluster], candidates int64 of that shape. Units are candidates of all rows.
    """
    step = read_step(CandidateLogits, words)
    per_cluster, clustered, cap = step.per_cluster, step.clustered, bits_float(np.int32(step.cap))
    count = step.rows * step.top * per_cluster
    last = first_unit(count, thread + 1, threads)
    for i in range(first_unit(count, thread, threads), last):
        place, token = _candidate(step.chosen, step.ids, per_cluster, i)
        if not clustered:
            _, later = _candidate(step.chosen, step.ids, per_cluster, min(i + AHEAD, last - 1))
            prefetch_row(step.table, later)
        write_i64(state[CANDIDATES] + 8 * i, token)
        x = step.x + 4 * step.table.width * (i // (step.top * per_cluster))
        logit = dot_row(step.table, place if clustered else token, x)
        if cap > 0:
            logit = max_lanes(full(cap) * tanh(full(logit / cap)))
        write_f32(state[LOGITS] + 4 * i, logit)


@kernel
def subtract_product(out: int, left: int, right: int, stride: int, rows: int) -> None:
    """See `contract.entries.subtract_product`. `right`, 4 KB, stays in the first level of cache while all rows pass."""
    row = 0
    while row < rows:  # two rows at a time: of a last single one, twice the same
        own, other = stride * row, stride * min(row + 1, rows - 1)
        a, b, c, d = load(out + own), load(out + own + 64), load(out + other), load(out + other + 64)
        for i in range(32):
            low, high = load(right + stride * i), load(right + stride * i + 64)
            x, y = full(-read_f32(left + own + 4 * i)), full(-read_f32(left + other + 4 * i))
            a, b, c, d = fma(x, low, a), fma(x, high, b), fma(y, low, c), fma(y, high, d)
        store(out + own, a)
        store(out + own + 64, b)
        store(out + other, c)
        store(out + other + 64, d)
        row += 2
