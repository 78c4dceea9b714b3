"""The loop: prefill, then draft, forward, accept, commit, yield. It asks for forwards and runs none itself."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from time import perf_counter

import numpy as np

from ondevice.decoding.constraint import Constraint
from ondevice.decoding.limits import Limits
from ondevice.decoding.logprobs import Logprobs
from ondevice.decoding.record import FinishReason, ForwardCost, Round, TokenLogprob
from ondevice.decoding.sampling import Sampler
from ondevice.decoding.schedule import Schedule
from ondevice.decoding.speculation import Speculation
from ondevice.decoding.verify import accept
from ondevice.drafters.protocol import Draft, Drafter
from ondevice.engines.protocol import Outputs, Rows, Session, TokenTree

Loop = Generator[Rows | Round, Outputs | None, None]
"""Yields a forward that it wants run, and takes its outputs, or a finished round."""


def generate(
    session: Session,
    prompt_ids: Sequence[int],
    sampler: Sampler,
    limits: Limits,
    *,
    drafter: Drafter | None = None,
    schedule: Schedule | None = None,
    logprobs: Logprobs | None = None,
) -> Loop:
    """Continue `prompt_ids`; the first round is the prefill with the first token.

    The session must hold a proper prefix of the prompt, or nothing. Whatever drafts, and whatever other sequences take
    part in its forwards, the emitted tokens are those of plain decoding with the same sampler: see `decoding.verify`.

    A driver runs the forwards (`run`, or a `Batch` for several sequences). It may cut a prefill's rows short: of
    those, only the last one is wanted.

    Args:
        drafter, schedule: both, or neither for plain decoding.
        logprobs: looks up every token; None where nobody wants to know. What that takes counts for no round.
    """
    started = perf_counter()
    tokens = list(prompt_ids)
    outputs = None
    while session.length < len(tokens):
        if limits.cancelled():
            yield Round((), rows=0, seconds=perf_counter() - started, finish_reason="cancelled")
            return
        chunk = tokens[session.length : session.length + session.max_rows()]
        outputs = yield Rows(session, TokenTree.chain(chunk), [len(chunk) - 1])
        session.commit(range(session.pending))
        limits.on_prefill(session.length, len(tokens))
    assert outputs is not None
    session.snapshot()
    first = sampler.choose(outputs.logits[0], tokens)
    speculation = Speculation(drafter, schedule, session, sampler)
    speculation.begin(tokens, first, outputs)
    tokens += _ended([first], limits.stop_ids, sampler.constraint)
    path: Sequence[int] = [0]
    reason = _finished(tokens, len(prompt_ids), session, limits, sampler.constraint)
    yield Round(
        (first,),
        rows=len(prompt_ids),
        seconds=perf_counter() - started,
        logprobs=_looked_up(logprobs, [first], outputs, path),
        finish_reason=reason,
    )
    started = perf_counter()
    while reason is None:
        if limits.cancelled():
            yield Round((), rows=0, finish_reason="cancelled")
            return
        room = min(limits.max_new_tokens - (len(tokens) - len(prompt_ids)), session.max_rows())
        draft = speculation.propose(tokens, room, outputs, path)
        asked = perf_counter()
        outputs = yield Rows(session, _tree(tokens[-1], draft), range(len(draft) + 1))
        assert outputs is not None
        waited = perf_counter() - asked - outputs.seconds  # for other sequences
        verdict = accept(draft, outputs.logits, tokens, sampler)
        emitted = _ended(verdict.emitted, limits.stop_ids, sampler.constraint)
        path = verdict.path[: len(emitted)]
        session.commit(path)
        tokens += emitted
        reason = _finished(tokens, len(prompt_ids), session, limits, sampler.constraint)
        speculation.tell(emitted, outputs, path, last=reason is not None)
        seconds = perf_counter() - started
        own = seconds - waited - speculation.draft_seconds - speculation.asking_seconds - speculation.search_seconds
        this = Round(
            token_ids=tuple(emitted),
            drafted=len(draft),
            accepted=min(verdict.accepted, len(emitted)),
            depth=draft.depth,
            source=draft.source,
            rows=len(draft) + 1,
            seconds=seconds,
            draft_seconds=speculation.draft_seconds - draft.reading_s,
            asking_seconds=speculation.asking_seconds,
            idle=speculation.idle,
            forward=ForwardCost(outputs.rows, outputs.wanted, own, outputs.experts),
            threads=outputs.threads,
            logprobs=_looked_up(logprobs, emitted, outputs, path),
            finish_reason=reason,
        )
        speculation.conclude(this)
        yield this
        started = perf_counter() - speculation.concluding_seconds  # which come too late for `this`


def run(loop: Loop, forward: Callable[[Rows], Outputs]) -> Iterator[Round]:
    """The driver: run the forwards that a loop asks for, and yield its rounds."""
    item = next(loop, None)
    while item is not None:
        if isinstance(item, Round):
            yield item
            item = next(loop, None)
        else:
            item = loop.send(forward(item))


def _tree(newest: int, draft: Draft) -> TokenTree:
    """The newest token, which has no KV yet, and the draft below it."""
    if draft.depth == len(draft):
        return TokenTree.chain([newest, *draft.tokens.tolist()])
    return TokenTree(
        np.concatenate([np.array([newest], np.int64), draft.tokens]),
        np.concatenate([np.array([-1], np.int64), draft.parents + 1]),
    )


def _looked_up(
    logprobs: Logprobs | None, emitted: Sequence[int], outputs: Outputs, path: Sequence[int]
) -> tuple[TokenLogprob, ...]:
    """Each token in the row that it was chosen from."""
    if logprobs is None:
        return ()
    return tuple(logprobs.of(outputs.logits[row], token) for token, row in zip(emitted, path, strict=True))


def _ended(emitted: Sequence[int], stop_ids: frozenset[int], constraint: Constraint | None) -> list[int]:
    """The tokens up to the end of the reply, if it is among them; the constraint is told of them."""
    kept = list(emitted)
    for index, token in enumerate(emitted):
        if token in stop_ids:
            kept = kept[: index + 1]
            break
    return kept if constraint is None else kept[: constraint.take(kept)]


def _finished(
    tokens: Sequence[int], prompt_tokens: int, session: Session, limits: Limits, constraint: Constraint | None
) -> FinishReason | None:
    if tokens[-1] in limits.stop_ids or (constraint is not None and constraint.finished):
        return "stop"
    if len(tokens) - prompt_tokens >= limits.max_new_tokens:
        return "length"
    return "context" if session.max_rows() <= 0 else None
