"""One function for each kind of step in a plan: a thread's share of it.

The files that `step_layouts` numbers have the fields of each kind, with their shapes. `words` is a step's row of the
plan, int64[WIDTH]; `state` are the forward's slots; `claims` is the address of the int64 from which threads claim the
units of the step.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ondevice.engines.simd.kernels.attention import (
    Output,
    Partials,
    attend_unit,
    begin_unit,
    parts_of,
    share_of_pairs,
)
from ondevice.engines.simd.kernels.attention_layouts import Attend
from ondevice.engines.simd.kernels.attention_rows import (
    KVHead,
    Pairs,
    Queries,
    read_sequence,
    scratch_at,
    sequence_of,
    source_row,
    state_bytes,
)
from ondevice.engines.simd.kernels.barrier import claim, claim_part
from ondevice.engines.simd.kernels.best import best_of
from ondevice.engines.simd.kernels.functions import exp, tanh
from ondevice.engines.simd.kernels.groups import count_groups, read_group
from ondevice.engines.simd.kernels.heads import part_bytes, rotated_head, to_key, to_value
from ondevice.engines.simd.kernels.inputs import group_address
from ondevice.engines.simd.kernels.jit import kernel
from ondevice.engines.simd.kernels.memory import bits_float, read_i64, write_f32, write_i64
from ondevice.engines.simd.kernels.norm import add_normed, norm, norm_quantize_row, quantize_row
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
from ondevice.engines.simd.kernels.row_layouts import Embed, PerLayer, Residual, Select
from ondevice.engines.simd.kernels.shortlist_layouts import CandidateLogits, CentroidScores, Shortlist
from ondevice.engines.simd.kernels.slots import (
    ALL,
    CACHE_BITS,
    CACHES,
    CANDIDATES,
    COSINES,
    COUNTERS,
    FIRST_ROW,
    LOGITS,
    MOST_PARTS,
    PARTIALS,
    ROTARY_STRIDE,
    ROW_COUNT,
    SCRATCH,
    SCRATCH_STRIDE,
    SEQUENCE_COUNT,
    SEQUENCES,
    SINES,
    TOKENS,
    WANTED,
)
from ondevice.engines.simd.kernels.step_layouts import read_step
from ondevice.engines.simd.kernels.tables import dot, dot_row, prefetch_row, read_row
from ondevice.engines.simd.kernels.vector import full, load, max_lanes, maximum, store

_ONE, _WANTED = np.int64(1), np.int64(WANTED)
"""With these as plain numbers, what takes them would be compiled once more for each."""

AHEAD = 4
"""Rows of a table from the one that is multiplied to the one that is prefetched, where they lie scattered."""


@kernel
def first_unit(units: int, thread: int, threads: int) -> int:
    """Where a thread's share of `units` begins; the next thread's beginning is its end."""
    return units * thread // threads


@kernel
def embed(words: np.ndarray, state: np.ndarray, thread: int, threads: int) -> None:
    """out[row] = table[tokens[row]] * factor, float32[width], for all rows of the forward."""
    step = read_step(Embed, words)
    factor = bits_float(np.int32(step.factor))
    rows = state[ALL]
    for row in range(first_unit(rows, thread, threads), first_unit(rows, thread + 1, threads)):
        token = read_i64(state[TOKENS] + 8 * row)
        out = step.out + row * step.out_stride
        read_row(step.codes, step.scales, step.half, step.bits, step.group, token, step.width, factor, out)


@kernel
def residual(words: np.ndarray, state: np.ndarray, thread: int, threads: int) -> None:
    """h = (h + norm(x)) * scalar, float32[rows, width], in place; then activations = quantised norm(h), or quantised h.

    Without an x, h stays as it is. With an `out_slot`, the rows that are quantised also go to the address there.
    """
    step = read_step(Residual, words)
    width, activations, form, eps = step.width, step.activations, step.form, bits_float(np.int32(step.eps))
    rows = state[step.row_set]
    for row in range(first_unit(rows, thread, threads), first_unit(rows, thread + 1, threads)):
        at = step.h + 4 * row * width
        if step.x:
            add_normed(at, step.x + 4 * row * width, step.weight, step.scalar, width, eps)
        if step.out_slot:
            out = state[step.out_slot] + 4 * row * width
            norm(at, step.next_weight, out, width, eps)
            quantize_row(out, activations, row, rows, width, form)
        elif step.next_weight:
            norm_quantize_row(at, step.next_weight, activations, row, rows, width, form, eps)
        elif activations:
            quantize_row(at, activations, row, rows, width, form)


@kernel
def per_layer(words: np.ndarray, state: np.ndarray, thread: int, threads: int) -> None:
    """context = (norm(context * context_factor) + table[tokens] * row_factor) * factor, float32[rows, layers, size].

    In place, for all rows of the forward. The norm is over the `size` numbers of a layer.
    """
    step = read_step(PerLayer, words)
    layers, size, eps = step.layers, step.size, bits_float(np.int32(step.eps))
    context_factor, factor = full(bits_float(np.int32(step.context_factor))), full(bits_float(np.int32(step.factor)))
    row_factor = bits_float(np.int32(step.row_factor))
    own, width = step.scratch + 4 * thread * layers * size, layers * size
    rows = state[ALL]
    for row in range(first_unit(rows, thread, threads), first_unit(rows, thread + 1, threads)):
        token = read_i64(state[TOKENS] + 8 * row)
        read_row(step.codes, step.scales, step.half, step.bits, step.group, token, width, row_factor, own)
        at = step.context + 4 * row * width
        for i in range(0, 4 * width, 64):
            store(at + i, load(at + i) * context_factor)
        for layer in range(layers):
            norm(at + 4 * layer * size, step.weight, at + 4 * layer * size, size, eps)
        for i in range(0, 4 * width, 64):
            store(at + i, (load(at + i) + load(own + i)) * factor)


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
def attend_share(words: np.ndarray, state: np.ndarray, thread: int, threads: int, claims: int) -> None:
    """activations = softmax(queries @ keys.T) @ values, quantised, int8[rows, query_heads * size]: causal attention.

    A unit is some pairs of a row and a query head, all of a sequence and a KV head, over all their positions or over a
    part of them. Threads claim one at a time: the later a row, the more keys it sees.
    """
    step = read_step(Attend, words)
    row_set, stride, kind, size = step.row_set, step.stride, step.kind, step.size
    query_heads, kv_heads, cache = step.query_heads, step.kv_heads, CACHES + step.cache
    group, bits, split = query_heads // kv_heads, state[CACHE_BITS], state[PARTIALS] != 0
    skipped, line, own = part_bytes(bits, size), kv_heads * part_bytes(bits, size), state_bytes(size)
    scratch = scratch_at(state[SCRATCH] + thread * state[SCRATCH_STRIDE], size)
    most_parts = state[MOST_PARTS]
    total = np.int64(0)
    for index in range(state[SEQUENCE_COUNT]):
        record = read_i64(state[SEQUENCES] + 8 * index)
        first_row, count = read_i64(record + 8 * (FIRST_ROW + row_set)), read_i64(record + 8 * (ROW_COUNT + row_set))
        sequence = read_sequence(record, kind)
        pairs = Pairs(sequence, kind, row_set, first_row, group, 0, count * group)
        total += kv_heads * count * group * (parts_of(state, pairs)[1] if split and count else 1)
    together = share_of_pairs(total, threads)
    unit, before = claim(claims, _ONE), np.int64(0)
    for index in range(state[SEQUENCE_COUNT]):
        record = read_i64(state[SEQUENCES] + 8 * index)
        first_row, count = read_i64(record + 8 * (FIRST_ROW + row_set)), read_i64(record + 8 * (ROW_COUNT + row_set))
        keys, values = read_i64(record + 8 * cache), read_i64(record + 8 * (cache + 1))
        sequence = read_sequence(record, kind)
        for kv_head in range(kv_heads):
            for first in range(0, count * group, together):
                pairs = Pairs(sequence, kind, row_set, first_row, group, first, min(together, count * group - first))
                if not split and before < unit:
                    before += 1
                    continue
                first_part, parts = parts_of(state, pairs)
                units = parts if split else np.int64(1)
                while unit < before + units:
                    queries = Queries(step.x + 4 * kv_head * group * size, stride, size)
                    head = KVHead(bits, keys + kv_head * skipped, values + kv_head * skipped, line)
                    blocks = query_heads * size // 32
                    output = Output(step.activations, state[row_set], kv_head * group * size // 32, blocks, step.form)
                    begin_unit(state, pairs, queries, head, scratch)
                    place = first_row * query_heads + kv_head * count * group + first
                    partials = Partials(
                        state[PARTIALS] + place * most_parts * own, most_parts, state[COUNTERS] + 8 * place
                    )
                    number = unit - before if units > 1 else np.int64(-1)
                    attend_unit(pairs, head, size, scratch, partials, first_part, parts, number, output)
                    unit = claim(claims, _ONE)
                before += units


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


@kernel
def centroid_scores(words: np.ndarray, state: np.ndarray, thread: int, threads: int) -> None:
    """out = weights @ x, float32[clusters], of float32[clusters, width] centroids and one row x."""
    step = read_step(CentroidScores, words)
    width = step.width
    for row in range(first_unit(step.clusters, thread, threads), first_unit(step.clusters, thread + 1, threads)):
        write_f32(step.out + 4 * row, dot(step.weights + 4 * width * row, step.x, width))


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


@kernel
def _candidate(chosen: int, ids: int, per_cluster: int, number: int) -> Any:
    """The place of a candidate among the clusters' tokens, and the token."""
    place = read_i64(chosen + 8 * (number // per_cluster)) * per_cluster + number % per_cluster
    return place, read_i64(ids + 8 * place)


@kernel
def candidate_logits(words: np.ndarray, state: np.ndarray, thread: int, threads: int) -> None:
    """logits[i] = softcap(table row . x) and candidates[i], for all tokens of a row's chosen clusters, in order.

    logits float32[rows, top * per_cluster] and candidates int64 of that shape. Threads share them all.
    """
    step = read_step(CandidateLogits, words)
    per_cluster, clustered, cap = step.per_cluster, step.clustered, bits_float(np.int32(step.cap))
    count = step.rows * step.top * per_cluster
    last = first_unit(count, thread + 1, threads)
    for i in range(first_unit(count, thread, threads), last):
        place, token = _candidate(step.chosen, step.ids, per_cluster, i)
        if not clustered:
            _, later = _candidate(step.chosen, step.ids, per_cluster, min(i + AHEAD, last - 1))
            prefetch_row(step.codes, step.scales, step.half, step.bits, step.group, later, step.width)
        write_i64(state[CANDIDATES] + 8 * i, token)
        row, x = place if clustered else token, step.x + 4 * step.width * (i // (step.top * per_cluster))
        logit = dot_row(step.codes, step.scales, step.half, step.bits, step.group, row, step.width, x)
        if cap > 0:
            logit = max_lanes(full(cap) * tanh(full(logit / cap)))
        write_f32(state[LOGITS] + 4 * i, logit)


@kernel
def shortlist(words: np.ndarray, thread: int, threads: int) -> None:
    """chosen = of every row, the indices of the `top` largest of float32[clusters] scores, largest first; equal ones in
    order.
    """
    step = read_step(Shortlist, words)
    for row in range(first_unit(step.rows, thread, threads), first_unit(step.rows, thread + 1, threads)):
        best_of(step.scores + 4 * row * step.stride, step.clusters, step.chosen + 8 * row * step.top, step.top)
