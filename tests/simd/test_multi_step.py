"""Forwards that follow each other in one call of the kernels, plain or with drafts, are those of one call each, bit for
bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ondevice
from ondevice.bundle import Bundle
from ondevice.engines.protocol import MAX_ROUNDS, DraftVerdict, Outputs, Rows, TokenTree
from ondevice.engines.simd.engine import SimdEngine, SimdSession
from ondevice.generate import loop
from ondevice.generate.controller import NO_ROOM, Controller, RoundPlan
from ondevice.generate.request import SamplingOptions
from ondevice.generate.sampling.sampler import GUESSES, Sampler
from tests.fixtures.tiny_models import CONTEXT, VOCAB
from tests.simd.conftest import LOOKUP
from tests.simd.forwards import drafted, extend, run

OPTIONS = {
    "greedy": SamplingOptions(temperature=0.0),
    "sampled": SamplingOptions(temperature=1.0, seed=1),
    "filtered": SamplingOptions(temperature=0.8, top_k=20, top_p=0.9, min_p=0.05, seed=2),
    "hot": SamplingOptions(temperature=3.0, seed=4),  # the noise decides, so drafter and target agree
    "biased": SamplingOptions(temperature=0.7, logit_bias={3: 4.0, 5: -50.0}, seed=3),
    "repetition": SamplingOptions(temperature=0.0, repetition_penalty=1.3),
    "penalties": SamplingOptions(
        temperature=0.7, logit_bias={3: 9.0, 5: -50.0}, repetition_penalty=1.2, presence_penalty=0.3,
        frequency_penalty=0.7, seed=3,
    ),
}  # fmt: skip


def continued(session: SimdSession, token: int, most: int, sampler: Sampler, ends: frozenset[int]) -> Outputs:
    continuation = sampler.continuation(most, ends, VOCAB, [*session.tokens, token])
    assert continuation is not None
    return session.engine.forward([Rows(session, TokenTree.chain([token]), [0], continuation=continuation)])[0]


def one_by_one(
    session: SimdSession, token: int, most: int, sampler: Sampler, context: Sequence[int]
) -> list[tuple[int, bytes, bytes]]:
    """The token, the logits and the hidden state of each of `most` forwards."""
    found, tokens = [], [*context, token]
    for _ in range(most):
        outputs = run(session, [tokens[-1]], [0])
        session.commit([0])
        found.append((tokens[-1], outputs.logits.tobytes(), outputs.hidden.tobytes()))
        tokens.append(sampler.choose(outputs.logits[0], tokens))
    return found


@pytest.mark.parametrize(
    ("length", "name"),
    [(1, "greedy"), (60, "sampled"), (130, "filtered"), (130, "biased"), (60, "repetition"), (60, "penalties")],
)
def test_rows_and_caches(pair: tuple[SimdEngine, SimdEngine], length: int, name: str) -> None:
    """With full and sliding caches, which a continuation crosses the end of, on one and on several threads."""
    options = OPTIONS[name]
    rng = np.random.default_rng(length)
    ids = rng.integers(0, VOCAB, length).tolist()
    plain, together = (engine.open_session() for engine in pair)
    extend(plain, ids)
    extend(together, ids)
    sampler, context = Sampler(options, begins=length), list(ids)
    for most in (2, 8, 1, 16):
        token = int(rng.integers(VOCAB))
        expected = one_by_one(plain, token, most, sampler, context)
        found: list[tuple[int, bytes, bytes]] = []
        while len(found) < most:
            outputs = continued(together, token, most - len(found), sampler, frozenset())
            assert len(outputs.chosen) == (0 if together.looks_up else most - 1)
            for row, each in enumerate([token, *outputs.chosen]):
                found.append((each, outputs.logits[row].tobytes(), outputs.hidden[row].tobytes()))
            together.commit(range(1 + len(outputs.chosen)))
            context += [token, *outputs.chosen]
            token = sampler.choose(outputs.logits[-1], context)
        assert found == expected
        assert together.tokens == plain.tokens == context
        assert drafted(together) == drafted(plain)
    tree = rng.integers(0, VOCAB, 5).tolist()  # rows after it
    alone, after = (run(each, tree, range(5)).logits for each in (plain, together))
    np.testing.assert_array_equal(alone, after)


def test_only_accepted_rows_are_kept(engine: SimdEngine) -> None:
    sampler = Sampler(OPTIONS["sampled"])
    session, other = engine.open_session(), engine.open_session()
    for each in (session, other):
        extend(each, [1, 2, 3])
    outputs = continued(session, 4, 6, sampler, frozenset())
    session.commit(range(3))
    extend(other, [4, *outputs.chosen[:2]])
    assert session.tokens == other.tokens
    one, two = (run(each, [9, 8], [0, 1]).logits for each in (session, other))
    np.testing.assert_array_equal(one, two)


def test_it_ends_before_the_end_of_the_reply(engine: SimdEngine) -> None:
    sampler = Sampler(OPTIONS["sampled"])
    session = engine.open_session()
    extend(session, [1, 2, 3])
    chosen = list(continued(session, 4, 8, sampler, frozenset()).chosen)
    last = next(token for token in chosen if chosen.index(token) > 0)
    ended = continued(session, 4, 8, Sampler(OPTIONS["sampled"]), frozenset({last, 7 * VOCAB}))
    assert list(ended.chosen) == chosen[: chosen.index(last)]
    assert sampler.choose(ended.logits[-1], [1, 2, 3, 4], ended.chosen) == last


def test_rows_without_a_choice_end_it(engine: SimdEngine) -> None:
    """Every token is forbidden: the first forward is the last one, and its caller meets the error."""
    sampler = Sampler(SamplingOptions(temperature=0.0), suppressed=range(VOCAB))
    session = engine.open_session()
    assert list(continued(session, 4, 8, sampler, frozenset()).chosen) == []
    with pytest.raises(ondevice.UsageError, match="every token is forbidden"):
        sampler.choose(run(session, [4], [0]).logits[0], [4])


def test_other_rows_are_not_continued(bundle: Bundle, engine: SimdEngine) -> None:
    """Several rows, several sequences, and layers that attend by codes of the keys."""
    continuation = Sampler(OPTIONS["greedy"]).continuation(8, frozenset(), VOCAB, [])
    session, other = engine.open_session(), engine.open_session()
    chain, single = TokenTree.chain([1, 2]), TokenTree.chain([1])
    assert not engine.forward([Rows(session, chain, [0, 1], continuation=continuation)])[0].chosen
    batch = [Rows(each, single, [0], continuation=continuation) for each in (session, other)]
    assert not any(outputs.chosen for outputs in engine.forward(batch))
    looking = SimdEngine(bundle, 1, lookup=LOOKUP)
    row = Rows(looking.open_session(), single, [0], continuation=continuation)
    assert not looking.forward([row])[0].chosen
    looking.close()


def test_more_forwards_than_there_is_room_for(engine: SimdEngine) -> None:
    session = engine.open_session()
    extend(session, [1] * (CONTEXT - 3))
    sampler = Sampler(OPTIONS["greedy"])
    with pytest.raises(ValueError, match="4 forwards do not fit: at most 3"):
        continued(session, 4, 4, sampler, frozenset())
    assert len(continued(session, 4, 3, sampler, frozenset()).chosen) == 2


# With drafts.


def drafted_rounds(
    session: SimdSession, tokens: Sequence[int], hidden: np.ndarray, rounds: int, widths: Sequence[int],
    sampler: Sampler, ends: frozenset[int] = frozenset(),
) -> Outputs:  # fmt: skip
    """Run rounds with drafts; the last of `tokens` is the newest one."""
    step = session.drafts
    assert step is not None
    continuation = sampler.continuation(rounds, ends, VOCAB, tokens)
    drafting = sampler.drafting(step, widths, hidden)
    assert continuation is not None
    assert drafting is not None
    given = replace(continuation, drafting=drafting)
    rows = Rows(session, TokenTree.chain([tokens[-1]]), [0], continuation=given)
    return session.engine.forward([rows])[0]


def round_by_round(
    session: SimdSession, context: list[int], hidden: np.ndarray, rounds: int, widths: Sequence[int], sampler: Sampler
) -> list[DraftVerdict]:
    """The same by one call for each step and forward: appends to `context`, and returns the verdicts."""
    verdicts = []
    for _ in range(rounds):
        guesses, chain, state = list[list[int]](), list[int](), hidden
        for _ in widths:
            step = session.draft_step([context[-1], *chain][-1], state)
            found = sampler.guess(step.logits, step.candidates, context, chain, GUESSES)
            guesses.append([guess.token for guess in found])
            chain.append(guesses[-1][0])
            state = step.hidden.copy()
        tokens, parents, rows = [context[-1], *chain], list(range(-1, len(chain))), dict[tuple[int, int], int]()
        for depth, (width, found_here) in enumerate(zip(widths, guesses, strict=True)):
            for rank in range(1, width):
                rows[depth, rank] = len(tokens)
                tokens.append(found_here[rank] if rank < len(found_here) else found_here[0])
                parents.append(depth)
        outputs = run(session, TokenTree(np.array(tokens), np.array(parents)), range(len(tokens)))
        path, own, rank = [0], [sampler.choose(outputs.logits[0], context)], 0
        while rank == 0 and len(path) <= len(widths):
            depth = len(path) - 1
            rank = guesses[depth].index(own[-1]) if own[-1] in guesses[depth] else -1
            if rank < 0 or rank >= widths[depth]:
                break
            path.append(rows[depth, rank] if rank else depth + 1)
            own.append(sampler.choose(outputs.logits[path[-1]], context, own))
        accepted, hits = len(path) - 1, sum(row <= len(widths) for row in path) - 1
        verdicts.append(DraftVerdict(len(tokens) - 1, len(widths), accepted, hits, max(rank, 0)))
        hidden = outputs.hidden[path[-1]].copy()
        session.commit(path)
        context += own
    return verdicts


WIDTHS = ((1, (1,)), (4, (2, 1)), (3, (1,) * 8), (4, (3,)), (3, (1, 3, 1, 2)), (2, (2, 2)), (MAX_ROUNDS, (1,)))
"""Rounds of a call, and their form."""


@pytest.mark.parametrize(
    ("length", "name"), [(2, "greedy"), (60, "sampled"), (130, "filtered"), (10, "hot"), (40, "biased")]
)
def test_drafts(pair: tuple[SimdEngine, SimdEngine], length: int, name: str) -> None:
    options = OPTIONS[name]
    rng = np.random.default_rng(length)
    context = rng.integers(0, VOCAB, length).tolist()
    alone, together = (engine.open_session() for engine in pair)
    extend(alone, context[:-1])
    hidden = rng.normal(size=alone.engine.target.hidden_size).astype(np.float32)
    extend(together, context[:-1])
    if together.drafts is None:  # layers that attend by codes of the keys
        assert together.looks_up
        return
    sampler, drafter = Sampler(options, suppressed=[7, 9] if name == "biased" else []), together.engine.drafter
    assert drafter is not None
    if name == "biased" and drafter.shortlist is not None:  # each step chooses the tokens that it scores
        assert sampler.drafting(together.drafts, (1,), hidden) is None
        return
    beside = 0
    for rounds, widths in WIDTHS * (2 if name == "hot" else 1):
        own = list(context)
        verdicts = round_by_round(alone, own, hidden, rounds, widths, sampler)
        outputs = drafted_rounds(together, context, hidden, rounds, widths, sampler)
        assert outputs.verdicts == verdicts
        beside += sum(verdict.accepted > verdict.hits for verdict in verdicts)
        assert [*outputs.chosen, sampler.choose(outputs.logits[-1], context, outputs.chosen)] == own[len(context) :]
        assert (outputs.forwards, outputs.other_rows, len(outputs.logits)) == (rounds, 0, 1)
        together.commit(range(1 + len(outputs.chosen)))
        hidden, context = outputs.hidden[-1].copy(), own
        assert together.tokens == alone.tokens == context[:-1]
        assert drafted(together) == drafted(alone)
    # keys and values were moved; few tokens of a shortlist are the target's
    assert beside or name != "hot" or drafter.shortlist is not None
    tree = rng.integers(0, VOCAB, 5).tolist()
    one, two = (run(each, tree, range(5)).logits for each in (alone, together))
    np.testing.assert_array_equal(one, two)


def test_a_drafter_that_has_not_all_rotary_embeddings(bundles: dict[str, Bundle]) -> None:
    """Its row of cosines is shorter than the target's. The first layer gets a copy of its rotary embedding."""
    bundle = bundles["e2b"]
    target = bundle.manifest.target
    (first, *blocks), own = target.layers[0].blocks, target.attention[0]
    assert own.rotary is not None
    attention = replace(first, body=replace(own, rotary=len(target.rotary)))
    layers = (replace(target.layers[0], blocks=(attention, *blocks)), *target.layers[1:])
    target = replace(target, layers=layers, rotary=(*target.rotary, target.rotary[own.rotary]))
    engine = SimdEngine(replace(bundle, manifest=replace(bundle.manifest, target=target)), 1)
    alone, together = engine.open_session(), engine.open_session()
    for session in (alone, together):
        extend(session, [1, 2, 3])
    sampler, hidden, context = Sampler(OPTIONS["hot"]), np.zeros(target.hidden_size, np.float32), [1, 2, 3, 4]
    outputs = drafted_rounds(together, context, hidden, MAX_ROUNDS, (1, 1), sampler)
    assert outputs.verdicts == round_by_round(alone, context, hidden, MAX_ROUNDS, (1, 1), sampler)
    assert together.drafts is not None
    assert alone.drafts is not None
    np.testing.assert_array_equal(together.drafts.logits, alone.drafts.logits)  # of the last step
    engine.close()


