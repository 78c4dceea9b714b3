"""A whole forward in one call per thread."""

from __future__ import annotations

import numpy as np

from ondevice.engines.simd.kernels.barrier import meet
from ondevice.engines.simd.kernels.jit import kernel
from ondevice.engines.simd.kernels.memory import write_i64
from ondevice.engines.simd.kernels.steps import (
    ATTEND,
    CANDIDATE_LOGITS,
    CENTROIDS,
    EMBED,
    GATED,
    HEAD,
    PER_LAYER,
    PROJECT,
    RESIDUAL,
    SELECT,
    SHORTLIST,
    attend_share,
    candidate_logits,
    centroids,
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
        plan: int64[steps, WIDTH].
        state: int64, see `slots`.
        counter: address of COUNTER_BYTES, at first zeros.
        before: steps that were run with this counter before.
        scratch: address of this thread's working memory.
    """
    for i in range(len(plan)):
        step = plan[i]
        kind = step[0]
        claims = counter + 64 + 64 * ((before + i) % 2)
        if thread == 0:  # nobody looks at the next step's before the barrier between
            write_i64(counter + 64 + 64 * ((before + i + 1) % 2), np.int64(0))
        if kind == PROJECT:
            project_share(step, state, threads, claims)
        elif kind == GATED:
            gated_share(step, state, threads, claims, scratch)
        elif kind == RESIDUAL:
            residual(step, state, thread, threads)
        elif kind == HEAD:
            head(step, state, thread, threads, scratch)
        elif kind == ATTEND:
            attend_share(step, state, thread, threads, claims)
        elif kind == EMBED:
            embed(step, state, thread, threads)
        elif kind == PER_LAYER:
            per_layer(step, state, thread, threads)
        elif kind == SELECT:
            select(step, state, thread, threads)
        elif kind == CENTROIDS:
            centroids(step, state, thread, threads)
        elif kind == SHORTLIST:
            if thread == 0:
                shortlist(step)
        elif kind == CANDIDATE_LOGITS:
            candidate_logits(step, state, thread, threads)
        meet(counter, (before + i + 1) * threads)
