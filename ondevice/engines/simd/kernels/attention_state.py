"""What a softmax over some positions comes to before it is divided, so that more positions can follow.

A pair's state is float32[head_dim], the sum of weighed values, then the largest score so far and the sum of weights.
The weights are those of that largest score. Positions come in one order, part by part, whoever computes them.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from ondevice.engines.simd.kernels.functions import exp
from ondevice.engines.simd.kernels.jit import kernel
from ondevice.engines.simd.kernels.memory import read_f32, write_f32
from ondevice.engines.simd.kernels.vector import fma, full, load, max_lanes, store

_ZERO, _ONE = np.float32(0.0), np.float32(1.0)
_LOWEST = np.float32(-1e30)


class States(NamedTuple):
    """The states of some pairs."""

    address: int
    stride: int
    """Bytes to the next pair's."""


@kernel
def clear(states: States, pairs: int, head_dim: int) -> None:
    """States of no positions."""
    for state in range(states.address, states.address + pairs * states.stride, states.stride):
        for at in range(0, 4 * head_dim, 64):
            store(state + at, full(_ZERO))
        write_f32(state + 4 * head_dim, _LOWEST)
        write_f32(state + 4 * head_dim + 4, _ZERO)


@kernel
def power(x: float) -> Any:
    """e**x, as vectors have it."""
    return max_lanes(exp(full(x)))


@kernel
def raise_peak(states: States, pair: int, head_dim: int, score: float) -> Any:
    """Make the weights of a state those of a larger score, where this one is larger; returns the largest."""
    state = states.address + pair * states.stride
    peak = read_f32(state + 4 * head_dim)
    if not score > peak:
        return peak
    total = read_f32(state + 4 * head_dim + 4)
    if total > _ZERO:
        factor = power(peak - score)
        for at in range(0, 4 * head_dim, 64):
            store(state + at, load(state + at) * full(factor))
        write_f32(state + 4 * head_dim + 4, total * factor)
    write_f32(state + 4 * head_dim, score)
    return score


@kernel
def fold(state: int, part: int, head_dim: int) -> None:
    """Let the positions of another state follow those of a state."""
    added = read_f32(part + 4 * head_dim + 4)
    if not added > _ZERO:
        return
    total, peak = read_f32(state + 4 * head_dim + 4), read_f32(state + 4 * head_dim)
    largest = read_f32(part + 4 * head_dim)
    own, other = _ONE, _ONE
    if not total > _ZERO:
        own, peak = _ZERO, largest
    elif largest > peak:
        own, peak = power(peak - largest), largest
    else:
        other = power(largest - peak)
    for at in range(0, 4 * head_dim, 64):
        store(state + at, fma(load(part + at), full(other), load(state + at) * full(own)))
    write_f32(state + 4 * head_dim, peak)
    write_f32(state + 4 * head_dim + 4, total * own + added * other)


@kernel
def fold_all(states: States, parts: States, pairs: int, head_dim: int) -> None:
    """`fold` of some pairs."""
    for i in range(pairs):
        fold(states.address + i * states.stride, parts.address + i * parts.stride, head_dim)
