"""Exact attention: the step, and how pairs of a row and a query head are computed over the parts of their positions.

A pair's positions are divided into parts at multiples of PART, and its parts are combined in order. With few rows,
threads share the parts, so that even one row of one KV head keeps all threads busy. With many rows, a unit of work is
some pairs over all their parts. Both compute the same bits, whatever the number of rows and threads.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from ondevice.engines.simd.kernels.activations import write_input
from ondevice.engines.simd.kernels.attention import float_cache, integer_cache
from ondevice.engines.simd.kernels.attention.query_key_value import part_bytes
from ondevice.engines.simd.kernels.attention.scratch import (
    KVHead,
    Pairs,
    Queries,
    States,
    clear,
    fold_all,
    power,
    read_sequence,
    row_range,
    scratch_at,
    seen_by_any,
    state_bytes,
    write_table,
)
from ondevice.engines.simd.kernels.contract.attention_memory import (
    MAX_PAIRS,
    MAX_TILE_PAIRS,
    PART,
    SCORE_BLOCK,
    Scratch,
)
from ondevice.engines.simd.kernels.contract.slots import (
    CACHE_BITS,
    CACHES,
    COUNTERS,
    FIRST_ROW,
    MAX_PARTS,
    PARTIALS,
    ROW_COUNT,
    SCRATCH,
    SCRATCH_STRIDE,
    SEQUENCE_COUNT,
    SEQUENCES,
)
from ondevice.engines.simd.kernels.contract.steps import Attend
from ondevice.engines.simd.kernels.isa.jit import read_step
from ondevice.engines.simd.kernels.isa.memory import bits_float, claim, fetch_add, read_f32, read_i64, write_i64
from ondevice.engines.simd.kernels.isa.vector import full, load
from ondevice.native.functions import kernel

_ZERO, _ONE = np.float32(0.0), np.float32(1.0)
_ONE_UNIT = np.int64(1)
"""With a plain 1, `claim` would be compiled once more, for another type."""


class Partials(NamedTuple):
    """The states of a unit's parts if several threads compute them: [pairs][most_parts] states.

    address : address of the first pair's states
    most_parts : room for parts of a pair
    counter : address of an int64 that counts the complete parts; 0 before and afterwards
    """

    address: int
    most_parts: int
    counter: int


_NOT_SHARED = Partials(0, 0, 0)
"""For a unit that one thread computes over all its parts."""


class Output(NamedTuple):
    """The destination of results, as activations: see `activations`.

    activations : address of all rows
    rows : number of rows
    block : the first block of the first query head in a row
    blocks : blocks of a row
    form : form of the activations
    sinks : address of float32[group], the scores of the query heads' sinks; 0 if there are none
    """

    activations: int
    rows: int
    block: int
    blocks: int
    form: int
    sinks: int


@kernel
def parts_of(state: np.ndarray, pairs: Pairs) -> Any:
    """The first part with positions that some pairs see, and the number of such parts, at least 1."""
    first = pairs.first_row + pairs.first // pairs.group
    last = pairs.first_row + (pairs.first + pairs.size - 1) // pairs.group
    begin, end = row_range(state, pairs.row_set, pairs.kind, first)
    for row in range(first + 1, last + 1):
        low, high = row_range(state, pairs.row_set, pairs.kind, row)
        begin, end = min(begin, low), max(end, high)
    begin //= PART
    return begin, max(1, (end + PART - 1) // PART - begin)


@kernel
def share_of_pairs(bits: int, total: int, threads: int) -> Any:
    """The number of pairs in a unit of work: whole tiles, or if there are few pairs a part of one, of four or more.
    Several threads have two units each, as far as that allows: with three KV heads and a unit for each, two threads
    took as long as for four.

    bits : bits of a cached number
    total : number of pairs, each counted once per part
    """
    share, tile = total // threads, tile_size(bits, np.int64(MAX_TILE_PAIRS))
    if threads > 1:
        share //= 2
    if share >= tile:
        return min(MAX_PAIRS, share) // tile * tile
    return max(4, tile_size(bits, share))


@kernel
def tile_size(bits: int, pairs: int) -> Any:
    """The number of pairs in the next tile of some pairs."""
    return integer_cache.tile_size(pairs) if bits == 8 else float_cache.tile_size(pairs)


@kernel
def write_out(pairs: Pairs, head_dim: int, states: States, output: Output) -> None:
    """Divide complete states by their sums of weights, that of a sink included, and write them as activations."""
    for i in range(pairs.size):
        number = pairs.first + i
        row, head = pairs.first_row + number // pairs.group, number % pairs.group
        state = states.address + i * states.stride
        total = read_f32(state + 4 * head_dim + 4)
        share = _ZERO
        if total > _ZERO and output.sinks:
            share = share_beside(read_f32(output.sinks + 4 * head), read_f32(state + 4 * head_dim), total)
        elif total > _ZERO:
            share = _ONE / total
        for part in range(head_dim // 32):
            block = output.block + head * (head_dim // 32) + part
            at = state + 128 * part
            low, high = load(at) * full(share), load(at + 64) * full(share)
            write_input(low, high, output.form, output.activations, row, output.rows, block, output.blocks)


@kernel
def share_beside(sink: float, peak: float, total: float) -> Any:
    """1 / (total + e**(sink - peak)): the factor of values that are weighed relative to `peak`, beside a sink.

    peak, total : the largest score, and the sum of the weights of all positions relative to it
    """
    if sink > peak:
        own = power(peak - sink)
        return own / (total * own + _ONE)
    return _ONE / (total + power(sink - peak))


@kernel
def begin_unit(state: np.ndarray, pairs: Pairs, queries: Queries, head: KVHead, scratch: Scratch) -> None:
    """Prepare a unit of work: the table of its pairs, and their queries as the cache needs them."""
    write_table(state, pairs, queries, scratch.table)
    if head.bits == 8:
        integer_cache.quantize_queries(scratch, pairs.size, queries.head_dim)
    else:
        float_cache.lay_queries(scratch, pairs.size, queries.head_dim)


@kernel
def attend_block(pairs: Pairs, head: KVHead, head_dim: int, scratch: Scratch, states: States, block: int) -> None:
    """Add the positions of a block that some pairs see to their states, tile by tile."""
    first = np.int64(0)
    while first < pairs.size:
        size = tile_size(head.bits, pairs.size - first)
        if head.bits == 8:
            integer_cache.attend_tile(scratch, states, pairs.sequence, head, head_dim, first, size, block)
        else:
            float_cache.attend_tile(scratch, states, pairs, head, head_dim, first, size, block)
        first += size


@kernel
def attend_unit(
    pairs: Pairs,
    head: KVHead,
    head_dim: int,
    scratch: Scratch,
    partials: Partials,
    first: int,
    parts: int,
    number: int,
    output: Output,
) -> None:
    """Compute pairs over all their parts, or over one of them.

    The thread that completes the last part of shared ones combines them all.

    Args:
        pairs, head, head_dim: the pairs and their keys and values.
        scratch: this thread's working memory, prepared by `begin_unit`.
        partials: memory for the states of shared parts.
        first, parts: number of the first part, and how many there are.
        number: which part to compute, 0..parts - 1; negative computes all.
        output: the destination.
    """
    stride = state_bytes(head_dim)
    own, whole = States(scratch.part, stride), States(scratch.whole, stride)
    start, stop = first, first + parts
    if number >= 0:
        own = States(partials.address + number * stride, partials.most_parts * stride)
        start, stop = first + number, first + number + 1
    low, high = seen_by_any(scratch.table, 0, pairs.size)
    clear(whole, pairs.size, head_dim)
    for part in range(start, stop):
        clear(own, pairs.size, head_dim)
        begin, end = max(low, part * PART), min(high, (part + 1) * PART)
        for block in range(begin // SCORE_BLOCK * SCORE_BLOCK, end, SCORE_BLOCK):
            attend_block(pairs, head, head_dim, scratch, own, block)
        if number < 0:
            fold_all(whole, own, pairs.size, head_dim)
    if number >= 0:
        if fetch_add(partials.counter, np.int64(1)) + 1 < parts:
            return
        write_i64(partials.counter, np.int64(0))
        for part in range(parts):
            fold_all(whole, States(partials.address + part * stride, own.stride), pairs.size, head_dim)
    write_out(pairs, head_dim, whole, output)


@kernel
def attend_all(
    pairs: Pairs, head: KVHead, head_dim: int, scratch: Scratch, first: int, parts: int, output: Output
) -> None:
    """`attend_unit` over all parts."""
    attend_unit(pairs, head, head_dim, scratch, _NOT_SHARED, first, parts, np.int64(-1), output)


@kernel
def head_sinks(step: Any, kv_head: int) -> Any:
    """The address of the sinks of the query heads of a KV head; 0 if there are none."""
    return step.sinks + 4 * kv_head * (step.query_heads // step.kv_heads) if step.sinks else np.int64(0)


@kernel
def attend_share(words: np.ndarray, state: np.ndarray, thread: int, threads: int, claims: int) -> None:
    """The step `Attend` over all positions: activations = softmax(queries @ keys.T) @ values, quantised, causal.

    A unit of work is some pairs of one sequence and KV head, over all their positions or over one part. Threads claim
    one at a time, because units differ in size: later rows see more keys.
    """
    step = read_step(Attend, words)
    row_set, stride, kind, size = step.row_set, step.stride, step.kind, step.size
    query_heads, kv_heads, cache = step.query_heads, step.kv_heads, CACHES + step.cache
    group, bits, split = query_heads // kv_heads, state[CACHE_BITS], state[PARTIALS] != 0
    skipped, line, own = part_bytes(bits, size), kv_heads * part_bytes(bits, size), state_bytes(size)
    scratch = scratch_at(state[SCRATCH] + thread * state[SCRATCH_STRIDE], size)
    softcap, most_parts = bits_float(np.int32(step.softcap)), state[MAX_PARTS]
    total = np.int64(0)
    for index in range(state[SEQUENCE_COUNT]):
        record = read_i64(state[SEQUENCES] + 8 * index)
        first_row, count = read_i64(record + 8 * (FIRST_ROW + row_set)), read_i64(record + 8 * (ROW_COUNT + row_set))
        sequence = read_sequence(record, kind)
        pairs = Pairs(sequence, kind, row_set, first_row, group, 0, count * group)
        total += kv_heads * count * group * (parts_of(state, pairs)[1] if split and count else 1)
    together = share_of_pairs(bits, total, threads)
    unit, before = claim(claims, _ONE_UNIT), np.int64(0)
    for index in range(state[SEQUENCE_COUNT]):
        record = read_i64(state[SEQUENCES] + 8 * index)
        first_row, count = read_i64(record + 8 * (FIRST_ROW + row_set)), read_i64(record + 8 * (ROW_COUNT + row_set))
        keys, values = read_i64(record + 8 * cache), read_i64(record + 8 * (cache + 1))
        sequence = read_sequence(record, kind)
        for kv_head in range(kv_heads):
            for share in range(-(-count * group // together)):
                first = share * together
                pairs = Pairs(sequence, kind, row_set, first_row, group, first, min(together, count * group - first))
                if not split and before < unit:
                    before += 1
                    continue
                first_part, parts = parts_of(state, pairs)
                units = parts if split else np.int64(1)
                while unit < before + units:
                    queries = Queries(step.x + 4 * kv_head * group * size, stride, size)
                    head = KVHead(bits, keys + kv_head * skipped, values + kv_head * skipped, line, softcap)
                    blocks = query_heads * size // 32
                    block, sinks = kv_head * group * size // 32, head_sinks(step, kv_head)
                    output = Output(step.activations, state[row_set], block, blocks, step.form, sinks)
                    begin_unit(state, pairs, queries, head, scratch)
                    place = first_row * query_heads + kv_head * count * group + first
                    partials = Partials(
                        state[PARTIALS] + place * most_parts * own, most_parts, state[COUNTERS] + 8 * place
                    )
                    number = unit - before if units > 1 else np.int64(-1)
                    attend_unit(pairs, head, size, scratch, partials, first_part, parts, number, output)
                    unit = claim(claims, _ONE_UNIT)
                before += units
