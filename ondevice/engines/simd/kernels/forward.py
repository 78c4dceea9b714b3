"""Runs a plan: one call per thread executes its share of every step, with a barrier after each step.

The steps are in the files that are imported here. Within a step threads either take fixed shares of the units of work,
or claim them: see `claim` and `claim_part`.

A call may run the plan of one sequence several times, each time for the token that is chosen from the logits of the
last time, with a drafter's steps between: multi-step decoding, `continue_run`.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ondevice.engines.simd.kernels.attention.chosen import attend_chosen_share, attend_looked_up_share
from ondevice.engines.simd.kernels.attention.exact import attend_share
from ondevice.engines.simd.kernels.attention.lookup import look_up_share
from ondevice.engines.simd.kernels.attention.query_key_value import copy, head, move_row, whole_norm
from ondevice.engines.simd.kernels.contract import slots, steps
from ondevice.engines.simd.kernels.contract.entries import CLAIMS, LINE, RUN_TICKS, THREADS
from ondevice.engines.simd.kernels.contract.steps import Attend
from ondevice.engines.simd.kernels.convolution import convolve, move_product
from ondevice.engines.simd.kernels.delta import gate_rows, recur
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
    arrivals, done, drafts = before, np.int64(0), state[slots.DRAFTS] > 0
    turns, turn = drafts or state[slots.MOST_RUNS] > 1, np.int64(slots.DRAFT if drafts else slots.FORWARD)
    if thread == 0:
        state[slots.RAN] = 1
    while turn != slots.END:
        began = ticks()
        if turn == slots.DRAFT:
            run_steps(draft_plan, draft_state, thread, threads, counters, arrivals, done, scratch)
            count = len(draft_plan)
        else:
            run_steps(plan, state, thread, threads, counters, arrivals, done, scratch)
            count = len(plan)
        arrivals += threads * count
        done += count
        if not turns:
            break  # after the last barrier no slot is read: the next call may write it while this thread is stopped
        if thread == 0:
            state[slots.TURN] = continue_run(state, draft_state, turn)
            place = slots.DRAFT_TICKS if turn == slots.DRAFT else slots.FORWARD_TICKS
            state[place] += ticks() - began
        arrivals += threads
        wait_for_all(counters, thread, arrivals)
        turn = state[slots.TURN]
    if turns:
        arrivals += threads
        wait_for_all(counters, thread, arrivals)
    return arrivals


@kernel
def run_steps(  # noqa: PLR0912, PLR0915 - numba has no jump table
    plan: np.ndarray, state: np.ndarray,
    thread: int, threads: int, counters: int, before: int, done: int, scratch: int,
) -> None:  # fmt: skip
    """One thread's share of every step.

    Args:
        plan: int64[steps, WIDTH], see `contract.steps`.
        state: the forward's slots, int64, see `contract.slots`.
        thread, threads: number of this thread, and how many take part.
        counters: address of THREADS + threads lines, zeros before the first run; claims are zeros before every run.
        before: number of arrivals at the barrier before any thread began.
        done: number of steps that this run had before.
        scratch: address of this thread's working memory.
    """
    began, lines = ticks(), counters + LINE * THREADS
    own = lines + LINE * thread
    for i in range(len(plan)):
        words = plan[i]
        kind = words[0]
        claims = lines + 8 * (CLAIMS + (done + i) % 2)
        write_i64(own + 8 * (CLAIMS + (done + i + 1) % 2), np.int64(0))  # unused until the barrier below
        if kind == steps.PROJECT:
            project_share(words, state, thread, threads, claims)
        elif kind == steps.GATED:
            gated_share(words, state, thread, threads, claims, scratch)
        elif kind == steps.RESIDUAL:
            residual(words, state, thread, threads)
        elif kind == steps.HEAD:
            head(words, state, thread, threads, scratch)
        elif kind == steps.WHOLE_NORM:
            whole_norm(words, state, thread, threads)
        elif kind == steps.ATTEND:
            attend(words, state, thread, threads, claims)
        elif kind == steps.LOOK_UP:
            look_up_share(words, state, thread, threads, claims)
        elif kind == steps.SCORE:
            score(words, state, thread, threads)
        elif kind == steps.CHOOSE:
            if thread == 0:
                choose(words, state)
        elif kind == steps.SPREAD:
            spread(words, thread, threads)
        elif kind == steps.MIX:
            mix(words, state, thread, threads)
        elif kind == steps.EMBED:
            embed(words, state, thread, threads)
        elif kind == steps.PER_LAYER:
            per_layer(words, state, thread, threads)
        elif kind == steps.SELECT:
            select(words, state, thread, threads)
        elif kind == steps.CENTROID_SCORES:
            centroid_scores(words, thread, threads)
        elif kind == steps.CHOOSE_CLUSTERS:
            shortlist(words, thread, threads)
        elif kind == steps.CANDIDATE_LOGITS:
            candidate_logits(words, state, thread, threads)
        elif kind == steps.ACTIVATE:
            activate(words, state, thread, threads)
        elif kind == steps.CONVOLVE:
            convolve(words, state, thread, threads)
        elif kind == steps.RECUR:
            recur(words, state, thread, threads, scratch)
        elif kind == steps.GATE:
            gate_rows(words, state, thread, threads)
        wait_for_all(counters, thread, before + (i + 1) * threads)
    write_i64(own + 8 * RUN_TICKS, read_i64(own + 8 * RUN_TICKS) + ticks() - began)


@kernel
def continue_run(state: np.ndarray, draft_state: np.ndarray, turn: int) -> int:
    """Choose a token from the logits that were just computed, and write the slots of the next run.

    Without drafts, a forward of one row is followed by that of the token that was chosen. With drafts, the drafter runs
    the steps of a draft, a forward of the newest token and the draft follows, and `verify` accepts a part of it.

    Returns:
        The next turn: END, FORWARD or DRAFT.
    """
    if turn == slots.DRAFT:
        return take_guesses(state)
    run, last, token = state[slots.RAN], state[slots.RAN] == state[slots.MOST_RUNS], np.int64(-1)
    state[slots.ACCEPTED] = state[slots.LAST_ROW] = 0
    if state[slots.DRAFTS]:
        token = verify(state)
    elif not last:
        token = chosen_after(state, 0, 0)
    if last or token < 0:
        move(state, draft_state, -state[slots.MOVED])
        return slots.END
    rows = state[slots.ACCEPTED] + 1
    state[slots.MOVED] += rows
    move(state, draft_state, rows)
    write_i64(state[slots.TOKENS], token)
    sequence = read_i64(state[slots.SEQUENCES])
    length = read_i64(sequence + 8 * slots.LENGTH) + rows
    write_i64(sequence + 8 * slots.LENGTH, length)
    state[slots.RAN] = run + 1
    if not state[slots.DRAFTS]:
        state[slots.LOGITS] += state[slots.LOGITS_STRIDE]
        state[slots.HIDDEN] += state[slots.HIDDEN_STRIDE]
        place_row(state, 0, 0, length)
        return slots.FORWARD
    state[slots.DEPTH] = 0
    write_i64(state[slots.DRAFT_TOKEN], token)
    hidden = state[slots.HIDDEN] + state[slots.LAST_ROW] * state[slots.HIDDEN_STRIDE]
    copy(hidden, state[slots.DRAFT_HIDDEN], state[slots.HIDDEN_STRIDE] // 4)
    for kind in range(2):
        write_i64(draft_state[slots.STOP + kind], length)
    draft_state[slots.WINDOW + 1] = min(length, state[slots.DRAFT_WINDOW])
    write_i64(sequence + 8 * (slots.ROW_COUNT + slots.ALL), np.int64(1))
    return slots.DRAFT


@kernel
def take_guesses(state: np.ndarray) -> int:
    """Keep the tokens that are chosen from the drafter's logits; returns the next turn, another step after the first of
    them or the forward. Where none can be chosen, as from a damaged drafter, the draft ends.
    """
    record, depth, count = state[slots.GUESS_RECORD], state[slots.DEPTH], state[slots.GUESS_COUNT]
    length = read_i64(read_i64(state[slots.SEQUENCES]) + 8 * slots.LENGTH)
    for rank in range(count):
        write_i64(state[slots.GUESSES] + 8 * rank, np.int64(-1))
    write_i64(record + 8 * slots.CHOSEN_AT, length + 1 + depth)
    token = call_entry(state[slots.NEXT_TOKEN], record)
    if is_token(state, token):
        for rank in range(count):
            guess = read_i64(state[slots.GUESSES] + 8 * rank)
            write_i64(guess_at(state, depth, rank), guess if is_token(state, guess) else np.int64(-1))
        state[slots.DEPTH] = depth + 1
        if depth + 1 < state[slots.DRAFTS]:
            write_i64(state[slots.DRAFT_TOKEN], token)
            copy(state[slots.DRAFT_FOLLOWING], state[slots.DRAFT_HIDDEN], state[slots.HIDDEN_STRIDE] // 4)
            return slots.DRAFT
    write_rows(state, length)
    return slots.FORWARD


@kernel
def is_token(state: np.ndarray, token: int) -> Any:
    """Whether a number is the id of a token."""
    return 0 <= token < read_i64(state[slots.NEXT_RECORD] + 8 * slots.VOCABULARY)


@kernel
def guess_at(state: np.ndarray, depth: int, rank: int) -> Any:
    """The address of a guess of the present draft."""
    return state[slots.GUESSED] + 8 * (depth * state[slots.GUESS_COUNT] + rank)


@kernel
def write_rows(state: np.ndarray, length: int) -> None:
    """Write the rows of a draft after the newest token: the first guess of each step, then the other ones. A draft that
    ended early has the first guesses alone, so that each row has the place in the tree that its path says.
    """
    depths = state[slots.DEPTH]
    place_row(state, 0, 0, length)
    for depth in range(depths):
        write_i64(state[slots.TOKENS] + 8 * (depth + 1), read_i64(guess_at(state, depth, 0)))
        place_row(state, depth + 1, depth + 1, length)
    row = depths + 1
    for depth in range(depths if depths == state[slots.DRAFTS] else 0):
        for rank in range(1, read_i64(state[slots.WIDTHS] + 8 * depth)):
            guess = read_i64(guess_at(state, depth, rank))
            write_i64(state[slots.TOKENS] + 8 * row, guess if guess >= 0 else read_i64(guess_at(state, depth, 0)))
            place_row(state, row, depth + 1, length)
            row += 1
    state[slots.DRAFTED] = row - 1
    sequence = read_i64(state[slots.SEQUENCES])
    for row_set in range(2):
        state[row_set] = row
        write_i64(sequence + 8 * (slots.ROW_COUNT + row_set), row)


@kernel
def verify(state: np.ndarray) -> Any:
    """Accept a draft as far as it equals the tokens that are chosen from its rows; returns the token that follows,
    negative for none. Tokens, keys and values of what is accepted are moved next to those before.

    Rows of a draft of depth 2 with widths 3 and 2: first the newest token, then the first guess of each step, a chain,
    and after it the other guesses, step by step:

        row       0        1        2        3  4     5
        token     newest   a1       b1       a2 a3    b2

    A token that is not the first guess of its step may be another one (a2). Nothing follows such a row: the next step
    has read the first guess. `hits` counts the accepted rows of the chain, `beside` is the row of the first other guess
    of step `hits`.
    """
    depth, row, rank, hits = state[slots.DEPTH], np.int64(0), np.int64(0), np.int64(0)
    accepted, beside = np.int64(0), depth + 1
    last = not depth and state[slots.RAN] == state[slots.MOST_RUNS]  # then the caller chooses the token
    token = np.int64(-1) if last else chosen_after(state, 0, 0)
    while hits < depth and rank == 0 and token >= 0:
        rank = rank_of(state, hits, token)
        width = read_i64(state[slots.WIDTHS] + 8 * hits)
        if rank < 0 or (rank > 0 and (rank >= width or state[slots.DRAFTED] == depth)):
            break
        row = beside + rank - 1 if rank else hits + 1
        accepted += 1
        beside += width - 1
        if rank:
            move_accepted(state, row, accepted)
        else:
            hits += 1
        token = chosen_after(state, row, accepted)
    state[slots.ACCEPTED], state[slots.LAST_ROW] = accepted, row
    verdict = state[slots.VERDICTS] + 40 * (state[slots.RAN] - 1)
    write_i64(verdict, state[slots.DRAFTED])
    write_i64(verdict + 8, depth)
    write_i64(verdict + 16, accepted)
    write_i64(verdict + 24, hits)
    write_i64(verdict + 32, max(rank, 0))
    return token


@kernel
def rank_of(state: np.ndarray, depth: int, token: int) -> Any:
    """The rank of a token among the guesses of a step; -1 if it is none of them."""
    for rank in range(state[slots.GUESS_COUNT]):
        if read_i64(guess_at(state, depth, rank)) == token:
            return np.int64(rank)
    return np.int64(-1)


@kernel
def move_accepted(state: np.ndarray, row: int, place: int) -> None:
    """Move the token, the keys and the values of a row of the draft to the row `place` before it."""
    write_i64(state[slots.TOKENS] + 8 * place, read_i64(state[slots.TOKENS] + 8 * row))
    sequence = read_i64(state[slots.SEQUENCES])
    for cache in range(state[slots.CACHE_COUNT]):
        shape = state[slots.CACHE_SHAPES] + 24 * cache
        first = read_i64(sequence + 8 * slots.LENGTH) - read_i64(sequence + 8 * (slots.BASE + read_i64(shape)))
        at = sequence + 8 * (slots.CACHES + 2 * cache)
        heads, size = read_i64(shape + 8), read_i64(shape + 16)
        if heads:
            keys, values = read_i64(at), read_i64(at + 8)
            move_row(state[slots.CACHE_BITS], keys, values, first + row, first + place, heads, size)
        else:
            move_product(at, first + row, first + place, 4 * size)


@kernel
def chosen_after(state: np.ndarray, row: int, depth: int) -> Any:
    """The token that is chosen from a row of logits, `depth` positions after the newest token; negative for none."""
    record = state[slots.NEXT_RECORD]
    length = read_i64(read_i64(state[slots.SEQUENCES]) + 8 * slots.LENGTH)
    write_i64(record + 8 * slots.CHOSEN_FROM, state[slots.LOGITS] + row * state[slots.LOGITS_STRIDE])
    write_i64(record + 8 * slots.CHOSEN_AT, length + 1 + depth)
    return call_entry(state[slots.NEXT_TOKEN], record)


@kernel
def move(state: np.ndarray, draft_state: np.ndarray, rows: int) -> None:
    """Move the addresses of tokens, cosines and sines by so many rows. The drafter has rotary embeddings of its own."""
    state[slots.TOKENS] += 8 * rows
    first = slots.ROTARY if state[slots.DRAFTS] else slots.COSINES
    for table in range(2):
        state[first + table] += state[slots.ROTARY_STRIDE] * rows
        if state[slots.DRAFTS]:
            draft_state[slots.COSINES + table] += draft_state[slots.ROTARY_STRIDE] * rows


@kernel
def place_row(state: np.ndarray, row: int, depth: int, length: int) -> None:
    """Place a row `depth` positions after the first one, which follows `length` committed tokens: it sees the positions
    up to its own, and with drafts it gets the cosines and sines of that position.
    """
    for kind in range(2):
        write_i64(state[slots.STOP + kind] + 8 * row, length + depth + 1)
    if state[slots.DRAFTS]:
        stride = state[slots.ROTARY_STRIDE]
        for table in range(2):
            out = state[slots.COSINES + table] + row * stride
            copy(state[slots.ROTARY + table] + depth * stride, out, stride // 4)