def test_a_draft_ends_with_the_reply(engine: SimdEngine) -> None:
    """The first token that is chosen ends the reply: no row of the chain is accepted, and no round follows."""
    sampler = Sampler(SamplingOptions(temperature=0.0))
    session = engine.open_session()
    extend(session, [1, 2, 3])
    hidden = np.zeros(engine.target.hidden_size, np.float32)
    plain = drafted_rounds(session, [1, 2, 3, 4], hidden, 4, (1, 1, 1), sampler)
    chosen = [*plain.chosen, sampler.choose(plain.logits[-1], [1, 2, 3, 4], plain.chosen)]
    ended = Sampler(SamplingOptions(temperature=0.0))
    outputs = drafted_rounds(session, [1, 2, 3, 4], hidden, 4, (2, 1), ended, frozenset({chosen[0]}))
    assert (list(outputs.chosen), outputs.verdicts) == ([], [DraftVerdict(3, 2, 0, 0, 0)])
    assert sampler.choose(outputs.logits[-1], [1, 2, 3, 4]) == chosen[0]


def test_a_draft_ends_where_the_drafter_computes_nan(pair: tuple[SimdEngine, SimdEngine]) -> None:
    """The first round has no draft, the next ones have; the tokens are those of plain forwards."""
    alone, together = (engine.open_session() for engine in pair)
    if together.drafts is None:
        assert together.looks_up
        return
    sampler, context = Sampler(OPTIONS["sampled"]), [1, 2, 3, 4]
    for session in (alone, together):
        extend(session, context[:-1])
    hidden = np.full(together.engine.target.hidden_size, np.nan, np.float32)
    outputs = drafted_rounds(together, context, hidden, 4, (2, 1), sampler)
    assert outputs.verdicts[0] == DraftVerdict(0, 0, 0, 0, 0)
    assert [verdict.drafted for verdict in outputs.verdicts[1:]] == [3, 3, 3]
    expected = one_by_one(alone, context[-1], 1 + len(outputs.chosen), sampler, context[:-1])
    assert [context[-1], *outputs.chosen] == [token for token, _, _ in expected]


