"""A whole forward in one call per thread."""

from __future__ import annotations

import numpy as np

from ondevice.engines.simd.kernels.barrier import wait_for_all
from ondevice.engines.simd.kernels.jit import kernel
from ondevice.engines.simd.kernels.memory import write_i64
from ondevice.engines.simd.kernels.step_layouts import (
    ATTEND,
    CANDIDATE_LOGITS,
    CENTROID_SCORES,
    EMBED,
    GATED,
    HEAD,
    PER_LAYER,
    PROJECT,
    RESIDUAL,
    SELECT,
    SHORTLIST,
)
from ondevice.engines.simd.kernels.steps import (
    attend_share,
    candidate_logits,
    centroid_scores,
    embed,
    gated_share,
    head,
    per_layer,
    project_share,
    residual,
    select,
    shortlist,
)

COUNTER_BYTES = 3 * 64
"""The barrier's int64, and two to claim work with, on cache lines of their own."""


@kernel
def run(  # noqa: PLR0912 - numba has no jump table
    plan: np.ndarray, state: np.ndarray, thread: int, threads: int, counter: int, before: int, scratch: int
) -> None:
    """One thread's share of every step.

    Args:
        plan: int64[steps, WIDTH], see `step_layouts`.
        state: int64, see `slots`.
        counter: address of COUNTER_BYTES, at first zeros.
        before: steps that were run with this counter before.
        scratch: address of this thread's working memory.
    """
    for i in range(len(plan)):
        words = plan[i]
        kind = words[0]
        claims = counter + 64 + 64 * ((before + i) % 2)
        if thread == 0:  # the other counter is unused until the barrier below
            write_i64(counter + 64 + 64 * ((before + i + 1) % 2), np.int64(0))
        if kind == PROJECT:
            project_share(words, state, threads, claims)
        elif kind == GATED:
            gated_share(words, state, threads, claims, scratch)
        elif kind == RESIDUAL:
            residual(words, state, thread, threads)
        elif kind == HEAD:
            head(words, state, thread, threads, scratch)
        elif kind == ATTEND:
            attend_share(words, state, thread, threads, claims)
        elif kind == EMBED:
            embed(words, state, thread, threads)
        elif kind == PER_LAYER:
            per_layer(words, state, thread, threads)
        elif kind == SELECT:
            select(words, state, thread, threads)
        elif kind == CENTROID_SCORES:
            centroid_scores(words, state, thread, threads)
        elif kind == SHORTLIST:
            if thread == 0:
                shortlist(words)
        elif kind == CANDIDATE_LOGITS:
            candidate_logits(words, state, thread, threads)
        wait_for_all(counter, (before + i + 1) * threads)
