"""Attention whose scores are table lookups and whose values are exact, as in NoMAD-Attention (Zhang et al., 2024).

The first and the newest positions have exact scores, and share the softmax with the others: what tables leave out, the
least product of every code, is added to their scores.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ondevice.engines.simd.kernels.attention import attend_all, parts_of, write_out
from ondevice.engines.simd.kernels.attention_layouts import AttendLookedUp
from ondevice.engines.simd.kernels.attention_rows import (
    BLOCK,
    KVHead,
    Pairs,
    Scratch,
    row_range,
    score_row,
    score_stride,
    scratch_at,
    see,
    state_bytes,
)
from ondevice.engines.simd.kernels.attention_state import States, clear
from ondevice.engines.simd.kernels.attention_tile import HEADS
from ondevice.engines.simd.kernels.chosen_attention import attend_range, begin_row
from ondevice.engines.simd.kernels.float_attention import mix
from ondevice.engines.simd.kernels.float_attention import weigh as weigh_floats
from ondevice.engines.simd.kernels.integer_attention import mix_values, tile_size, weigh
from ondevice.engines.simd.kernels.integer_tile import UNIT
from ondevice.engines.simd.kernels.jit import kernel
from ondevice.engines.simd.kernels.key_codes import SPAN, Codebook
from ondevice.engines.simd.kernels.looking_up import FIRST, workspace_at
from ondevice.engines.simd.kernels.lookup import LANES, Codes, Tables, look_up, make_tables, together
from ondevice.engines.simd.kernels.lookup_tile import SUMS
from ondevice.engines.simd.kernels.memory import read_f32, read_i64, write_f32
from ondevice.engines.simd.kernels.shares import claim
from ondevice.engines.simd.kernels.slots import (
    CACHES,
    LOOK_UP,
    LOOK_UP_STRIDE,
    SCRATCH,
    SCRATCH_STRIDE,
)
from ondevice.engines.simd.kernels.step_layouts import read_step

_ONE = np.int64(1)
_NOWHERE = np.int64(1 << 62)


@kernel
def score_span(tables: Tables, codes: Codes, span: int, first: int, members: int, sums: int) -> None:
    """The scores of a span's keys in some heads, as `look_up_tile` writes them, float32[members * UNIT, 16]."""
    key_bytes, done = tables.codes // 2, np.int64(0)
    at = codes.address + span * codes.stride
    while done < members:
        heads = min(together(tables, first + done), members - done)
        vectors = SUMS // heads
        for vector in range(0, UNIT, vectors):
            to = sums + (done * UNIT + vector * heads) * 64
            look_up(heads, at + vector * LANES * key_bytes, LANES * key_bytes, tables, first + done, to)
        done += heads


@kernel
def order_scores(tables: Tables, scratch: Scratch, first: int, members: int, sums: int, half: int) -> None:
    """Put the scores of a block, which is half a span, in the order of positions."""
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
    """How many of some pairs are scored together."""
    return min(tile_size(pairs) if head.bits == 8 else min(pairs, HEADS), SUMS)


@kernel
def add_values(
    pairs: Pairs, head: KVHead, head_dim: int, scratch: Scratch, states: States, first: int, members: int, begin: int,
    end: int,
) -> None:  # fmt: skip
    """Add the positions begin..end - 1, whole units of a block that has its scores, to the states of some pairs."""
    out = states.address + first * states.stride
    if head.bits == 8:
        for member in range(members):
            weigh(scratch, states, pairs.sequence, head, head_dim, first, member, members, _NOWHERE, begin, end)
        values = head.values + (begin - pairs.sequence.base) // UNIT * head.stride
        mix_values(
            members, values, head.stride, scratch.weights, scratch.weight_starts, scratch.weight_scales,
            (end - begin) // UNIT, 1, head_dim, out, states.stride,
        )  # fmt: skip
        return
    skipped = 4 * (begin % BLOCK)
    for member in range(members):
        weigh_floats(score_row(scratch, member) + skipped, states, first + member, head_dim, end - begin)
    weights, values = score_row(scratch, 0) + skipped, head.values + (begin - pairs.sequence.base) * head.stride
    mix(weights, score_stride(), members, values, head.stride, end - begin, head_dim, out, states.stride)


@kernel
def attend_by_tables(
    pairs: Pairs, head: KVHead, head_dim: int, scratch: Scratch, states: States, tables: Tables, codes: Codes,
    begin: int, end: int, sums: int,
) -> None:  # fmt: skip
    """Add the positions begin..end - 1, whole units, of which the pairs of one row see all, to their states."""
    see(scratch.table, pairs.size, begin, end)
    for span in range(begin // SPAN, (end + SPAN - 1) // SPAN):
        first = np.int64(0)
        while first < pairs.size:
            members = members_of(head, pairs.size - first)
            score_span(tables, codes, span, first, members, sums)
            for half in range(SPAN // BLOCK):
                block = span * SPAN + half * BLOCK
                if max(begin, block) < min(end, block + BLOCK):
                    order_scores(tables, scratch, first, members, sums, half)
                    low, high = max(begin, block), min(end, block + BLOCK)
                    add_values(pairs, head, head_dim, scratch, states, first, members, low, high)
            first += members


@kernel
def attend_looked_up_share(words: np.ndarray, state: np.ndarray, thread: int, claims: int) -> None:
    """activations = softmax(looked up scores) @ values, quantised. Threads claim a row in the heads of a KV head."""
    step = read_step(AttendLookedUp, words)
    size, kv_heads, group, count = step.size, step.kv_heads, step.query_heads // step.kv_heads, step.size // step.width
    scratch = scratch_at(state[SCRATCH] + thread * state[SCRATCH_STRIDE], size)
    work = workspace_at(state[LOOK_UP] + thread * state[LOOK_UP_STRIDE], group, count)
    tables = Tables(work.tables, work.scales, group, count)
    unit = claim(claims, _ONE)
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
        unit = claim(claims, _ONE)
