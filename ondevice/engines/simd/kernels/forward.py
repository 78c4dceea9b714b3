"""Runs a plan: one call per thread executes its share of every step, with a barrier after each step.

The steps are in the files that are imported here. Within a step threads either take fixed shares of the units of work,
or claim them from a counter. Two counters are used in turn, so that one can be reset while the other is in use.

A call may run the plan of one sequence several times, each time for the token that is chosen from the logits of the
last time, with a drafter's steps between: multi-step decoding, `continue_run`.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ondevice.engines.simd.kernels import contract
from ondevice.engines.simd.kernels.attention.chosen import attend_chosen_share, attend_looked_up_share
from ondevice.engines.simd.kernels.attention.exact import attend_share
from ondevice.engines.simd.kernels.attention.lookup import look_up_share
from ondevice.engines.simd.kernels.attention.query_key_value import copy, head
from ondevice.engines.simd.kernels.contract import ARRIVALS, CLAIMS, LINE, TICKS, Attend
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
    plan: np.ndarray, state: np.ndarray, draft_plan: np.ndarray, draft_state: np.ndarray,
    thread: int, threads: int, counters: int, before: int, scratch: int,
) -> int:  # fmt: skip
    """One thread's share of every step of a plan; or of several runs of it and of a drafter's plan, as `continue_run`
    says.

    Args:
        plan, state, thread, threads, counters, before, scratch: as for `run_steps`.
        draft_plan, draft_state: those of a drafter's step; not read without drafts.

    Returns:
        The number of arrivals when all threads are done.
    """
    arrivals, drafts = before, state[contract.DRAFTS] > 0
    turns, turn = drafts or state[contract.MOST_RUNS] > 1, np.int64(contract.DRAFT if drafts else contract.FORWARD)
    if thread == 0:
        state[contract.RAN] = 1
    while turn != contract.END:
        began = ticks()
        if turn == contract.DRAFT:
            run_steps(draft_plan, draft_state, thread, threads, counters, arrivals, scratch)
            arrivals += threads * len(draft_plan)
        else:
            run_steps(plan, state, thread, threads, counters, arrivals, scratch)
            arrivals += threads * len(plan)
        if not turns:
            break  # behind the last barrier no slot is read: the next call may write it while this thread is stopped
        if thread == 0:
            state[contract.TURN] = continue_run(state, draft_state, turn)
            place = contract.DRAFT_TICKS if turn == contract.DRAFT else contract.FORWARD_TICKS
            state[place] += ticks() - began
        arrivals += threads
        wait_for_all(counters + LINE * ARRIVALS, arrivals)
        turn = state[contract.TURN]
    if turns:
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
def continue_run(state: np.ndarray, draft_state: np.ndarray, turn: int) -> int:
    """Choose a token from the logits that were just computed, and write the slots of the next run.

    Without drafts, a forward of one row is followed by that of the token that was chosen. With drafts, the drafter runs
    a step for each token of a chain; a forward of the newest token and the chain verifies it; and the chain is accepted
    as far as the tokens that are chosen equal it.

    Returns:
        The next turn: END, FORWARD or DRAFT.
    """
    if turn == contract.DRAFT:
        return take_guess(state, draft_state)
    run, drafted = state[contract.RAN], state[contract.DRAFTED]
    last, row, token = run == state[contract.MOST_RUNS], 0, np.int64(-1)
    if not last or drafted:
        token = chosen_after(state, row)
        while row < drafted and token == read_i64(state[contract.TOKENS] + 8 * (row + 1)):
            row += 1
            token = chosen_after(state, row)
    state[contract.LAST_ROW] = row
    if state[contract.DRAFTS]:
        write_i64(state[contract.VERDICTS] + 16 * (run - 1), drafted)
        write_i64(state[contract.VERDICTS] + 16 * (run - 1) + 8, np.int64(row))
    if last or token < 0:
        move(state, draft_state, -state[contract.MOVED])
        return contract.END
    state[contract.MOVED] += row + 1
    move(state, draft_state, row + 1)
    write_i64(state[contract.TOKENS], token)
    sequence = read_i64(state[contract.SEQUENCES])
    length = read_i64(sequence + 8 * contract.LENGTH) + row + 1
    write_i64(sequence + 8 * contract.LENGTH, length)
    state[contract.RAN] = run + 1
    if not state[contract.DRAFTS]:
        state[contract.LOGITS] += state[contract.LOGITS_STRIDE]
        state[contract.HIDDEN] += state[contract.HIDDEN_STRIDE]
        write_stops(state, length, 1)
        return contract.FORWARD
    state[contract.DRAFTED] = 0
    write_i64(state[contract.DRAFT_TOKEN], token)
    hidden = state[contract.HIDDEN] + row * state[contract.HIDDEN_STRIDE]
    copy(hidden, state[contract.DRAFT_HIDDEN], state[contract.HIDDEN_STRIDE] // 4)
    for kind in range(2):
        write_i64(draft_state[contract.STOP + kind], length)
    draft_state[contract.WINDOW + 1] = min(length, state[contract.DRAFT_WINDOW])
    write_i64(sequence + 8 * (contract.ROW_COUNT + contract.ALL), np.int64(1))
    return contract.DRAFT


@kernel
def take_guess(state: np.ndarray, draft_state: np.ndarray) -> int:
    """Append the token that is chosen from the drafter's logits to the chain; returns the next turn. Where none can be
    chosen, as from a damaged drafter, the chain ends.
    """
    record, drafted = state[contract.GUESS_RECORD], state[contract.DRAFTED]
    sequence = read_i64(state[contract.SEQUENCES])
    length = read_i64(sequence + 8 * contract.LENGTH)
    write_i64(record + 8 * contract.CHOSEN_AT, length + 1 + drafted)
    token = call_entry(state[contract.NEXT_TOKEN], record)
    if 0 <= token < read_i64(state[contract.NEXT_RECORD] + 8 * contract.VOCABULARY):
        drafted += 1
        state[contract.DRAFTED] = drafted
        write_i64(state[contract.TOKENS] + 8 * drafted, token)
        if drafted < state[contract.DRAFTS]:
            write_i64(state[contract.DRAFT_TOKEN], token)
            copy(state[contract.DRAFT_FOLLOWING], state[contract.DRAFT_HIDDEN], state[contract.HIDDEN_STRIDE] // 4)
            return contract.DRAFT
    for row_set in range(2):
        state[row_set] = drafted + 1
        write_i64(sequence + 8 * (contract.ROW_COUNT + row_set), drafted + 1)
    write_stops(state, length, drafted + 1)
    return contract.FORWARD


@kernel
def chosen_after(state: np.ndarray, row: int) -> Any:
    """The token that is chosen from a row of logits; negative for none."""
    record = state[contract.NEXT_RECORD]
    length = read_i64(read_i64(state[contract.SEQUENCES]) + 8 * contract.LENGTH)
    write_i64(record + 8 * contract.CHOSEN_FROM, state[contract.LOGITS] + row * state[contract.LOGITS_STRIDE])
    write_i64(record + 8 * contract.CHOSEN_AT, length + 1 + row)
    return call_entry(state[contract.NEXT_TOKEN], record)


@kernel
def move(state: np.ndarray, draft_state: np.ndarray, rows: int) -> None:
    """Move the addresses of tokens, cosines and sines by so many rows."""
    state[contract.TOKENS] += 8 * rows
    state[contract.COSINES] += state[contract.ROTARY_STRIDE] * rows
    state[contract.SINES] += state[contract.ROTARY_STRIDE] * rows
    if state[contract.DRAFTS]:
        draft_state[contract.COSINES] += draft_state[contract.ROTARY_STRIDE] * rows
        draft_state[contract.SINES] += draft_state[contract.ROTARY_STRIDE] * rows


@kernel
def write_stops(state: np.ndarray, length: int, rows: int) -> None:
    """Let each row of a chain after `length` committed tokens see the positions up to its own."""
    for kind in range(2):
        for row in range(rows):
            write_i64(state[contract.STOP + kind] + 8 * row, length + row + 1)
