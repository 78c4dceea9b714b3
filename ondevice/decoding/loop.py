"""The loop: prefill, then draft, forward, accept, commit, yield."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from time import perf_counter

import numpy as np

from ondevice.decoding.record import FinishReason, Round
from ondevice.decoding.sampling import Sampler
from ondevice.decoding.schedule import Schedule
from ondevice.decoding.verify import accept
from ondevice.drafters.protocol import Draft, Drafter
from ondevice.engines.protocol import Engine, Outputs, TokenTree
from ondevice.progress import Progress, silent

NO_DRAFT = Draft.empty()


@dataclass(frozen=True)
class Limits:
    """When a generation ends, and who is asked and told on the way.

    cancelled : asked before every forward
    on_prefill : told after every chunk of the prefill how many of the prompt's tokens are done, and how many there are
    """

    max_new_tokens: int
    stop_ids: frozenset[int] = frozenset()
    cancelled: Callable[[], bool] = lambda: False
    on_prefill: Progress = silent


def generate(
    engine: Engine,
    prompt_ids: Sequence[int],
    sampler: Sampler,
    limits: Limits,
    *,
    drafter: Drafter | None = None,
    schedule: Schedule | None = None,
) -> Iterator[Round]:
    """Continue `prompt_ids`; the first round is the prefill with the first token.

    The engine must hold a proper prefix of the prompt (`engine.length` tokens), or nothing. Whatever drafts, the
    emitted tokens are those of plain decoding with the same sampler: see `decoding.verify`.

    Args:
        drafter, schedule: both, or neither for plain decoding.
    """
    started = perf_counter()
    tokens = list(prompt_ids)
    outputs = _prefill(engine, tokens, limits)
    if outputs is None:
        yield Round((), rows=0, seconds=perf_counter() - started, finish_reason="cancelled")
        return
    first = sampler.choose(outputs.logits[0], tokens)
    if drafter is not None:
        drafter.begin(tokens)
        drafter.observe([first], outputs.hidden)
    tokens.append(first)
    reason = _finished(tokens, len(prompt_ids), engine, limits)
    yield Round((first,), rows=len(prompt_ids), seconds=perf_counter() - started, finish_reason=reason)
    while reason is None:
        if limits.cancelled():
            yield Round((), rows=0, finish_reason="cancelled")
            return
        started = perf_counter()
        room = min(limits.max_new_tokens - (len(tokens) - len(prompt_ids)), engine.max_rows())
        draft, draft_seconds = _draft(drafter, schedule, room - 1)
        outputs = engine.forward(_rows(tokens[-1], draft), range(len(draft) + 1))
        verdict = accept(draft, outputs.logits, tokens, sampler)
        emitted = _up_to_stop(verdict.emitted, limits.stop_ids)
        path = verdict.path[: len(emitted)]
        engine.commit(path)
        if drafter is not None:
            drafter.observe(emitted, outputs.hidden[list(path)])
        tokens += emitted
        reason = _finished(tokens, len(prompt_ids), engine, limits)
        this = Round(
            token_ids=tuple(emitted),
            drafted=len(draft),
            accepted=min(verdict.accepted, len(emitted)),
            source=draft.source,
            rows=len(draft) + 1,
            seconds=perf_counter() - started,
            draft_seconds=draft_seconds,
            finish_reason=reason,
        )
        if schedule is not None:
            schedule.observe(this)
        yield this


def _prefill(engine: Engine, tokens: Sequence[int], limits: Limits) -> Outputs | None:
    """Run what the cache lacks of `tokens`, in chunks. Only the last token's outputs are wanted: layers that share KV
    run on that row alone. None when cancelled."""
    outputs = None
    while engine.length < len(tokens):
        if limits.cancelled():
            return None
        chunk = tokens[engine.length : engine.length + engine.max_rows()]
        outputs = engine.forward(TokenTree.chain(chunk), [len(chunk) - 1])
        engine.commit(range(len(chunk)))
        limits.on_prefill(engine.length, len(tokens))
    return outputs


def _draft(drafter: Drafter | None, schedule: Schedule | None, limit: int) -> tuple[Draft, float]:
    """The draft, and the seconds it took; not those of planning, which a round without a draft pays as well."""
    if drafter is None or schedule is None or limit <= 0:
        return NO_DRAFT, 0.0
    plan = schedule.plan(drafter, limit)
    if not plan.k:
        return NO_DRAFT, 0.0
    started = perf_counter()
    draft = drafter.draft(plan.k, plan.floor)
    return draft, perf_counter() - started


def _rows(newest: int, draft: Draft) -> TokenTree:
    """The newest token, which has no KV yet, and the draft below it."""
    return TokenTree(
        np.concatenate([np.array([newest], np.int64), draft.tokens]),
        np.concatenate([np.array([-1], np.int64), draft.parents + 1]),
    )


def _up_to_stop(emitted: Sequence[int], stop_ids: frozenset[int]) -> list[int]:
    for index, token in enumerate(emitted):
        if token in stop_ids:
            return list(emitted[: index + 1])
    return list(emitted)


def _finished(tokens: Sequence[int], prompt_tokens: int, engine: Engine, limits: Limits) -> FinishReason | None:
    if tokens[-1] in limits.stop_ids:
        return "stop"
    if len(tokens) - prompt_tokens >= limits.max_new_tokens:
        return "length"
    return "context" if engine.max_rows() <= 0 else None
