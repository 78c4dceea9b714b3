"""Lookup attention, second step: attend to the units that `lookup` has chosen, or to all positions with looked-up
scores.

`attend_chosen_share` attends exactly to the chosen units, the first positions and the newest. `attend_looked_up_share`
attends to all positions; scores are table lookups and values exact, as in NoMAD-Attention (Zhang et al., 2024), except
for the first positions and the newest, whose scores are exact. Both share one softmax: the constant that tables leave
out, the smallest product of every code, is added to looked-up scores.

A unit of work is a row in the query heads of one KV head. It attends to its own list of positions in ascending order,
so the positions of other rows change no bit.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from ondevice.engines.simd.kernels.attention.exact import (
    Output,
    attend_all,
    attend_block,
    begin_unit,
    head_sinks,
    parts_of,
    tile_size,
    write_out,
)
from ondevice.engines.simd.kernels.attention.float_cache import mix_range
from ondevice.engines.simd.kernels.attention.float_cache import weigh as weigh_floats
from ondevice.engines.simd.kernels.attention.integer_cache import mix_values, weigh
from ondevice.engines.simd.kernels.attention.key_codes import SUMS, Codebook
from ondevice.engines.simd.kernels.attention.lookup import (
    FIRST,
    Codes,
    Tables,
    look_up,
    make_tables,
    together,
    workspace_at,
)
from ondevice.engines.simd.kernels.attention.query_key_value import part_bytes
from ondevice.engines.simd.kernels.attention.scratch import (
    NOWHERE,
    KVHead,
    Pairs,
    Queries,
    States,
    clear,
    read_sequence,
    row_range,
    score_row,
    score_stride,
    scratch_at,
    see,
    sequence_of,
    state_bytes,
)
from ondevice.engines.simd.kernels.contract.attention_memory import SCORE_BLOCK, SPAN, UNIT, Scratch
from ondevice.engines.simd.kernels.contract.instruction_sets import LANES
from ondevice.engines.simd.kernels.contract.slots import (
    CACHE_BITS,
    CACHES,
    FIRST_ROW,
    LOOKUP_SCRATCH,
    LOOKUP_SCRATCH_STRIDE,
    SCRATCH,
    SCRATCH_STRIDE,
)
from ondevice.engines.simd.kernels.contract.steps import Attend
from ondevice.engines.simd.kernels.isa.jit import read_step
from ondevice.engines.simd.kernels.isa.memory import bits_float, claim, read_f32, read_i64, write_f32
from ondevice.engines.simd.kernels.isa.vector import softcap
from ondevice.native.functions import kernel

_ONE_UNIT = np.int64(1)


class RowUnit(NamedTuple):
    """A row in the query heads of a KV head, ready to attend; `record` is the address of its sequence's record."""

    row: int
    kv_head: int
    record: int
    pairs: Pairs
    head: KVHead
    output: Output


