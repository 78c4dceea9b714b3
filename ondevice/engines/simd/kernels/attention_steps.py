"""A thread's share of a layer's attention: `attention_layouts`.

`words` is a step's row of the plan, int64[WIDTH], with the fields of its layout; `state` are the forward's slots;
`claims` is the address of the int64 from which threads claim the units of the step.
"""

from __future__ import annotations

import numpy as np

from ondevice.engines.simd.kernels.attention import Output, Partials, attend_unit, begin_unit, parts_of, share_of_pairs
from ondevice.engines.simd.kernels.attention_layouts import Attend
from ondevice.engines.simd.kernels.attention_rows import KVHead, Pairs, Queries, read_sequence, scratch_at, state_bytes
from ondevice.engines.simd.kernels.heads import part_bytes
from ondevice.engines.simd.kernels.jit import kernel
from ondevice.engines.simd.kernels.memory import read_i64
from ondevice.engines.simd.kernels.shares import claim
from ondevice.engines.simd.kernels.slots import (
    CACHE_BITS,
    CACHES,
    COUNTERS,
    FIRST_ROW,
    MOST_PARTS,
    PARTIALS,
    ROW_COUNT,
    SCRATCH,
    SCRATCH_STRIDE,
    SEQUENCE_COUNT,
    SEQUENCES,
)
from ondevice.engines.simd.kernels.step_layouts import read_step

_ONE = np.int64(1)
"""With this as a plain number, what takes it would be compiled once more."""


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
