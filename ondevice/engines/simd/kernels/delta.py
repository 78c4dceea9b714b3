"""The steps of the gated delta rule: `Recur`, over the states of value heads, and `Gate`, on the rows after it.

The columns of a state do not depend on each other, so a unit of work is STATE_COLUMNS columns of one head of one
sequence, a part, which stays in the first level of cache while all rows of the sequence pass. States lie part by part,
float32[value_heads, parts, key_dim, STATE_COLUMNS]. A row is computed with the same operations in the same order
whatever rows are before it in the forward.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ondevice.engines.simd.kernels.activations import inverse_rms, write_input
from ondevice.engines.simd.kernels.attention.query_key_value import copy
from ondevice.engines.simd.kernels.attention.scratch import Sequence, read_sequence
from ondevice.engines.simd.kernels.contract.matrices import STATE_COLUMNS
from ondevice.engines.simd.kernels.contract.slots import CACHES, SEQUENCE_COUNT, SEQUENCES, STOP, UNREAD
from ondevice.engines.simd.kernels.contract.steps import Gate, Recur
from ondevice.engines.simd.kernels.convolution import ancestor, cache_row, cached_sum
from ondevice.engines.simd.kernels.isa.jit import read_step
from ondevice.engines.simd.kernels.isa.memory import bits_float, first_unit, read_f32, read_i64
from ondevice.engines.simd.kernels.isa.vector import exp, fma, full, load, maximum, store, sum_lanes
from ondevice.native.functions import kernel

_F = np.float32
_ZERO, _ONE, _TWO, _EPS = _F(0.0), _F(1.0), _F(2.0), _F(1e-6)
LINE = 4 * STATE_COLUMNS
"""Bytes of a row of a part."""
_THIRD, _FIFTH, _SEVENTH, _NINTH, _ELEVENTH, _THIRTEENTH = (_F(1 / n) for n in range(3, 15, 2))


@kernel
def recur(words: np.ndarray, state: np.ndarray, thread: int, threads: int, scratch: int) -> None:
    """out = the outputs of all value heads, float32[rows, value_width]; the states are written after the rows.

    The present states of a sequence pass its UNREAD last committed tokens first, by what the convolution's cache has of
    them. After the rows, if they are a chain, the following states are written. `scratch` is the address of this
    thread's working memory: float32[key_dim, STATE_COLUMNS], float32[2, key_dim], float32[2, STATE_COLUMNS].
    """
    step = read_step(Recur, words)
    parts = step.value_dim // STATE_COLUMNS
    units = state[SEQUENCE_COUNT] * step.value_heads * parts
    for unit in range(first_unit(units, thread, threads), first_unit(units, thread + 1, threads)):
        record = read_i64(state[SEQUENCES] + 8 * (unit // (step.value_heads * parts)))
        head, part = unit // parts % step.value_heads, unit % parts
        sequence, unread = read_sequence(record, np.int64(1)), read_i64(record + 8 * UNREAD)
        offset = (head * parts + part) * step.key_dim * LINE
        present = read_i64(record + 8 * (CACHES + step.states)) + offset
        following = read_i64(record + 8 * (CACHES + step.states + 1)) + offset
        copy(present, scratch, step.key_dim * STATE_COLUMNS)
        for number in range(unread):
            pass_cached(step, record, sequence.base, sequence.length - unread + number, head, part, scratch)
        if unread:
            copy(scratch, present, step.key_dim * STATE_COLUMNS)
        if not sequence.paths:
            for row in range(sequence.rows):
                pass_row(step, sequence.first_row + row, head, part, scratch)
            copy(scratch, following, step.key_dim * STATE_COLUMNS)
        else:
            for row in range(sequence.rows):
                copy(present, scratch, step.key_dim * STATE_COLUMNS)
                pass_path(step, state, sequence, row, head, part, scratch)


@kernel
def pass_path(step: Recur, state: np.ndarray, sequence: Sequence, row: int, head: int, part: int, scratch: int) -> None:
    """Pass a row of a tree and its ancestors, from after the committed rows on."""
    depth = read_i64(state[STOP] + 8 * (sequence.first_row + row)) - 1 - sequence.length
    for level in range(depth + 1):
        passed = ancestor(sequence.paths, sequence.path_width, row, level)
        pass_row(step, sequence.first_row + passed, head, part, scratch)


@kernel
def pass_row(step: Recur, row: int, head: int, part: int, scratch: int) -> None:
    """Pass one row of the forward, for the columns of a part, and write its output."""
    size, columns = step.key_dim, 4 * (head * step.value_dim + STATE_COLUMNS * part)
    x, own_key = step.x + row * step.stride, key_head(step, head)
    key, query = scratch + size * LINE, scratch + size * LINE + 4 * size
    unit(x + 4 * own_key * size, query, size, bits_float(np.int32(step.scale)))
    unit(x + 4 * (step.key_heads + own_key) * size, key, size, _ONE)
    gates = step.gates + 4 * (2 * row * step.value_heads + head)
    b, a = read_f32(gates), read_f32(gates + 4 * step.value_heads)
    out = step.out + 4 * row * step.value_heads * step.value_dim + columns
    update(step, b, a, x + 8 * step.key_heads * size + columns, out, head, scratch)


@kernel
def pass_cached(step: Recur, record: int, base: int, position: int, head: int, part: int, scratch: int) -> None:
    """Pass the row at a position, which was computed by an earlier forward, for the columns of a part.

    Its keys and values are summed again, as they were, from the rows of the convolution's cache, which begins at the
    position `base`, and its gates lie after these.
    """
    size, halves, row, own_key = step.key_dim, record + 8 * (CACHES + step.cache), position - base, key_head(step, head)
    key, query = scratch + size * LINE, scratch + size * LINE + 4 * size
    value, out = query + 4 * size, query + 4 * size + LINE
    first = (step.key_heads + own_key) * size
    for i in range(0, size, 16):
        store(query + 4 * i, cached_sum(halves, row, position, first + i, step))
    unit(query, key, size, _ONE)
    for i in range(0, 4 * size, 64):
        store(query + i, full(_ZERO))
    first = 2 * step.key_heads * size + head * step.value_dim + STATE_COLUMNS * part
    for i in range(0, STATE_COLUMNS, 16):
        store(value + 4 * i, cached_sum(halves, row, position, first + i, step))
    gates = 4 * step.key_heads * size + 2 * step.value_heads * step.value_dim + 4 * head
    b = read_f32(cache_row(halves, row, step.half) + gates)
    a = read_f32(cache_row(halves + 8, row, step.half) + gates)
    update(step, b, a, value, out, head, scratch)


@kernel
def key_head(step: Recur, head: int) -> Any:
    """The key head of a value head."""
    return head % step.key_heads if step.tiled else head // (step.value_heads // step.key_heads)


@kernel
def update(step: Recur, b: float, a: float, value: int, out: int, head: int, scratch: int) -> None:
    """S *= decay; S += k outer (share * (v - k @ S)); out = q @ S, for the columns of a part. S, k and q are in the
    working memory, one after the other.
    """
    size = step.key_dim
    key, query = scratch + size * LINE, scratch + size * LINE + 4 * size
    share, decay = sigmoid(full(b)), decay_of(step, a, head)
    low, high = full(_ZERO), full(_ZERO)
    for i in range(size):
        at, k = scratch + i * LINE, full(read_f32(key + 4 * i))
        a, b = load(at) * decay, load(at + 64) * decay
        store(at, a)
        store(at + 64, b)
        low, high = fma(k, a, low), fma(k, b, high)
    low, high = share * (load(value) - low), share * (load(value + 64) - high)
    first, second = full(_ZERO), full(_ZERO)
    for i in range(size):
        at, k, q = scratch + i * LINE, full(read_f32(key + 4 * i)), full(read_f32(query + 4 * i))
        a, b = fma(k, low, load(at)), fma(k, high, load(at + 64))
        store(at, a)
        store(at + 64, b)
        first, second = fma(q, a, first), fma(q, b, second)
    store(out, first)
    store(out + 64, second)


@kernel
def unit(x: int, out: int, size: int, factor: float) -> None:
    """out = x / sqrt(sum of x**2 + 1e-6) * factor, float32[size]."""
    squares = full(_ZERO)
    for i in range(0, 4 * size, 64):
        squares = fma(load(x + i), load(x + i), squares)
    scale = full(factor / np.sqrt(sum_lanes(squares) + _EPS))
    for i in range(0, 4 * size, 64):
        store(out + i, load(x + i) * scale)


@kernel
def sigmoid(x: Any) -> Any:
    """1 / (1 + e**-x); NaN for NaN, which `exp` does not keep."""
    return fma(x, full(_ZERO), full(_ONE) / (full(_ONE) + exp(full(_ZERO) - x)))


@kernel
def decay_of(step: Recur, a: float, head: int) -> Any:
    """exp(decay * softplus(a + dt_bias)), in all lanes.

    softplus(x) = max(x, 0) + log(1 + e**-|x|), and log(1 + u) = 2 * atanh(u / (2 + u)) by its series.
    """
    x = full(a + read_f32(step.dt_bias + 4 * head))
    u = exp(full(_ZERO) - maximum(x, full(_ZERO) - x))
    z = u / (full(_TWO) + u)
    z2 = z * z
    p = fma(full(_THIRTEENTH), z2, full(_ELEVENTH))
    p = fma(p, z2, full(_NINTH))
    p = fma(p, z2, full(_SEVENTH))
    p = fma(p, z2, full(_FIFTH))
    p = fma(p, z2, full(_THIRD))
    soft = maximum(x, full(_ZERO)) + full(_TWO) * fma(p * z2, z, z)
    return fma(x, full(_ZERO), exp(full(read_f32(step.decay + 4 * head)) * soft))


@kernel
def gate_rows(words: np.ndarray, state: np.ndarray, thread: int, threads: int) -> None:
    """activations = quantised x * sigmoid(gate), or norm(x) * silu(gate) with a norm of every head. Units are rows."""
    step = read_step(Gate, words)
    rows, blocks, eps = state[step.row_set], step.width // 32, bits_float(np.int32(step.eps))
    for row in range(first_unit(rows, thread, threads), first_unit(rows, thread + 1, threads)):
        x, gate, scale = step.x + 4 * row * step.width, step.gate + row * step.gate_stride, _ONE
        for block in range(blocks):
            i = 128 * block
            low, high, first, second = load(x + i), load(x + i + 64), load(gate + i), load(gate + i + 64)
            if step.norm:
                place = i % (4 * step.size)
                if not place:
                    scale = inverse_rms(x + i, step.size, eps)
                low = low * full(scale) * load(step.norm + place) * first
                high = high * full(scale) * load(step.norm + place + 64) * second
            low, high = low * sigmoid(first), high * sigmoid(second)
            write_input(low, high, step.form, step.activations, row, rows, block, blocks)
