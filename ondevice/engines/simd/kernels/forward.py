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
from ondevice.engines.simd.kernels.attention.query_key_value import copy, head, move_row
from ondevice.engines.simd.kernels.contract import CLAIMS, LINE, TICKS, Attend
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
        wait_for_all(counters, thread, arrivals)
        turn = state[contract.TURN]
    if turns:
        arrivals += threads
        wait_for_all(counters, thread, arrivals)
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
    began, own = ticks(), counters + LINE * (TICKS + thread)
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
        wait_for_all(counters, thread, before + (i + 1) * threads)
        claims, next_claims = next_claims, claims
    if thread == 0:  # both counters are zero for the next run, whether the number of steps is odd or even
        write_i64(next_claims, np.int64(0))
    write_i64(own, read_i64(own) + ticks() - began)


@kernel
def continue_run(state: np.ndarray, draft_state: np.ndarray, turn: int) -> int:
    """Choose a token from the logits that were just computed, and write the slots of the next run.

    Without drafts, a forward of one row is followed by that of the token that was chosen. With drafts, the drafter runs
    the steps of a draft, a forward of the newest token and the draft follows, and `verify` accepts a part of it.

    Returns:
        The next turn: END, FORWARD or DRAFT.
    """
    if turn == contract.DRAFT:
        return take_guesses(state)
    run, last, token = state[contract.RAN], state[contract.RAN] == state[contract.MOST_RUNS], np.int64(-1)
    state[contract.ACCEPTED] = state[contract.LAST_ROW] = 0
    if state[contract.DRAFTS]:
        token = verify(state)
    elif not last:
        token = chosen_after(state, 0, 0)
    if last or token < 0:
        move(state, draft_state, -state[contract.MOVED])
        return contract.END
    rows = state[contract.ACCEPTED] + 1
    state[contract.MOVED] += rows
    move(state, draft_state, rows)
    write_i64(state[contract.TOKENS], token)
    sequence = read_i64(state[contract.SEQUENCES])
    length = read_i64(sequence + 8 * contract.LENGTH) + rows
    write_i64(sequence + 8 * contract.LENGTH, length)
    state[contract.RAN] = run + 1
    if not state[contract.DRAFTS]:
        state[contract.LOGITS] += state[contract.LOGITS_STRIDE]
        state[contract.HIDDEN] += state[contract.HIDDEN_STRIDE]
        place_row(state, 0, 0, length)
        return contract.FORWARD
    state[contract.DEPTH] = 0
    write_i64(state[contract.DRAFT_TOKEN], token)
    hidden = state[contract.HIDDEN] + state[contract.LAST_ROW] * state[contract.HIDDEN_STRIDE]
    copy(hidden, state[contract.DRAFT_HIDDEN], state[contract.HIDDEN_STRIDE] // 4)
    for kind in range(2):
        write_i64(draft_state[contract.STOP + kind], length)
    draft_state[contract.WINDOW + 1] = min(length, state[contract.DRAFT_WINDOW])
    write_i64(sequence + 8 * (contract.ROW_COUNT + contract.ALL), np.int64(1))
    return contract.DRAFT


@kernel
def take_guesses(state: np.ndarray) -> int:
    """Keep the tokens that are chosen from the drafter's logits; returns the next turn, another step after the first of
    them or the forward. Where none can be chosen, as from a damaged drafter, the draft ends.
    """
    record, depth, count = state[contract.GUESS_RECORD], state[contract.DEPTH], state[contract.GUESS_COUNT]
    length = read_i64(read_i64(state[contract.SEQUENCES]) + 8 * contract.LENGTH)
    for rank in range(count):
        write_i64(state[contract.GUESSES] + 8 * rank, np.int64(-1))
    write_i64(record + 8 * contract.CHOSEN_AT, length + 1 + depth)
    token = call_entry(state[contract.NEXT_TOKEN], record)
    if is_token(state, token):
        for rank in range(count):
            guess = read_i64(state[contract.GUESSES] + 8 * rank)
            write_i64(guess_at(state, depth, rank), guess if is_token(state, guess) else np.int64(-1))
        state[contract.DEPTH] = depth + 1
        if depth + 1 < state[contract.DRAFTS]:
            write_i64(state[contract.DRAFT_TOKEN], token)
            copy(state[contract.DRAFT_FOLLOWING], state[contract.DRAFT_HIDDEN], state[contract.HIDDEN_STRIDE] // 4)
            return contract.DRAFT
    write_rows(state, length)
    return contract.FORWARD


@kernel
def is_token(state: np.ndarray, token: int) -> Any:
    """Whether a number is the id of a token."""
    return 0 <= token < read_i64(state[contract.NEXT_RECORD] + 8 * contract.VOCABULARY)


@kernel
def guess_at(state: np.ndarray, depth: int, rank: int) -> Any:
    """The address of a guess of the present draft."""
    return state[contract.GUESSED] + 8 * (depth * state[contract.GUESS_COUNT] + rank)


@kernel
def write_rows(state: np.ndarray, length: int) -> None:
    """Write the rows of a draft after the newest token: the first guess of each step, then the other ones. A draft that
    ended early has the first guesses alone, so that each row has the place in the tree that its path says.
    """
    depths = state[contract.DEPTH]
    place_row(state, 0, 0, length)
    for depth in range(depths):
        write_i64(state[contract.TOKENS] + 8 * (depth + 1), read_i64(guess_at(state, depth, 0)))
        place_row(state, depth + 1, depth + 1, length)
    row = depths + 1
    for depth in range(depths if depths == state[contract.DRAFTS] else 0):
        for rank in range(1, read_i64(state[contract.WIDTHS] + 8 * depth)):
            guess = read_i64(guess_at(state, depth, rank))
            write_i64(state[contract.TOKENS] + 8 * row, guess if guess >= 0 else read_i64(guess_at(state, depth, 0)))
            place_row(state, row, depth + 1, length)
            row += 1
    state[contract.DRAFTED] = row - 1
    sequence = read_i64(state[contract.SEQUENCES])
    for row_set in range(2):
        state[row_set] = row
        write_i64(sequence + 8 * (contract.ROW_COUNT + row_set), row)


@kernel
def verify(state: np.ndarray) -> Any:
    """Accept a draft as far as it equals the tokens that are chosen from its rows; returns the token that follows,
    negative for none. Tokens, keys and values of what is accepted are moved next to those before.

    A token that is not the first guess of its step may be another one. Nothing follows such a row: the next step has
    read the first guess.
    """
    depth, row, rank, hits = state[contract.DEPTH], np.int64(0), np.int64(0), np.int64(0)
    accepted, beside = np.int64(0), depth + 1
    if not depth and state[contract.RAN] == state[contract.MOST_RUNS]:
        token = np.int64(-1)  # the caller chooses it
    else:
        token = chosen_after(state, 0, 0)
    while hits < depth and rank == 0 and token >= 0:
        rank = rank_of(state, hits, token)
        width = read_i64(state[contract.WIDTHS] + 8 * hits)
        if rank < 0 or (rank > 0 and (rank >= width or state[contract.DRAFTED] == depth)):
            break
        row = beside + rank - 1 if rank else hits + 1
        accepted += 1
        beside += width - 1
        if rank:
            move_accepted(state, row, accepted)
        else:
            hits += 1
        token = chosen_after(state, row, accepted)
    state[contract.ACCEPTED], state[contract.LAST_ROW] = accepted, row
    verdict = state[contract.VERDICTS] + 40 * (state[contract.RAN] - 1)
    write_i64(verdict, state[contract.DRAFTED])
    write_i64(verdict + 8, depth)
    write_i64(verdict + 16, accepted)
    write_i64(verdict + 24, hits)
    write_i64(verdict + 32, max(rank, 0))
    return token


@kernel
def rank_of(state: np.ndarray, depth: int, token: int) -> Any:
    """The rank of a token among the guesses of a step; -1 if it is none of them."""
    for rank in range(state[contract.GUESS_COUNT]):
        if read_i64(guess_at(state, depth, rank)) == token:
            return np.int64(rank)
    return np.int64(-1)


@kernel
def move_accepted(state: np.ndarray, row: int, place: int) -> None:
    """Move the token, the keys and the values of a row of the draft to the row `place` before it."""
    write_i64(state[contract.TOKENS] + 8 * place, read_i64(state[contract.TOKENS] + 8 * row))
    sequence = read_i64(state[contract.SEQUENCES])
    for cache in range(state[contract.CACHE_COUNT]):
        shape = state[contract.CACHE_SHAPES] + 24 * cache
        first = read_i64(sequence + 8 * contract.LENGTH) - read_i64(sequence + 8 * (contract.BASE + read_i64(shape)))
        at = sequence + 8 * (contract.CACHES + 2 * cache)
        keys, values = read_i64(at), read_i64(at + 8)
        heads, size = read_i64(shape + 8), read_i64(shape + 16)
        move_row(state[contract.CACHE_BITS], keys, values, first + row, first + place, heads, size)


@kernel
def chosen_after(state: np.ndarray, row: int, depth: int) -> Any:
    """The token that is chosen from a row of logits, `depth` positions after the newest token; negative for none."""
    record = state[contract.NEXT_RECORD]
    length = read_i64(read_i64(state[contract.SEQUENCES]) + 8 * contract.LENGTH)
    write_i64(record + 8 * contract.CHOSEN_FROM, state[contract.LOGITS] + row * state[contract.LOGITS_STRIDE])
    write_i64(record + 8 * contract.CHOSEN_AT, length + 1 + depth)
    return call_entry(state[contract.NEXT_TOKEN], record)


@kernel
def move(state: np.ndarray, draft_state: np.ndarray, rows: int) -> None:
    """Move the addresses of tokens, cosines and sines by so many rows."""
    state[contract.TOKENS] += 8 * rows
    step = state[contract.ROTARY_STRIDE] * rows
    table = contract.ROTARY if state[contract.DRAFTS] else contract.COSINES
    for kind in range(2):
        state[table + kind] += step
        if state[contract.DRAFTS]:
            draft_state[contract.COSINES + kind] += step


@kernel
def place_row(state: np.ndarray, row: int, depth: int, length: int) -> None:
    """Place a row `depth` positions after the first one, which follows `length` committed tokens: it sees the positions
    up to its own, and with drafts it gets the cosines and sines of that position.
    """
    for kind in range(2):
        write_i64(state[contract.STOP + kind] + 8 * row, length + depth + 1)
    if state[contract.DRAFTS]:
        stride = state[contract.ROTARY_STRIDE]
        for table in range(2):
            out = state[contract.COSINES + table] + row * stride
            copy(state[contract.ROTARY + table] + depth * stride, out, stride // 4)
