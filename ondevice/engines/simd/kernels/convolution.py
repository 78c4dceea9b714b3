"""The step `Convolve`: short convolutions over a sequence's rows.

The cache of a convolution has float32 numbers whatever the bits of other caches are: a product B * x is not normed, as
keys are, and may exceed fp16. Row r of a half lies behind row r - 1.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ondevice.engines.simd.kernels.activations import quantize_row
from ondevice.engines.simd.kernels.attention.scratch import read_sequence, sequence_of, source_row
from ondevice.engines.simd.kernels.contract.slots import CACHES, STOP
from ondevice.engines.simd.kernels.contract.steps import Convolve
from ondevice.engines.simd.kernels.isa.jit import read_step
from ondevice.engines.simd.kernels.isa.memory import first_unit, read_i64
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
        for j in range(1, min(step.window, sequence.length + depth + 1)):
            taps = step.taps + j * line
            if j <= depth:
                other = first + ancestor(sequence.paths, sequence.path_width, number, depth - j) * step.stride
                for i in range(0, line, 64):
                    store(out + i, fma(product(other + i, line, gated), load(taps + i), load(out + i)))
            else:
                add_cached(out, halves, committed + depth - j, taps, channels)
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
        at, part = cache_row(halves + 8 * half, row, step.channels), half * line // 2
        for i in range(0, line // 2, 64):
            own_product = product(own + part + i, line, gated)
            store(at + i, own_product)
            store(out + part + i, own_product * load(step.taps + part + i))


@kernel
def add_cached(out: int, halves: int, row: int, taps: int, channels: int) -> None:
    """out += taps times row `row` of a cache."""
    for half in range(2):
        at, part = cache_row(halves + 8 * half, row, channels), half * 2 * channels
        for i in range(0, 2 * channels, 64):
            place = part + i
            store(out + place, fma(load(at + i), load(taps + place), load(out + place)))


@kernel
def product(x: int, line: int, gated: bool) -> Any:
    """B * x, whose x is two lines behind B; or x itself."""
    return load(x) * load(x + 2 * line) if gated else load(x)


@kernel
def ancestor(paths: int, path_width: int, row: int, depth: int) -> Any:
    """The ancestor at a depth of a row of a sequence; in a chain, whose `paths` are 0, rows are their depths."""
    return read_i64(paths + 8 * (row * path_width + depth)) if paths else np.int64(depth)


@kernel
def cache_row(half: int, row: int, channels: int) -> Any:
    """The address of a row in a half of a cache; `half` is the address of the half's address."""
    return read_i64(half) + row * 2 * channels


@kernel
def move_product(halves: int, old: int, new: int, channels: int) -> None:
    """Copy row `old` of a cache to row `new`. `halves` is the address of the addresses of both halves."""
    for half in range(2):
        source, to = cache_row(halves + 8 * half, old, channels), cache_row(halves + 8 * half, new, channels)
        for i in range(0, 2 * channels, 64):
            store(to + i, load(source + i))
