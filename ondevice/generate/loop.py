"""The draft/verify loop of one generation: prefill, then rounds of draft, forward, verify, commit.

`generate` is a generator that does no I/O and runs no forwards. It yields the `Rows` that it wants computed, is sent
their `Outputs`, and yields a `Round` after the prefill and after each decoding round. `run` drives one loop with a
function that runs forwards; `Batch` offers one that shares forwards between several loops.

The file follows the order of a generation: `generate` and the driver, then `Speculation`, which makes the draft of a
round, then the helpers. What is accepted is decided in `verify`, how much to draft in `controller`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import replace
from time import perf_counter

import numpy as np

from ondevice.arrays import Float32Array
from ondevice.engines.protocol import MAX_ROUNDS, DraftVerdict, MultiStep, Outputs, Rows, Session, TokenTree
from ondevice.errors import UsageError
from ondevice.generate.controller import UNPROFITABLE, Controller, RoundPlan
from ondevice.generate.drafters.protocol import (
    ROOT,
    Constrained,
    Draft,
    Drafter,
    DraftRequest,
    EngineDrafter,
    Searcher,
)
from ondevice.generate.request import Constraint, Limits, SoftTokens
from ondevice.generate.sampling.sampler import Logprobs, Sampler
from ondevice.generate.stats import EndReason, ForwardCost, IdleReason, Round, RoundPart, Stopwatch, TokenLogprob
from ondevice.generate.verify import Verdict, accept

Loop = Generator[Rows | Round, Outputs | None, None]
"""Yields either rows to run, and is sent their outputs, or a finished round, and is sent None."""


def generate(
    session: Session,
    prompt_ids: Sequence[int],
    sampler: Sampler,
    limits: Limits,
    *,
    drafters: Sequence[Drafter] = (),
    controller: Controller | None = None,
    logprobs: Logprobs | None = None,
    soft: Sequence[SoftTokens] = (),
    prompt_logprobs: Logprobs | None = None,
) -> Loop:
    """Continue `prompt_ids`. The first round is the prefill together with the first new token.

    The emitted tokens are those of plain decoding with the same sampler, whatever is drafted and whatever other
    sequences take part in the forwards: see `verify`.

    The driver may run only the first rows of a prefill chunk; it then returns the outputs of the last row that it ran.

    Args:
        session: holds a proper prefix of the prompt, or nothing.
        prompt_ids: the prompt, at least one token.
        sampler: chooses the target's tokens; its constraint, if any, also ends the reply.
        limits: when to stop.
        drafters, controller: both, or neither for plain decoding. The controller chooses among the drafters.
        logprobs: looks up every emitted token; None where they are not wanted. The time that this takes is not part of
            any round.
        soft: the prompt's soft tokens, ascending. They are encoded as part of the prefill.
        prompt_logprobs: looks up the prompt's tokens after the first one; the session is empty then. None where they
            are not wanted.
    """
    # Prefill and first token.
    clock = Stopwatch()
    clock.start("forward")
    tokens = list(prompt_ids)  # prompt and reply so far; the last one has no KV yet once the prefill is done
    scores, cached = list[TokenLogprob](), session.length
    if prompt_logprobs is None:
        outputs = yield from _prefill(session, tokens, limits, soft)
    else:
        outputs = yield from _scoring_prefill(session, tokens, limits, prompt_logprobs, scores)
    if outputs is None:
        yield Round((), rows=0, seconds=sum(clock.lap().values()), finish_reason="cancelled")
        return
    session.snapshot()
    prefill = Round((), rows=len(prompt_ids) - cached, prompt_logprobs=tuple(scores))
    if not limits.max_new_tokens:
        yield replace(prefill, seconds=sum(clock.lap().values()), finish_reason="length")
        return
    first = sampler.choose(outputs.logits[0], tokens)
    path: Sequence[int] = [0]
    speculation = Speculation(drafters, controller, session, sampler, clock, stop_ids=limits.stop_ids)
    speculation.begin(tokens, first, outputs)
    tokens += _up_to_end([first], limits.stop_ids, sampler.constraint)
    reason = _finish_reason(tokens, len(prompt_ids), session, limits, sampler.constraint)
    seconds, looked_up = sum(clock.lap().values()), _look_up(logprobs, [first], outputs, path)
    yield replace(prefill, token_ids=(first,), seconds=seconds, logprobs=looked_up, finish_reason=reason)

    # Decoding rounds.
    while reason is None:
        if limits.cancelled():
            yield Round((), rows=0, finish_reason="cancelled")
            return
        clock.start("forward")
        room = min(limits.max_new_tokens - (len(tokens) - len(prompt_ids)), session.max_rows())
        draft = speculation.propose(tokens, room, outputs, path, every_row=logprobs is not None)

        requested = perf_counter()
        tree, wanted = _tree(tokens[-1], draft), range(len(draft) + 1)
        outputs = yield Rows(session, tree, wanted, continuation=speculation.continuation)
        assert outputs is not None
        clock.attribute(perf_counter() - requested - outputs.seconds * outputs.forwards, "waiting")

        verdict = accept(draft, outputs.logits, tokens, sampler, outputs.chosen)
        emitted = _up_to_end(verdict.emitted, limits.stop_ids, sampler.constraint)
        path = verdict.path[: len(emitted)]
        session.commit(path)
        tokens += emitted
        reason = _finish_reason(tokens, len(prompt_ids), session, limits, sampler.constraint)
        speculation.take(emitted, outputs.verdicts)
        if outputs.verdicts:  # the outputs are those of the last row alone
            path = [0]
        if reason is not None:
            speculation.report(drafters, outputs, path)

        rounds = _rounds(draft, verdict, emitted, outputs, clock.lap(), source=speculation.source)
        looked_up = _look_up(logprobs, emitted, outputs, path)
        rounds[-1] = replace(rounds[-1], idle=speculation.idle, logprobs=looked_up, finish_reason=reason)
        speculation.learn(rounds)
        yield from _then_raise(rounds, verdict.error, limits)


def run(loop: Loop, forward: Callable[[Rows], Outputs]) -> Iterator[Round]:
    """Drive a loop: run the forwards that it asks for with `forward`, and yield its rounds."""
    item = next(loop, None)
    while item is not None:
        if isinstance(item, Round):
            yield item
            item = next(loop, None)
        else:
            item = loop.send(forward(item))


def _prefill(
    session: Session, tokens: Sequence[int], limits: Limits, soft: Sequence[SoftTokens]
) -> Generator[Rows, Outputs | None, Outputs | None]:
    """Run and commit the tokens that the session lacks, in chunks. No chunk begins or ends within a block.

    Returns:
        The outputs of the last token; None where the generation was cancelled on the way.
    """
    outputs, embeddings = None, _Embeddings(soft)
    blocks = [(each.begin, each.begin + each.count) for each in soft if each.is_block]
    for begin, end in reversed(blocks):
        if begin < session.length < end:
            session.rewind(begin)
    while session.length < len(tokens):
        start = session.length
        stop = min(start + session.max_rows(), len(tokens))
        for begin, end in blocks:
            if begin < stop < end:
                stop = begin if begin > start else end
        embeddings.encode(start, stop, limits.cancelled)
        if limits.cancelled():
            return None
        own = [(begin - start, end - start) for begin, end in blocks if start <= begin < stop]
        tree = TokenTree.chain(tokens[start:stop])
        outputs = yield Rows(session, tree, [len(tree) - 1], soft=embeddings.rows(start, stop), blocks=own)
        session.commit(range(session.pending))
        limits.on_prefill(session.length, len(tokens))
    assert outputs is not None
    return outputs


class _Embeddings:
    """The embeddings of a prompt's soft tokens, each encoded when first needed, and dropped after the last."""

    def __init__(self, soft: Sequence[SoftTokens]) -> None:
        self._left = list(soft)
        self._encoded: dict[int, Float32Array] = {}
        """By position of the first token."""

    def encode(self, start: int, stop: int, cancelled: Callable[[], bool]) -> None:
        """Encode what positions start..stop - 1 need, until `cancelled` returns True."""
        while self._left and self._left[0].begin + self._left[0].count <= start:
            self._encoded.pop(self._left.pop(0).begin, None)
        for each in self._left:
            if each.begin < stop and each.begin not in self._encoded and not cancelled():
                rows = each.encode(cancelled)
                if rows is not None:
                    self._encoded[each.begin] = rows

    def rows(self, start: int, stop: int) -> Float32Array | None:
        """float32[S, H], the embeddings of the soft tokens at positions start..stop - 1; None if there are none."""
        parts = [rows[max(0, start - begin) : stop - begin] for begin, rows in self._encoded.items() if begin < stop]
        return np.concatenate(parts) if parts else None


