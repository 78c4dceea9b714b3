"""The step `Convolve`: short convolutions over a sequence's rows.

The cache of a convolution has float32 numbers whatever the bits of other caches are: a product B * x is not normed, as
keys are, and may exceed fp16. Row r of a half lies after row r - 1.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ondevice.engines.simd.kernels.activations import quantize_row
from ondevice.engines.simd.kernels.attention.scratch import read_sequence, sequence_of, source_row
from ondevice.engines.simd.kernels.contract.slots import CACHES, STOP
from ondevice.engines.simd.kernels.contract.steps import Convolve
from ondevice.engines.simd.kernels.isa.jit import read_step
from ondevice.engines.simd.kernels.isa.memory import first_unit, read_f32, read_i64, write_f32
from ondevice.engines.simd.kernels.isa.vector import fma, load, silu, store
from ondevice.native.functions import kernel


@kernel
def convolve(words: np.ndarray, state: np.ndarray, thread: int, threads: int) -> None:
    """activations = quantised C * (the sum over j < window of tap j times the product B * x, j positions before a row);
    with neither B nor C, out = silu(that sum of x), or sums = that sum of x.

    Units are rows. A row whose position is j before another's may be of the same forward: its product is computed
    again, from B and x, and not read from the cache, into which another thread may be writing it.
    """
    step = read_step(Convolve, words)
    row_set, channels, gated = step.row_set, step.channels, step.activations != 0
    line, rows = 4 * channels, state[row_set]
    for row in range(first_unit(rows, thread, threads), first_unit(rows, thread + 1, threads)):
        record = sequence_of(state, row_set, row)
        sequence = read_sequence(record, step.kind)
        number = source_row(state, row_set, row) - sequence.first_row
        depth = read_i64(state[STOP] + 8 * source_row(state, row_set, row)) - 1 - sequence.length
        first = step.x + (row - number) * step.stride
        own, halves = first + number * step.stride, record + 8 * (CACHES + step.cache)
        out, committed = own + (3 if gated else 1) * line, sequence.length - sequence.base
        if step.sums:
            out = step.sums + row * line
        begin_sums(own, out, halves, committed + number, step)
        if step.gates:
            keep_gates(step.gates + 8 * row * step.heads, halves, committed + number, step)
        for j in range(1, min(step.window, sequence.length + depth + 1)):
            taps = step.taps + j * line
            if j <= depth:
                other = first + ancestor(sequence.paths, sequence.path_width, number, depth - j) * step.stride
                for i in range(0, line, 64):
                    store(out + i, fma(product(other + i, line, gated), load(taps + i), load(out + i)))
            else:
                add_cached(out, halves, committed + depth - j, taps, step)
        if gated:
            for i in range(0, line, 64):
                store(out + i, load(out + i) * load(own + line + i))
            quantize_row(out, step.activations, np.int64(row), rows, channels, step.form)
        elif not step.sums:
            for i in range(0, line, 64):
                store(out + i, silu(load(out + i)))


@kernel
def begin_sums(own: int, out: int, halves: int, row: int, step: Convolve) -> None:
    """out = the first tap times a row's own product, which is written to row `row` of its cache."""
    line, gated = 4 * step.channels, step.activations != 0
    for half in range(2):
        at, part = cache_row(halves + 8 * half, row, step.half), half * line // 2
        for i in range(0, line // 2, 64):
            own_product = product(own + part + i, line, gated)
            store(at + i, own_product)
            store(out + part + i, own_product * load(step.taps + part + i))


@kernel
def keep_gates(gates: int, halves: int, row: int, step: Convolve) -> None:
    """Write a row's gates, float32[2, heads], after the halves of its row in the cache."""
    for half in range(2):
        at = cache_row(halves + 8 * half, row, step.half) + 2 * step.channels
        for head in range(step.heads):
            write_f32(at + 4 * head, read_f32(gates + 4 * (half * step.heads + head)))


@kernel
def add_cached(out: int, halves: int, row: int, taps: int, step: Convolve) -> None:
    """out += taps times row `row` of a cache."""
    channels = step.channels
    for half in range(2):
        at, part = cache_row(halves + 8 * half, row, step.half), half * 2 * channels
        for i in range(0, 2 * channels, 64):
            place = part + i
            store(out + place, fma(load(at + i), load(taps + place), load(out + place)))


@kernel
def product(x: int, line: int, gated: bool) -> Any:
    """B * x, whose x is two lines after B; or x itself."""
    return load(x) * load(x + 2 * line) if gated else load(x)


@kernel
def ancestor(paths: int, path_width: int, row: int, depth: int) -> Any:
    """The ancestor at a depth of a row of a sequence; in a chain, whose `paths` are 0, rows are their depths."""
    return read_i64(paths + 8 * (row * path_width + depth)) if paths else np.int64(depth)


@kernel
def cache_row(half: int, row: int, line: int) -> Any:
    """The address of a row, of `line` bytes, in a half of a cache; `half` is the address of the half's address."""
    return read_i64(half) + row * line


@kernel
def cached_sum(halves: int, row: int, earlier: int, channel: int, step: Any) -> Any:
    """The sums that `convolve` has computed of 16 channels of row `row` of a cache, before which it has `earlier` rows
    of the sequence: with the same operations in the same order.

    channel : the first of the 16
    step : a step with the fields `taps`, `window` and `half` of `Convolve`, and those of `Recur` for the channels
    """
    channels = 2 * step.key_heads * step.key_dim + step.value_heads * step.value_dim
    half = 2 * channel // channels
    at, place = halves + 8 * half, 4 * channel - 2 * half * channels
    total = load(cache_row(at, row, step.half) + place) * load(step.taps + 4 * channel)
    for j in range(1, min(step.window, earlier + 1)):
        tap = load(step.taps + 4 * (j * channels + channel))
        total = fma(load(cache_row(at, row - j, step.half) + place), tap, total)
    return silu(total)


@kernel
def move_product(halves: int, old: int, new: int, line: int) -> None:
    """Copy row `old` of a cache to row `new`. `halves` is the address of the addresses of both halves."""
    for half in range(2):
        source, to = cache_row(halves + 8 * half, old, line), cache_row(halves + 8 * half, new, line)
        for i in range(0, line, 64):
            store(to + i, load(source + i))
