"""A thread's share of the steps by which a drafter scores some clusters of tokens in place of all: `shortlist_layouts`.

`words` is a step's row of the plan, int64[WIDTH], with the fields of its layout; `state` are the forward's slots.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ondevice.engines.simd.kernels.best import best_of
from ondevice.engines.simd.kernels.functions import tanh
from ondevice.engines.simd.kernels.jit import kernel
from ondevice.engines.simd.kernels.memory import bits_float, read_i64, write_f32, write_i64
from ondevice.engines.simd.kernels.shares import first_unit
from ondevice.engines.simd.kernels.shortlist_layouts import CandidateLogits, CentroidScores, Shortlist
from ondevice.engines.simd.kernels.slots import CANDIDATES, LOGITS
from ondevice.engines.simd.kernels.step_layouts import read_step
from ondevice.engines.simd.kernels.tables import dot, dot_row, prefetch_row
from ondevice.engines.simd.kernels.vector import full, max_lanes

AHEAD = 4
"""Rows of a table from the one that is multiplied to the one that is prefetched, where they lie scattered."""


@kernel
def centroid_scores(words: np.ndarray, state: np.ndarray, thread: int, threads: int) -> None:
    """out = weights @ x, float32[clusters], of float32[clusters, width] centroids and one row x."""
    step = read_step(CentroidScores, words)
    width = step.width
    for row in range(first_unit(step.clusters, thread, threads), first_unit(step.clusters, thread + 1, threads)):
        write_f32(step.out + 4 * row, dot(step.weights + 4 * width * row, step.x, width))


@kernel
def shortlist(words: np.ndarray, thread: int, threads: int) -> None:
    """chosen = of every row, the indices of the `top` largest of float32[clusters] scores, largest first; equal ones in
    order.
    """
    step = read_step(Shortlist, words)
    for row in range(first_unit(step.rows, thread, threads), first_unit(step.rows, thread + 1, threads)):
        best_of(step.scores + 4 * row * step.stride, step.clusters, step.chosen + 8 * row * step.top, step.top)


@kernel
def _candidate(chosen: int, ids: int, per_cluster: int, number: int) -> Any:
    """The place of a candidate among the clusters' tokens, and the token."""
    place = read_i64(chosen + 8 * (number // per_cluster)) * per_cluster + number % per_cluster
    return place, read_i64(ids + 8 * place)


@kernel
def candidate_logits(words: np.ndarray, state: np.ndarray, thread: int, threads: int) -> None:
    """logits[i] = softcap(table row . x) and candidates[i], for all tokens of a row's chosen clusters, in order.

    logits float32[rows, top * per_cluster] and candidates int64 of that shape. Threads share them all.
    """
    step = read_step(CandidateLogits, words)
    per_cluster, clustered, cap = step.per_cluster, step.clustered, bits_float(np.int32(step.cap))
    count = step.rows * step.top * per_cluster
    last = first_unit(count, thread + 1, threads)
    for i in range(first_unit(count, thread, threads), last):
        place, token = _candidate(step.chosen, step.ids, per_cluster, i)
        if not clustered:
            _, later = _candidate(step.chosen, step.ids, per_cluster, min(i + AHEAD, last - 1))
            prefetch_row(step.codes, step.scales, step.half, step.bits, step.group, later, step.width)
        write_i64(state[CANDIDATES] + 8 * i, token)
        row, x = place if clustered else token, step.x + 4 * step.width * (i // (step.top * per_cluster))
        logit = dot_row(step.codes, step.scales, step.half, step.bits, step.group, row, step.width, x)
        if cap > 0:
            logit = max_lanes(full(cap) * tanh(full(logit / cap)))
        write_f32(state[LOGITS] + 4 * i, logit)
