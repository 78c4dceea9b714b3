"""A thread's share of the steps whose unit is a row: `row_layouts`.

`words` is a step's row of the plan, int64[WIDTH], with the fields of its layout; `state` are the forward's slots.
"""

from __future__ import annotations

import numpy as np

from ondevice.engines.simd.kernels.attention_rows import source_row
from ondevice.engines.simd.kernels.jit import kernel
from ondevice.engines.simd.kernels.memory import bits_float, read_i64
from ondevice.engines.simd.kernels.norm import add_normed, norm, norm_quantize_row, quantize_row
from ondevice.engines.simd.kernels.row_layouts import Embed, PerLayer, Residual, Select
from ondevice.engines.simd.kernels.shares import first_unit
from ondevice.engines.simd.kernels.slots import ALL, TOKENS, WANTED
from ondevice.engines.simd.kernels.step_layouts import read_step
from ondevice.engines.simd.kernels.tables import read_row
from ondevice.engines.simd.kernels.vector import full, load, store

_WANTED = np.int64(WANTED)
"""With this as a plain number, what takes it would be compiled once more."""


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
def select(words: np.ndarray, state: np.ndarray, thread: int, threads: int) -> None:
    """out[row] = source[wanted[row]], float32[width], for the wanted rows."""
    step = read_step(Select, words)
    bytes_of_row = 4 * step.width
    rows = state[WANTED]
    for row in range(first_unit(rows, thread, threads), first_unit(rows, thread + 1, threads)):
        at, to = step.source + bytes_of_row * source_row(state, _WANTED, row), step.out + bytes_of_row * row
        for i in range(0, bytes_of_row, 64):
            store(to + i, load(at + i))
