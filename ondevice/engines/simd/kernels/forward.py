"""Runs a plan: one call per thread executes its share of every step, with a barrier after each step.

The steps are in the files that are imported here. Within a step threads either take fixed shares of the units of work,
or claim them from a counter. Two counters are used in turn, so that one can be reset while the other is in use.

A call may run the plan of a single row several times, each time for the token that is chosen from the logits of the
last time.
"""

from __future__ import annotations

import numpy as np

from ondevice.engines.simd.kernels import contract
from ondevice.engines.simd.kernels.attention.chosen import attend_chosen_share, attend_looked_up_share
from ondevice.engines.simd.kernels.attention.exact import attend_share
from ondevice.engines.simd.kernels.attention.lookup import look_up_share
from ondevice.engines.simd.kernels.attention.query_key_value import head
from ondevice.engines.simd.kernels.contract import AGAIN, ARRIVALS, CLAIMS, LINE, MOST_RUNS, RAN, TICKS, Attend
from ondevice.engines.simd.kernels.experts import choose, mix, score, spread
from ondevice.engines.simd.kernels.isa.jit import read_step
from ondevice.engines.simd.kernels.isa.memory import call_entry, read_i64, ticks, wait_for_all, write_i64
from ondevice.engines.simd.kernels.project import activate, gated_share, project_share
from ondevice.engines.simd.kernels.rows import (
    candidate_logits,
    centroid_scores,
    embed,
    per_layer,
    residual,
    select,
    shortlist,
)
from ondevice.native.functions import kernel


@kernel
def attend(words: np.ndarray, state: np.ndarray, thread: int, threads: int, claims: int) -> None:
    """The step `Attend`: to chosen units, to all positions with looked-up scores, or to all positions exactly."""
    step = read_step(Attend, words)
    if step.chosen:
        attend_chosen_share(words, state, thread, claims)
    elif step.codes:
        attend_looked_up_share(words, state, thread, claims)
    else:
        attend_share(words, state, thread, threads, claims)


@kernel
def run(
    plan: np.ndarray, state: np.ndarray, thread: int, threads: int, counters: int, before: int, scratch: int
) -> int:
    """One thread's share of every step, once, or as often as `continues` says.

    Arguments as for `run_steps`. Returns the number of arrivals when all threads are done.
    """
    arrivals, most_runs = before, state[MOST_RUNS]
    if thread == 0:
        state[RAN] = 1
    again = True
    while again:
        run_steps(plan, state, thread, threads, counters, arrivals, scratch)
        arrivals += threads * len(plan)
        if most_runs < 2:
            break  # behind the last barrier no slot is read: the next call may write it while this thread is stopped
        if thread == 0:
            state[AGAIN] = continues(state)
        arrivals += threads
        wait_for_all(counters + LINE * ARRIVALS, arrivals)
        again = state[AGAIN] != 0
    if most_runs > 1:
        arrivals += threads
        wait_for_all(counters + LINE * ARRIVALS, arrivals)
    return arrivals


@kernel
def run_steps(  # noqa: PLR0912 - numba has no jump table
    plan: np.ndarray, state: np.ndarray, thread: int, threads: int, counters: int, before: int, scratch: int
) -> None:
    """One thread's share of every step.

    Args:
        plan: int64[steps, WIDTH], see `contract`.
        state: the forward's slots, int64, see `contract`.
        thread, threads: number of this thread, and how many take part.
        counters: address of TICKS + threads lines, zeros before the first run.
        before: number of arrivals at the barrier before any thread began.
        scratch: address of this thread's working memory.
    """
    began, waited = ticks(), 0
    own = counters + LINE * (TICKS + thread)
    claims, next_claims = counters + LINE * CLAIMS, counters + LINE * (CLAIMS + 1)
    for i in range(len(plan)):
        words = plan[i]
        kind = words[0]
        if thread == 0:  # this counter is unused until the barrier below
            write_i64(next_claims, np.int64(0))
        if kind == contract.PROJECT:
            project_share(words, state, threads, claims)
        elif kind == contract.GATED:
            gated_share(words, state, threads, claims, scratch)
        elif kind == contract.RESIDUAL:
            residual(words, state, thread, threads)
        elif kind == contract.HEAD:
            head(words, state, thread, threads, scratch)
        elif kind == contract.ATTEND:
            attend(words, state, thread, threads, claims)
        elif kind == contract.LOOK_UP:
            look_up_share(words, state, thread, threads, claims)
        elif kind == contract.SCORE:
            score(words, state, thread, threads)
        elif kind == contract.CHOOSE:
            if thread == 0:
                choose(words, state)
        elif kind == contract.SPREAD:
            spread(words, thread, threads)
        elif kind == contract.MIX:
            mix(words, state, thread, threads)
        elif kind == contract.EMBED:
            embed(words, state, thread, threads)
        elif kind == contract.PER_LAYER:
            per_layer(words, state, thread, threads)
        elif kind == contract.SELECT:
            select(words, state, thread, threads)
        elif kind == contract.CENTROID_SCORES:
            centroid_scores(words, state, thread, threads)
        elif kind == contract.CHOOSE_CLUSTERS:
            shortlist(words, thread, threads)
        elif kind == contract.CANDIDATE_LOGITS:
            candidate_logits(words, state, thread, threads)
        elif kind == contract.ACTIVATE:
            activate(words, state, thread, threads)
        waited += wait_for_all(counters + LINE * ARRIVALS, before + (i + 1) * threads)
        claims, next_claims = next_claims, claims
    if thread == 0:  # both counters are zero for the next run, whether the number of steps is odd or even
        write_i64(next_claims, np.int64(0))
    write_i64(own, read_i64(own) + ticks() - began)
    write_i64(own + 8, read_i64(own + 8) + waited)


@kernel
def continues(state: np.ndarray) -> bool:
    """Choose the token that follows the single row which was just run, and write the slots of that token's forward.
    After the last run write back the addresses that were moved.

    Returns:
        Whether there is such a token.
    """
    runs, token = state[RAN], np.int64(-1)
    if runs < state[MOST_RUNS]:
        record = state[contract.NEXT_RECORD]
        write_i64(record + 8 * contract.CHOSEN_FROM, state[contract.LOGITS])
        write_i64(record + 8 * contract.CHOSEN_AT, read_i64(state[contract.STOP]))
        token = call_entry(state[contract.NEXT_TOKEN], record)
    if token < 0:
        state[contract.TOKENS] -= 8 * (runs - 1)
        state[contract.COSINES] -= state[contract.ROTARY_STRIDE] * (runs - 1)
        state[contract.SINES] -= state[contract.ROTARY_STRIDE] * (runs - 1)
        return False
    state[contract.TOKENS] += 8
    write_i64(state[contract.TOKENS], token)
    state[contract.COSINES] += state[contract.ROTARY_STRIDE]
    state[contract.SINES] += state[contract.ROTARY_STRIDE]
    state[contract.LOGITS] += state[contract.LOGITS_STRIDE]
    state[contract.HIDDEN] += state[contract.HIDDEN_STRIDE]
    length = read_i64(state[contract.SEQUENCES]) + 8 * contract.LENGTH
    write_i64(length, read_i64(length) + 1)
    for kind in range(2):
        stop = state[contract.STOP + kind]
        write_i64(stop, read_i64(stop) + 1)
    state[RAN] = runs + 1
    return True