def test_drafts_that_do_not_fit(bundle: Bundle, engine: SimdEngine) -> None:
    sampler, hidden = Sampler(OPTIONS["greedy"]), np.zeros(engine.target.hidden_size, np.float32)
    session = engine.open_session()
    extend(session, [1] * (CONTEXT - 8))
    with pytest.raises(ValueError, match="3 forwards of 3 rows do not fit: at most 8 rows now"):
        drafted_rounds(session, [1], hidden, 3, (2,), sampler)
    for rounds, widths in ((MAX_ROUNDS + 1, (1,)), (1, (1,) * 9), (1, ())):
        with pytest.raises(ValueError, match="do not fit"):
            drafted_rounds(engine.open_session(), [1], hidden, rounds, widths, sampler)
    for guesses in ([GUESSES + 1], [2, 0]):
        with pytest.raises(ValueError, match="guesses of a step: between 1 and 3"):
            drafted_rounds(engine.open_session(), [1], hidden, 1, guesses, sampler)
    with pytest.raises(ValueError, match="a hidden state of"):
        drafted_rounds(session, [1], hidden[:-1], 1, (1,), sampler)
    looking = SimdEngine(bundle, 1, lookup=LOOKUP)
    step, continuation = engine.open_session().drafts, sampler.continuation(1, frozenset(), VOCAB, [1])
    assert step is not None
    assert continuation is not None
    given = replace(continuation, drafting=sampler.drafting(step, (1,), hidden))
    with pytest.raises(ondevice.UsageError, match="cannot draft for this sequence"):
        looking.forward([Rows(looking.open_session(), TokenTree.chain([1]), [0], continuation=given)])
    looking.close()


