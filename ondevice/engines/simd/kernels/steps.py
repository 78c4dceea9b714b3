"""The kinds of step a plan is made of. A step is a row of int64: its kind, then its arguments.

Arguments are addresses, sizes, slots of the forward's state, and the bits of float32 numbers. Every step shares its
work among the threads; `ondevice.engines.simd.plan` says what the arguments are.
"""

from __future__ import annotations

import numpy as np

from ondevice.engines.simd.kernels.attention import LINES, ROWS, Cache, Lines, Output, Queries, Rows, attend, source_row
from ondevice.engines.simd.kernels.attention_tile import HEADS
from ondevice.engines.simd.kernels.barrier import claim
from ondevice.engines.simd.kernels.heads import head_bytes, rotated_head, to_cache
from ondevice.engines.simd.kernels.jit import kernel
from ondevice.engines.simd.kernels.memory import bits_float, read_f32, read_i64, write_f32, write_i64
from ondevice.engines.simd.kernels.norm import add_normed, norm, norm_quantize_row, quantize_row
from ondevice.engines.simd.kernels.project import gated, project
from ondevice.engines.simd.kernels.slots import (
    BASE,
    CACHE_BITS,
    CACHES,
    CANDIDATES,
    COSINES,
    KIND_SLOTS,
    KINDS,
    LENGTH,
    LINE_MEMORY,
    LINE_STRIDE,
    SINES,
    TOKENS,
)
from ondevice.engines.simd.kernels.tables import dot, dot_row, read_row
from ondevice.engines.simd.kernels.vector import full, load, store

EMBED, RESIDUAL, PER_LAYER, PROJECT, GATED, HEAD, ATTEND, SELECT, CENTROIDS, SHORTLIST, CANDIDATE_LOGITS = range(11)
CLAIMS = 8
"""Parts of each thread's share of a projection: small enough to even out, large enough to be read as one stream."""
WIDTH = 16
"""int64 in a step."""


@kernel
def first_unit(units: int, thread: int, threads: int) -> int:
    """Where a thread's share of `units` begins; the next thread's beginning is its end."""
    return units * thread // threads


@kernel
def embed(step: np.ndarray, state: np.ndarray, thread: int, threads: int) -> None:
    out, out_stride, codes, scales = step[1], step[2], step[3], step[4]
    half, bits, width, factor = step[5], step[6], step[7], bits_float(np.int32(step[8]))
    rows = state[0]
    for row in range(first_unit(rows, thread, threads), first_unit(rows, thread + 1, threads)):
        token = read_i64(state[TOKENS] + 8 * row)
        read_row(codes, scales, half, bits, token, width, factor, out + row * out_stride)


@kernel
def residual(step: np.ndarray, state: np.ndarray, thread: int, threads: int) -> None:
    row_set, h, width, eps = step[1], step[2], step[3], bits_float(np.int32(step[4]))
    x, weight, scalar = step[5], step[6], step[7]
    next_weight, out_slot, records, zero = step[8], step[9], step[10], step[11]
    rows = state[row_set]
    for row in range(first_unit(rows, thread, threads), first_unit(rows, thread + 1, threads)):
        at = h + 4 * row * width
        if x:
            add_normed(at, x + 4 * row * width, weight, scalar, width, eps)
        if out_slot:
            out = state[out_slot] + 4 * row * width
            norm(at, next_weight, out, width, eps)
            quantize_row(out, records, row, rows, width, zero)
        elif next_weight:
            norm_quantize_row(at, next_weight, records, row, rows, width, zero, eps)
        elif records:
            quantize_row(at, records, row, rows, width, zero)


@kernel
def per_layer(step: np.ndarray, state: np.ndarray, thread: int, threads: int) -> None:
    context, layers, size, eps = step[1], step[2], step[3], bits_float(np.int32(step[4]))
    weight, codes, scales, half, bits = step[5], step[6], step[7], step[8], step[9]
    context_factor = full(bits_float(np.int32(step[10])))
    row_factor, factor = bits_float(np.int32(step[11])), full(bits_float(np.int32(step[12])))
    own, width = step[13] + 4 * thread * layers * size, layers * size
    rows = state[0]
    for row in range(first_unit(rows, thread, threads), first_unit(rows, thread + 1, threads)):
        read_row(codes, scales, half, bits, read_i64(state[TOKENS] + 8 * row), width, row_factor, own)
        at = context + 4 * row * width
        for i in range(0, 4 * width, 64):
            store(at + i, load(at + i) * context_factor)
        for layer in range(layers):
            norm(at + 4 * layer * size, weight, at + 4 * layer * size, size, eps)
        for i in range(0, 4 * width, 64):
            store(at + i, (load(at + i) + load(own + i)) * factor)