SCORED_ROWS = 16
"""Rows of a prefill that looks up the prompt's tokens: all rows have logits, a megabyte each at Gemma's vocabulary."""


def _scoring_prefill(
    session: Session, tokens: Sequence[int], limits: Limits, logprobs: Logprobs, scores: list[TokenLogprob]
) -> Generator[Rows, Outputs | None, Outputs | None]:
    """`_prefill` of an empty session that also looks up every token but the first, in the row of the token before it.

    These are the rows of logits that the token would be chosen from if it were generated.

    Args:
        scores: the log probabilities are appended to it.
    """
    assert not session.length
    outputs = None
    while session.length < len(tokens):
        if limits.cancelled():
            return None
        begin = session.length
        chunk = tokens[begin : begin + min(session.max_rows(), SCORED_ROWS)]
        outputs = yield Rows(session, TokenTree.chain(chunk), range(len(chunk)))
        assert outputs is not None
        following = tokens[begin + 1 : begin + 1 + len(chunk)]
        scores += _look_up(logprobs, following, outputs, range(len(following)))
        session.commit(range(len(chunk)))
        limits.on_prefill(session.length, len(tokens))
    assert outputs is not None
    wanted = outputs.wanted - len(outputs.logits) + 1  # as in a prefill, of the last row alone
    return replace(outputs, logits=outputs.logits[-1:], hidden=outputs.hidden[-1:], wanted=wanted)


