"""A whole forward in one call per thread."""

from __future__ import annotations

import numpy as np

from ondevice.engines.simd.kernels.attention_steps import attend_share
from ondevice.engines.simd.kernels.barrier import wait_for_all
from ondevice.engines.simd.kernels.chosen_attention import attend_chosen_share
from ondevice.engines.simd.kernels.experts import choose, mix, score, spread
from ondevice.engines.simd.kernels.jit import kernel
from ondevice.engines.simd.kernels.looking_up import look_up_share
from ondevice.engines.simd.kernels.memory import read_i64, ticks, write_i64
from ondevice.engines.simd.kernels.nomad_attention import attend_looked_up_share
from ondevice.engines.simd.kernels.projection_steps import activate, gated_share, head, project_share
from ondevice.engines.simd.kernels.row_steps import embed, per_layer, residual, select
from ondevice.engines.simd.kernels.shortlist_steps import candidate_logits, centroid_scores, shortlist
from ondevice.engines.simd.kernels.step_layouts import (
    ACTIVATE,
    ATTEND,
    ATTEND_CHOSEN,
    ATTEND_LOOKED_UP,
    CANDIDATE_LOGITS,
    CENTROID_SCORES,
    CHOOSE,
    EMBED,
    GATED,
    HEAD,
    LOOK_UP,
    MIX,
    PER_LAYER,
    PROJECT,
    RESIDUAL,
    SCORE,
    SELECT,
    SHORTLIST,
    SPREAD,
)

LINE = 64
"""Bytes from one counter to the next, each on a cache line of its own."""

ARRIVALS, CLAIMS, TICKS = 0, 1, 3
"""Lines of the counters: arrivals at the barrier; two to claim work with; and one for each thread with the ticks for
which it ran and those for which it waited, which add up from run to run."""


@kernel
def run(  # noqa: PLR0912, PLR0915 - numba has no jump table
    plan: np.ndarray, state: np.ndarray, thread: int, threads: int, counters: int, before: int, scratch: int
) -> None:
    """One thread's share of every step.

    Args:
        plan: int64[steps, WIDTH], see `step_layouts`.
        state: int64, see `slots`.
        counters: address of TICKS + threads lines, at first zeros.
        before: arrivals when no thread had begun.
        scratch: address of this thread's working memory.
    """
    began, waited = ticks(), 0
    own = counters + LINE * (TICKS + thread)
    claims, next_claims = counters + LINE * CLAIMS, counters + LINE * (CLAIMS + 1)
    for i in range(len(plan)):
        words = plan[i]
        kind = words[0]
        if thread == 0:  # nobody claims from it until the barrier below
            write_i64(next_claims, np.int64(0))
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
        elif kind == LOOK_UP:
            look_up_share(words, state, thread, threads, claims)
        elif kind == ATTEND_CHOSEN:
            attend_chosen_share(words, state, thread, claims)
        elif kind == ATTEND_LOOKED_UP:
            attend_looked_up_share(words, state, thread, claims)
        elif kind == SCORE:
            score(words, state, thread, threads)
        elif kind == CHOOSE:
            if thread == 0:
                choose(words, state)
        elif kind == SPREAD:
            spread(words, thread, threads)
        elif kind == MIX:
            mix(words, state, thread, threads)
        elif kind == EMBED:
            embed(words, state, thread, threads)
        elif kind == PER_LAYER:
            per_layer(words, state, thread, threads)
        elif kind == SELECT:
            select(words, state, thread, threads)
        elif kind == CENTROID_SCORES:
            centroid_scores(words, state, thread, threads)
        elif kind == SHORTLIST:
            shortlist(words, thread, threads)
        elif kind == CANDIDATE_LOGITS:
            candidate_logits(words, state, thread, threads)
        elif kind == ACTIVATE:
            activate(words, state, thread, threads)
        waited += wait_for_all(counters + LINE * ARRIVALS, before + (i + 1) * threads)
        claims, next_claims = next_claims, claims
    if thread == 0:  # the next run begins with both at zero, however many steps this one had
        write_i64(next_claims, np.int64(0))
    write_i64(own, read_i64(own) + ticks() - began)
    write_i64(own + 8, read_i64(own + 8) + waited)