@kernel
def claim_size(units: int, threads: int) -> int:
    """Units that a thread takes at a time."""
    return max(1, units // (CLAIMS * threads)) if threads > 1 else units


@kernel
def project_share(step: np.ndarray, state: np.ndarray, threads: int, claims: int) -> None:
    row_set, bits, weights, scales, records, blocks, tiles = (
        step[1], step[2], step[3], step[4], step[5], step[6], step[7],
    )  # fmt: skip
    out, out_slot, stride, cap = step[8], step[9], step[10], bits_float(np.int32(step[11]))
    if out_slot:
        out = state[out_slot]
    size = claim_size(tiles, threads)
    start = claim(claims, size)
    while start < tiles:
        stop = min(start + size, tiles)
        project(bits, start, stop, state[row_set], weights, scales, records, blocks, out, stride, cap)
        start = claim(claims, size)


@kernel
def gated_share(step: np.ndarray, state: np.ndarray, threads: int, claims: int, scratch: int) -> None:
    row_set, bits, weights, scales, records, blocks, units = (
        step[1], step[2], step[3], step[4], step[5], step[6], step[7],
    )  # fmt: skip
    out, zero, factor, stride = step[8], step[9], step[10], step[11]
    rows = state[row_set]
    size = claim_size(units, threads)
    start = claim(claims, size)
    while start < units:
        stop = min(start + size, units)
        gated(bits, start, stop, units, rows, weights, scales, records, blocks, out, zero, factor, stride, scratch)
        start = claim(claims, size)


@kernel
def head(step: np.ndarray, state: np.ndarray, thread: int, threads: int, scratch: int) -> None:
    row_set, x, stride, query_heads, kv_heads, size = step[1], step[2], step[3], step[4], step[5], step[6]
    query_norm, key_norm, value_norm, value = step[7], step[8], step[9], step[10]
    kind, cache, eps = KINDS + step[11] * KIND_SLOTS, CACHES + step[12], bits_float(np.int32(step[13]))
    units = query_heads + (kv_heads if key_norm else 0)
    for unit in range(
        first_unit(state[row_set] * units, thread, threads), first_unit(state[row_set] * units, thread + 1, threads)
    ):
        row, number = unit // units, unit % units
        at = x + row * stride + 4 * number * size
        turn = 2 * source_row(state, row_set, row) * size
        cosines, sines = state[kind + COSINES] + turn, state[kind + SINES] + turn
        if number < query_heads:
            rotated_head(at, query_norm, cosines, sines, size, eps)
            continue
        number -= query_heads
        to = head_bytes(state[CACHE_BITS], size) * ((state[LENGTH] - state[kind + BASE] + row) * kv_heads + number)
        norm(x + row * stride + 4 * (value + number * size), value_norm, scratch, size, eps)
        to_cache(state[CACHE_BITS], scratch, state[cache + 1] + to, size)
        rotated_head(at, key_norm, cosines, sines, size, eps)
        to_cache(state[CACHE_BITS], at, state[cache] + to, size)


@kernel
def attend_share(step: np.ndarray, state: np.ndarray, thread: int, threads: int, claims: int) -> None:
    row_set, x, stride, query_heads, kv_heads, size = step[1], step[2], step[3], step[4], step[5], step[6]
    kind, cache, records, zero = step[7], CACHES + step[8], step[9], step[10]
    group = query_heads // kv_heads
    parts = (group + HEADS - 1) // HEADS
    count, units = state[row_set], kv_heads * parts
    together = max(1, min(ROWS, count * units // threads))  # work for every thread comes first
    bits, part_bytes = state[CACHE_BITS], head_bytes(state[CACHE_BITS], size)
    lines = Lines(state[LINE_MEMORY] + thread * LINES * state[LINE_STRIDE], state[LINE_STRIDE])
    unit = claim(claims, 1)  # the later a row, the more it sees: equal shares would be unequal work
    while unit // units * together < count:
        row, number = unit // units * together, unit % units
        kv_head, first = number // parts, number % parts * HEADS
        query_head, skipped = kv_head * group + first, kv_head * part_bytes
        attend(
            Rows(state, kind, row_set, row, min(together, count - row)),
            Queries(x + row * stride + 4 * query_head * size, stride, min(HEADS, group - first), size),
            Cache(bits, state[cache] + skipped, state[cache + 1] + skipped, kv_heads * part_bytes),
            lines,
            Output(records, query_head * size // 32, query_heads * size // 32, zero),
        )
        unit = claim(claims, 1)


@kernel
def select(step: np.ndarray, state: np.ndarray, thread: int, threads: int) -> None:
    source, out, width = step[1], step[2], step[3]
    rows = state[1]
    for row in range(first_unit(rows, thread, threads), first_unit(rows, thread + 1, threads)):
        at = source + 4 * width * source_row(state, 1, row)
        for i in range(0, 4 * width, 64):
            store(out + 4 * width * row + i, load(at + i))


@kernel
def centroids(step: np.ndarray, state: np.ndarray, thread: int, threads: int) -> None:
    weights, count, width, x, out = step[1], step[2], step[3], step[4], step[5]
    for row in range(first_unit(count, thread, threads), first_unit(count, thread + 1, threads)):
        write_f32(out + 4 * row, dot(weights + 4 * width * row, x, width))


@kernel
def candidate_logits(step: np.ndarray, state: np.ndarray, thread: int, threads: int) -> None:
    codes, scales, half, bits, width = step[1], step[2], step[3], step[4], step[5]
    x, chosen, top, per_cluster, ids, logits = step[6], step[7], step[8], step[9], step[10], step[11]
    count = top * per_cluster
    for i in range(first_unit(count, thread, threads), first_unit(count, thread + 1, threads)):
        row = read_i64(chosen + 8 * (i // per_cluster)) * per_cluster + i % per_cluster
        write_i64(state[CANDIDATES] + 8 * i, read_i64(ids + 8 * row))
        write_f32(logits + 4 * i, dot_row(codes, scales, half, bits, row, width, x))


@kernel
def shortlist(step: np.ndarray) -> None:
    """The `top` best of `count` scores, best first, of equals the first one first."""
    scores, count, chosen, top = step[1], step[2], step[3], step[4]
    taken = 0
    for i in range(count):
        score = read_f32(scores + 4 * i)
        if taken == top and not score > read_f32(scores + 4 * read_i64(chosen + 8 * (top - 1))):
            continue
        at = taken if taken < top else top - 1
        while at > 0 and score > read_f32(scores + 4 * read_i64(chosen + 8 * (at - 1))):
            write_i64(chosen + 8 * at, read_i64(chosen + 8 * (at - 1)))
            at -= 1
        write_i64(chosen + 8 * at, np.int64(i))
        taken = min(taken + 1, top)