@pytest.mark.parametrize(
    "penalties", [{}, {"repetition_penalty": 1.1, "presence_penalty": 0.2, "frequency_penalty": 0.1}]
)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_replies_with_drafts(
    bundle: Bundle, temperature: float, penalties: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every round is planned with a draft, whatever it costs."""

    def plan(self: Controller, drafters: Sequence[Any], limit: int, other_rows: int = 0) -> RoundPlan:
        return RoundPlan(drafters[0], min(limit, 3), rounds=[MAX_ROUNDS, 3, 2]) if limit > 0 else NO_ROOM

    monkeypatch.setattr(Controller, "asked", lambda self, drafters: list(drafters))
    monkeypatch.setattr(Controller, "plan", plan)
    monkeypatch.setattr(loop, "AT_ONCE_S", 1e9)
    with ondevice.load(bundle.path, threads=2) as model:
        given: dict[str, Any] = {"temperature": temperature, "seed": 5, "max_new_tokens": 90, **penalties}
        plain = model.generate([1, 2, 3], drafter="none", **given)
        calls: list[Any] = []
        forward = model.engine.forward

        def counted(batch: Sequence[Rows]) -> list[Outputs]:
            calls.append(batch)
            return forward(batch)

        monkeypatch.setattr(model.engine, "forward", counted)
        reply = model.generate([1, 2, 3], drafter="mtp", **given)
    assert reply.token_ids == plain.token_ids
    assert any(rows.continuation is not None and rows.continuation.drafting for (rows,) in calls)
    assert len(calls) < 0.6 * reply.stats.target_forwards
    assert reply.stats.target_forwards == reply.stats.num_drafts + reply.stats.rounds_without_draft
    assert reply.stats.num_accepted_tokens + reply.stats.target_forwards == len(reply.token_ids) - 1


@pytest.mark.parametrize(
    "sampler",
    [
        Sampler(SamplingOptions(), [lambda logits, _: logits]),
        Sampler(SamplingOptions(), suppressed=[VOCAB]),
    ],
    ids=["processor", "beyond the vocabulary"],
)
def test_choices_that_take_python(sampler: Sampler) -> None:
    assert sampler.continuation(8, frozenset(), VOCAB, []) is None


def test_the_rows_of_other_sequences_do_not_include_those_that_followed(engine: SimdEngine) -> None:
    session = engine.open_session()
    outputs = continued(session, 4, 5, Sampler(OPTIONS["greedy"]), frozenset())
    assert (outputs.forwards, len(outputs.logits), outputs.wanted, outputs.other_rows) == (5, 5, 1, 0)
    batch = [Rows(each, TokenTree.chain([1, 2]), [0, 1]) for each in (session, engine.open_session())]
    assert [outputs.other_rows for outputs in engine.forward(batch)] == [2, 2]


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("drafter", ["none", "auto"])
def test_replies(bundle: Bundle, options: SamplingOptions, drafter: str, monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, Any] = {
        "temperature": options.temperature, "top_k": options.top_k, "top_p": options.top_p, "min_p": options.min_p,
        "logit_bias": options.logit_bias, "seed": options.seed, "drafter": drafter, "max_new_tokens": 90,
        "logprobs": True, "top_logprobs": 2,
    }  # fmt: skip
    replies = []
    with ondevice.load(bundle.path, threads=2) as model:
        for most in (8, 1):
            monkeypatch.setattr(loop, "MOST_AT_ONCE", most)
            replies.append(model.generate([1, 2, 3, 4, 5], **given))
    together, alone = replies
    assert together.token_ids == alone.token_ids
    assert together.logprobs == alone.logprobs
    if drafter == "none":
        assert together.stats.target_forwards == alone.stats.target_forwards == len(alone.token_ids) - 1


def test_tokens_without_a_draft_are_no_accepted_ones(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "AT_ONCE_S", 1e6)  # several forwards in a call, on however busy a machine
    with ondevice.load(tiny, threads=1) as model:
        steps = list(model.stream([1, 2, 3], drafter="none", max_new_tokens=20, temperature=0.0, ignore_eos=True))
    assert max(len(step.token_ids) for step in steps) > 1
    assert {step.accepted for step in steps} == {0}
    assert {piece.origin for step in steps for piece in step.pieces} == {"plain"}