# Drafting.

NO_DRAFT = Draft.empty()

MOST_AT_ONCE, AT_ONCE_S = MAX_ROUNDS, 0.05
"""Most plain forwards in one call of the engine, and their time in seconds: what a reader of the reply, a cancellation
or another request waits for at most. With 8 and 0.03, rounds of MTP drafts took 1.05 times as long, and plain ones 1.02
(SmolLM2-135M, AMD Zen 3)."""


def _forwards_at_once(last: Outputs) -> int:
    """Plain forwards that one call of the engine may run, by the time of the last one."""
    return int(min(MOST_AT_ONCE, AT_ONCE_S / last.seconds)) if last.seconds > 0 else 1


class Speculation:
    """The drafting side of one generation. In each round it asks the controller for a plan, a drafter for a draft of
    that length, and reports the target's verdict to both.

    Without drafters every draft is empty, and nothing is reported. Drafters that the controller does not ask
    (`Controller.asked`) cost next to nothing: emitted tokens are kept, and reported when a drafter is asked again.

    Attributes:
        idle: why this round has no draft; None where it has one, or where there is no drafter.
        continuation: how the engine goes on after this round's row; None where it does not.
        source: name of the drafter with which the continuation drafts.
    """

    def __init__(
        self,
        drafters: Sequence[Drafter],
        controller: Controller | None,
        session: Session,
        sampler: Sampler,
        clock: Stopwatch,
        *,
        stop_ids: frozenset[int],
    ) -> None:
        self._drafters, self._controller = drafters, controller
        self._session, self._sampler, self._clock, self._stop_ids = session, sampler, clock, stop_ids
        self._knows_constraint: list[Drafter] = [drafter for drafter in drafters if isinstance(drafter, Constrained)]
        self._engine_drafters = {drafter.name: drafter for drafter in drafters if isinstance(drafter, EngineDrafter)}
        self._searchers = [drafter for drafter in drafters if isinstance(drafter, Searcher)]
        self._emitted: list[int] = []
        """Tokens that at least one drafter has not observed."""
        self._observed = [0] * len(drafters)
        """By drafter, how many of these it has observed."""
        self.idle: IdleReason | None = None
        self.continuation: MultiStep | None = None
        self.source = NO_DRAFT.source

    def begin(self, tokens: Sequence[int], first: int, outputs: Outputs) -> None:
        """Start the drafters on a prompt, whose tokens are committed, and its first new token."""
        if self._controller is not None:
            self._controller.begin()
        for drafter in self._drafters:
            if isinstance(drafter, Constrained):
                drafter.constrain(self._sampler.constraint)
            drafter.begin(tokens, self._session)
            drafter.observe([first], outputs, [0])

    def propose(
        self, tokens: Sequence[int], room: int, outputs: Outputs, path: Sequence[int], *, every_row: bool
    ) -> Draft:
        """The draft of a round; empty where none is expected to pay, or where the engine drafts by itself.

        Args:
            tokens: prompt and reply up to the newest token.
            room: tokens that this round may emit at most, and so rows that its forward may have.
            outputs, path: the previous round's, which reports refer to.
            every_row: whether the logits of every row are needed.
        """
        self.continuation = None
        if self._controller is None:
            self.continuation = self._plain(room, outputs, tokens)
            return NO_DRAFT
        self._clock.start("control")
        draft, plan = NO_DRAFT, UNPROFITABLE
        if asked := self._controller.asked(self._drafters) or self._certain():
            self.report(asked, outputs, path)
            # other sequences are taken to have as many rows as in the last forward
            plan = self._controller.plan(asked, room - 1, outputs.other_rows)
            if plan.drafter is not None:
                self._clock.start("draft")
                request = DraftRequest(
                    plan.nodes, plan.row_floors, plan.step_floors, self._sampler, tokens, self._session.exact_trees
                )
                if not every_row:
                    self.continuation = self._drafting(plan, request, room, outputs, tokens)
                if self.continuation is None:
                    draft = self._draft(plan.drafter, request)
                else:
                    self.source = plan.drafter.name
        drafts = len(draft) or self.continuation is not None
        self.idle = None if drafts else plan.reason if plan.drafter is None else "no_match"
        self._clock.start("forward")
        if not drafts:
            self.continuation = self._plain(min(room, self._controller.plain_forwards()), outputs, tokens)
        return draft

    def _plain(self, most: int, outputs: Outputs, tokens: Sequence[int]) -> MultiStep | None:
        """How the engine goes on with plain forwards, up to `most`; None where it cannot choose their tokens."""
        forwards = min(most, _forwards_at_once(outputs))
        vocab_size = outputs.logits.shape[1]
        return self._sampler.continuation(forwards, self._stop_ids, vocab_size, tokens) if forwards > 1 else None

    def take(self, emitted: Sequence[int], verdicts: Sequence[DraftVerdict]) -> None:
        """Note the tokens of a round, for the reports, and the verdicts on drafts that the engine made."""
        if self._drafters:
            self._emitted += emitted
        if verdicts:
            self._engine_drafters[self.source].verified(verdicts)

    def report(self, drafters: Sequence[Drafter], outputs: Outputs, path: Sequence[int]) -> None:
        """Report the target's verdicts since their last report to these drafters.

        Args:
            drafters: those to report to.
            outputs, path: the last round's outputs, and the rows that its tokens were chosen from.
        """
        before = sum(searcher.searched_s for searcher in self._searchers)
        for number, drafter in enumerate(self._drafters):
            if drafter in drafters and self._observed[number] < len(self._emitted):
                drafter.observe(self._emitted[self._observed[number] :], outputs, path)
                self._observed[number] = len(self._emitted)
        self._clock.attribute(sum(searcher.searched_s for searcher in self._searchers) - before, "search")
        if min(self._observed, default=0) == len(self._emitted):
            self._emitted, self._observed = [], [0] * len(self._drafters)

    def learn(self, rounds: Sequence[Round]) -> None:
        """Let the controller learn from the rounds of a call. The time of that is part of the next one's."""
        if self._controller is not None:
            self._clock.start("control")
            self._controller.observe(*rounds)
            self._clock.stop()

    def _certain(self) -> list[Drafter]:
        """The drafters that know the constraint, where it forces the next token: then a draft is certain to pay."""
        constraint = self._sampler.constraint
        return self._knows_constraint if constraint is not None and constraint.forced(()) is not None else []

    def _drafting(
        self, plan: RoundPlan, request: DraftRequest, room: int, outputs: Outputs, tokens: Sequence[int]
    ) -> MultiStep | None:
        """How the engine drafts and verifies with the planned drafter by itself; None where it cannot.

        Args:
            room: rows that all forwards together may have at most.
            outputs: the last forward's.
        """
        drafter = None if plan.drafter is None else self._engine_drafters.get(plan.drafter.name)
        at_once = _forwards_at_once(outputs)
        if at_once < 2 or outputs.other_rows or drafter is None or (step := self._session.drafts) is None:
            return None
        widths, hidden = drafter.widths(request)
        count = sum(widths)
        # The last calls of a reply have few rounds. With a limit of tokens in the kernels, calls of 128-token replies
        # had 9.2 rounds in place of 7.3, and replies took 1.01 and 1.00 of the time (SmolLM2, one and two drafts).
        rounds = min(plan.rounds[count - 1], at_once, room // (1 + count)) if 0 < count <= len(plan.rounds) else 0
        if not rounds:
            return None
        continuation = self._sampler.continuation(rounds, self._stop_ids, outputs.logits.shape[1], tokens)
        if continuation is None or (drafting := self._sampler.drafting(step, widths, hidden)) is None:
            return None
        return replace(continuation, drafting=drafting)

    def _draft(self, drafter: Drafter, request: DraftRequest) -> Draft:
        """Ask the drafter, check its answer, and drop tokens that the constraint forbids."""
        draft = drafter.draft(request)
        if len(draft) > request.nodes:
            raise UsageError(
                f"the drafter {drafter.name} proposed {len(draft)} tokens where {request.nodes} were asked for"
            )
        if not request.trees and draft.depth < len(draft):
            raise UsageError(
                f"the drafter {drafter.name} proposed a tree, and this engine verifies chains: "
                "use the simd engine, or a drafter that looks at request.trees"
            )
        if len(draft) and int(draft.tokens.min()) < 0:  # read from the prompt: a soft token, which nothing can choose
            draft = pruned(draft, lambda path: path[-1] >= 0)
        if self._sampler.constraint is not None:
            draft = pruned(draft, self._sampler.constraint.allows)
        return draft


def pruned(draft: Draft, allows: Callable[[list[int]], bool]) -> Draft:
    """The draft without the tokens whose path is not allowed, for example by a constraint, and without their
    descendants: the target could not take them, so no row is spent on them.

    `verify.accept_ratio` corrects for it, because a forbidden token was drawn from a distribution that allowed it.
    """
    parents, tokens = draft.parents.tolist(), draft.tokens.tolist()
    paths: dict[int, list[int]] = {ROOT: []}
    for node, (parent, token) in enumerate(zip(parents, tokens, strict=True)):
        if parent in paths and allows(path := [*paths[parent], token]):
            paths[node] = path
    kept = sorted(paths)[1:]  # without ROOT
    if len(kept) == len(tokens):
        return draft
    new_index = {node: index for index, node in enumerate(kept)} | {ROOT: ROOT}
    return Draft(
        draft.tokens[kept],
        np.array([new_index[parents[node]] for node in kept], np.int64),
        draft.confidence[kept] if len(draft.confidence) else draft.confidence,
        None if draft.probs is None else draft.probs[kept],
        draft.source,
        draft.reading_s,
    )


def _tree(newest: int, draft: Draft) -> TokenTree:
    """The rows of a round: the newest token, which has no KV yet, and the draft below it."""
    if draft.depth == len(draft):
        return TokenTree.chain([newest, *draft.tokens.tolist()])
    return TokenTree(
        np.concatenate([np.array([newest], np.int64), draft.tokens]),
        np.concatenate([np.array([ROOT], np.int64), draft.parents + 1]),
    )


# The end of a round.


def _up_to_end(emitted: Sequence[int], stop_ids: frozenset[int], constraint: Constraint | None) -> list[int]:
    """The emitted tokens up to the end of the reply, where that is among them. The constraint takes them in."""
    kept = list(emitted)
    for index, token in enumerate(emitted):
        if token in stop_ids:
            kept = kept[: index + 1]
            break
    return kept if constraint is None else kept[: constraint.take(kept)]


def _then_raise(rounds: Sequence[Round], error: Exception | None, limits: Limits) -> Iterator[Round]:
    """The rounds, and then the error of the next token, where plain decoding would go on to it."""
    yield from rounds
    if error is not None and rounds[-1].finish_reason is None and not limits.cancelled():
        raise error


def _rounds(
    draft: Draft,
    verdict: Verdict,
    emitted: Sequence[int],
    outputs: Outputs,
    seconds: defaultdict[RoundPart, float],
    *,
    source: str,
) -> list[Round]:
    """The reports of a call of the engine: of one round, or of those in which it drafted by itself.

    Args:
        source: name of the drafter, if it did.
    """
    if not outputs.verdicts:
        return [_round(draft, verdict, emitted, outputs, seconds)]
    count, rounds, begin = len(outputs.verdicts), list[Round](), 0
    drafting = outputs.seconds * outputs.draft_share
    own = seconds["forward"] / count - drafting
    for draft_verdict in outputs.verdicts:
        drafted, depth, accepted = draft_verdict.drafted, draft_verdict.depth, draft_verdict.accepted
        part = tuple(emitted[begin : begin + accepted + 1])
        begin += len(part)
        rounds.append(
            Round(
                part,
                drafted=drafted,
                accepted=min(accepted, len(part)),
                corrected=draft_verdict.hits == accepted < min(depth, len(part)),
                depth=depth,
                source=source if drafted else NO_DRAFT.source,
                rows=1 + drafted,
                seconds=sum(seconds.values()) / count,
                draft_seconds=seconds["draft"] / count + drafting,
                control_seconds=seconds["control"] / count,
                target_seconds=outputs.seconds - drafting,
                forward=ForwardCost(1 + drafted, 1 + drafted, own, outputs.experts),
                together=count,
                threads=outputs.threads,
            )
        )
    return rounds


def _round(
    draft: Draft, verdict: Verdict, emitted: Sequence[int], outputs: Outputs, seconds: defaultdict[RoundPart, float]
) -> Round:
    """The report of a decoding round."""
    forwards, last = outputs.forwards, verdict.path[len(emitted) - 1]
    accepted = min(verdict.accepted, len(emitted)) if len(draft) else 0
    return Round(
        token_ids=tuple(emitted),
        drafted=len(draft),
        accepted=accepted,
        corrected=accepted < len(emitted) and draft.has_children(last - 1),
        depth=draft.depth,
        source=draft.source if len(draft) else NO_DRAFT.source,
        rows=len(draft) + 1,
        seconds=sum(seconds.values()),
        draft_seconds=seconds["draft"] - draft.reading_s,
        control_seconds=seconds["control"],
        target_seconds=outputs.seconds * forwards,
        forwards=forwards,
        forward=ForwardCost(outputs.rows, outputs.wanted, seconds["forward"] / forwards, outputs.experts),
        threads=outputs.threads,
    )


def _finish_reason(
    tokens: Sequence[int], prompt_tokens: int, session: Session, limits: Limits, constraint: Constraint | None
) -> EndReason | None:
    if tokens[-1] in limits.stop_ids or (constraint is not None and constraint.finished):
        return "stop"
    if len(tokens) - prompt_tokens >= limits.max_new_tokens:
        return "length"
    return "context" if session.max_rows() <= 0 else None


def _look_up(
    logprobs: Logprobs | None, emitted: Sequence[int], outputs: Outputs, path: Sequence[int]
) -> tuple[TokenLogprob, ...]:
    """The log probability of each emitted token, in the row of logits that it was chosen from."""
    if logprobs is None:
        return ()
    return tuple(logprobs.of(outputs.logits[row], token) for token, row in zip(emitted, path, strict=True))