@kernel
def begin_row(step: Any, state: np.ndarray, unit: int, scratch: Scratch) -> Any:
    """Prepare unit `unit` of a step `Attend`."""
    row_set, kind, size, query_heads, kv_heads = step.row_set, step.kind, step.size, step.query_heads, step.kv_heads
    group, cache, skipped = query_heads // kv_heads, CACHES + step.cache, part_bytes(state[CACHE_BITS], size)
    row, kv_head = unit // kv_heads, unit % kv_heads
    record = sequence_of(state, row_set, row)
    keys, values = read_i64(record + 8 * cache), read_i64(record + 8 * (cache + 1))
    head = KVHead(
        state[CACHE_BITS], keys + kv_head * skipped, values + kv_head * skipped, kv_heads * skipped,
        bits_float(np.int32(step.softcap)),
    )  # fmt: skip
    first_row = read_i64(record + 8 * (FIRST_ROW + row_set))
    pairs = Pairs(read_sequence(record, kind), kind, row_set, first_row, group, (row - first_row) * group, group)
    queries = Queries(step.x + 4 * kv_head * group * size, step.stride, size)
    block = kv_head * group * size // 32
    sinks = head_sinks(step, kv_head)
    output = Output(step.activations, state[row_set], block, query_heads * size // 32, step.form, sinks)
    begin_unit(state, pairs, queries, head, scratch)
    return RowUnit(row, kv_head, record, pairs, head, output)


@kernel
def attend_range(
    pairs: Pairs, head: KVHead, head_dim: int, scratch: Scratch, states: States, begin: int, end: int
) -> None:
    """Add positions begin..end - 1, all of which the pairs of one row see, to their states, with exact scores."""
    see(scratch.table, pairs.size, begin, end)
    for block in range(begin // SCORE_BLOCK * SCORE_BLOCK, end, SCORE_BLOCK):
        attend_block(pairs, head, head_dim, scratch, states, block)


@kernel
def attend_to_chosen(
    pairs: Pairs, head: KVHead, head_dim: int, scratch: Scratch, states: States, chosen: int, window: int, stop: int
) -> None:
    """Compute the states of a row's pairs over the first positions, the chosen units and the newest positions.

    Args:
        pairs, head, head_dim, scratch: the row's pairs, as in `exact.attend_unit`.
        states: the states to write.
        chosen: address of int64[1 + n]: n, then the numbers of n units.
        window: number of newest positions, rounded up to whole units.
        stop: one more than the last position that the row sees.
    """
    clear(states, pairs.size, head_dim)
    count, begin = read_i64(chosen), np.int64(0)
    end = np.int64(FIRST * UNIT)
    for i in range(count):
        unit = read_i64(chosen + 8 * (1 + i)) * UNIT
        if unit > end or unit % SCORE_BLOCK == 0:  # neighbouring units of a block are one range
            attend_range(pairs, head, head_dim, scratch, states, begin, end)
            begin = unit
        end = unit + UNIT
    attend_range(pairs, head, head_dim, scratch, states, begin, end)
    attend_range(pairs, head, head_dim, scratch, states, (stop - window) // UNIT * UNIT, stop)


@kernel
def attend_chosen_share(words: np.ndarray, state: np.ndarray, thread: int, claims: int) -> None:
    """The step `Attend` with `chosen`: activations = softmax(queries @ keys.T) @ values over each row's chosen
    positions, quantised.

    Threads claim units, a row in the query heads of a KV head.
    """
    step = read_step(Attend, words)
    size, kv_heads, most = step.size, step.kv_heads, 1 + step.most
    scratch = scratch_at(state[SCRATCH] + thread * state[SCRATCH_STRIDE], size)
    unit = claim(claims, _ONE_UNIT)
    while unit < state[step.row_set] * kv_heads:
        this = begin_row(step, state, unit, scratch)
        chosen = step.chosen + 8 * most * unit
        if read_i64(chosen) < 0:
            first_part, parts = parts_of(state, this.pairs)
            attend_all(this.pairs, this.head, size, scratch, first_part, parts, this.output)
        else:
            _, stop = row_range(state, step.row_set, step.kind, this.row)
            states = States(scratch.whole, state_bytes(size))
            attend_to_chosen(this.pairs, this.head, size, scratch, states, chosen, step.window, stop)
            write_out(this.pairs, size, states, this.output)
        unit = claim(claims, _ONE_UNIT)


@kernel
def score_span(tables: Tables, codes: Codes, span: int, first: int, members: int, sums: int) -> None:
    """The scores of a span's keys for some heads, in the order of `look_up_tile`, float32[members * UNIT, 16]."""
    key_bytes, done = tables.codes // 2, np.int64(0)
    at = codes.address + span * codes.stride
    while done < members:
        heads = min(together(tables, first + done), members - done)
        vectors = SUMS // heads
        for part in range(UNIT // vectors):
            vector = part * vectors
            to = sums + (done * UNIT + vector * heads) * 64
            look_up(heads, at + vector * LANES * key_bytes, LANES * key_bytes, tables, first + done, to)
        done += heads


@kernel
def order_scores(tables: Tables, scratch: Scratch, first: int, members: int, sums: int, half: int) -> None:
    """Put the scores of a block, half of a span, in the order of positions, and add the tables' constant."""
    done = np.int64(0)
    while done < members:
        heads = min(together(tables, first + done), members - done)
        vectors = SUMS // heads
        for head in range(heads):
            constant = read_f32(tables.scales + 4 * (tables.heads + first + done + head))
            to = score_row(scratch, done + head)
            for vector in range(UNIT):
                turn = vector // vectors * SUMS + head * vectors + vector % vectors
                at = sums + (done * UNIT + turn) * 64 + 32 * half
                for lane in range(LANES // 2):
                    write_f32(to + 4 * (lane * UNIT + vector), read_f32(at + 4 * lane) + constant)
        done += heads


@kernel
def members_of(head: KVHead, pairs: int) -> Any:
    """The number of pairs that are scored together."""
    return min(tile_size(head.bits, pairs), SUMS)


@kernel
def add_values(
    pairs: Pairs, head: KVHead, head_dim: int, scratch: Scratch, states: States, first: int, members: int, begin: int,
    end: int,
) -> None:  # fmt: skip
    """Add positions begin..end - 1, whole units of a block whose scores are known, to the states of some pairs."""
    out = states.address + first * states.stride
    if head.bits == 8:
        for member in range(members):
            weigh(scratch, states, pairs.sequence, head, head_dim, first, member, members, NOWHERE, begin, end)
        values = head.values + (begin - pairs.sequence.base) // UNIT * head.stride
        mix_values(
            members, values, head.stride, scratch.weights, scratch.weight_starts, scratch.weight_scales,
            (end - begin) // UNIT, 1, head_dim, out, states.stride,
        )  # fmt: skip
        return
    low, high = begin % SCORE_BLOCK, begin % SCORE_BLOCK + end - begin
    for member in range(members):
        weigh_floats(score_row(scratch, member), states, first + member, head_dim, low, high)
    mix_range(scratch, states, head, head_dim, pairs.sequence.base, first, np.int64(0), members, begin, end)


@kernel
def attend_by_tables(
    pairs: Pairs, head: KVHead, head_dim: int, scratch: Scratch, states: States, tables: Tables, codes: Codes,
    begin: int, end: int, sums: int,
) -> None:  # fmt: skip
    """Add positions begin..end - 1, whole units that the pairs of one row all see, to their states, by looked-up
    scores."""
    see(scratch.table, pairs.size, begin, end)
    for span in range(begin // SPAN, (end + SPAN - 1) // SPAN):
        first = np.int64(0)
        while first < pairs.size:
            members = members_of(head, pairs.size - first)
            score_span(tables, codes, span, first, members, sums)
            for half in range(SPAN // SCORE_BLOCK):
                block = span * SPAN + half * SCORE_BLOCK
                if max(begin, block) < min(end, block + SCORE_BLOCK):
                    order_scores(tables, scratch, first, members, sums, half)
                    softcap(score_row(scratch, 0), score_stride(), members, SCORE_BLOCK, head.softcap)
                    low, high = max(begin, block), min(end, block + SCORE_BLOCK)
                    add_values(pairs, head, head_dim, scratch, states, first, members, low, high)
            first += members


@kernel
def attend_looked_up_share(words: np.ndarray, state: np.ndarray, thread: int, claims: int) -> None:
    """The step `Attend` with `codes`: activations = softmax(looked-up scores) @ values, quantised.

    Threads claim units, a row in the query heads of a KV head.
    """
    step = read_step(Attend, words)
    size, kv_heads, group, count = step.size, step.kv_heads, step.query_heads // step.kv_heads, step.size // step.width
    scratch = scratch_at(state[SCRATCH] + thread * state[SCRATCH_STRIDE], size)
    work = workspace_at(state[LOOKUP_SCRATCH] + thread * state[LOOKUP_SCRATCH_STRIDE], group, count)
    tables = Tables(work.tables, work.scales, group, count)
    unit = claim(claims, _ONE_UNIT)
    while unit < state[step.row_set] * kv_heads:
        this = begin_row(step, state, unit, scratch)
        pairs, head, kv_head, output = this.pairs, this.head, this.kv_head, this.output
        _, stop = row_range(state, step.row_set, step.kind, this.row)
        book = read_i64(this.record + 8 * (CACHES + step.codes + 1))
        if not book or stop < step.begin:
            first_part, parts = parts_of(state, pairs)
            attend_all(pairs, head, size, scratch, first_part, parts, output)
        else:
            states, first = States(scratch.whole, state_bytes(size)), FIRST * UNIT
            newest, head_codes = (stop - step.window) // UNIT * UNIT, SPAN * count // 2
            at = read_i64(this.record + 8 * (CACHES + step.codes))
            codes = Codes(at + kv_head * head_codes, kv_heads * head_codes)
            codebook = Codebook(book + kv_head * count * (step.width + 1) * 64, count, step.width)
            make_tables(step.x + this.row * step.stride + 4 * kv_head * group * size, codebook, work.products, tables)
            clear(states, pairs.size, size)
            attend_range(pairs, head, size, scratch, states, np.int64(0), np.int64(first))
            attend_by_tables(pairs, head, size, scratch, states, tables, codes, np.int64(first), newest, work.sums)
            attend_range(pairs, head, size, scratch, states, newest, stop)
            write_out(pairs, size, states, output)
        unit = claim(claims, _ONE_UNIT)
