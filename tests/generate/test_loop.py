"""The loop over a toy engine: whatever drafts, the tokens are those of plain decoding, and it ends where it should."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from ondevice.arrays import Float32Array
from ondevice.engines.protocol import ROOT, Outputs, Rows, Session, TokenTree
from ondevice.errors import UsageError
from ondevice.generate.controller import Controller, FixedLength, HeuristicLength, RoundPlan
from ondevice.generate.costs import Costs
from ondevice.generate.drafters.protocol import Draft, Drafter, DraftRequest, Forecast
from ondevice.generate.loop import _prefill, generate, run
from ondevice.generate.request import Limits, SamplingOptions, SoftTokens
from ondevice.generate.sampling.sampler import Logprobs, Sampler
from ondevice.generate.stats import Round
from tests.fixtures.toy_engine import VOCAB, Clock, ToyEngine, ToySession, logits_after

PROMPT = [3, 1, 4, 1, 5]
GREEDY = SamplingOptions(temperature=0.0)


class Guesser:
    """Drafts chains or trees that follow the greedy target with a given chance per token."""

    name = "guesser"

    def __init__(self, luck: float, tree: bool = False) -> None:
        self._luck, self._tree = luck, tree
        self._rng = np.random.default_rng(5)
        self.tokens: list[int] = []

    def begin(self, prompt_ids: Sequence[int], session: Session) -> None:
        assert list(session.tokens) == list(prompt_ids)
        self.tokens = list(prompt_ids)
        self.requests: list[DraftRequest] = []
        self.lengths: list[int] = []

    def forget(self) -> None:
        """Nothing is remembered."""

    def forecast(self, nodes: int) -> Forecast:
        return Forecast(np.full(nodes, self._luck, np.float32), self.name)

    def draft(self, request: DraftRequest) -> Draft:
        self.requests.append(request)
        self.lengths.append(len(request.context))
        paths: list[list[int]] = []
        tokens: list[int] = []
        parents: list[int] = []
        for node in range(request.nodes):
            parent = int(self._rng.integers(ROOT, node)) if self._tree and node else node - 1
            path = [] if parent == ROOT else paths[parent]
            right = int(logits_after(self.tokens + path).argmax())
            token = right if self._rng.random() < self._luck else int(self._rng.integers(VOCAB))
            paths.append([*path, token])
            tokens.append(token)
            parents.append(parent)
        return Draft(np.array(tokens, np.int64), np.array(parents, np.int64), source=self.name)

    def observe(self, emitted: Sequence[int], outputs: Outputs, path: Sequence[int]) -> None:
        """The toy engine's hidden state of a row is its logits."""
        slept_through = len(emitted) - len(path)
        self.tokens += emitted[:slept_through]
        for token, row in zip(emitted[slept_through:], path, strict=True):
            np.testing.assert_array_equal(outputs.hidden[row], logits_after(self.tokens))
            self.tokens.append(token)


def generated(
    options: SamplingOptions, limits: Limits, drafter: Guesser | None = None, k: int = 4, **engine: Any
) -> tuple[list[int], list[Round]]:
    controller = None if drafter is None else FixedLength(Costs(), k)
    drafters = [] if drafter is None else [drafter]
    session = ToyEngine(**engine).open_session()
    loop = generate(session, PROMPT, Sampler(options), limits, drafters=drafters, controller=controller)
    rounds = list(run(loop, alone(session.engine)))
    return [token for this in rounds for token in this.token_ids], rounds


def alone(engine: ToyEngine) -> Callable[[Rows], Outputs]:
    return lambda rows: engine.forward([rows])[0]


@pytest.mark.parametrize("tree", [False, True], ids=["chain", "tree"])
@pytest.mark.parametrize("luck", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("k", [1, 3, 7])
@pytest.mark.parametrize("options", [GREEDY, SamplingOptions(0.8, top_k=5, seed=7)], ids=["greedy", "seeded"])
def test_drafts_change_nothing(options: SamplingOptions, k: int, luck: float, tree: bool) -> None:
    plain, _ = generated(options, Limits(60))
    drafted, rounds = generated(options, Limits(60), Guesser(luck, tree), k)
    assert drafted == plain
    assert len(drafted) == 60
    if luck == 1.0 and options is GREEDY and not tree:
        assert {this.accepted for this in rounds[1:-1]} == {k}


def test_the_controller_learns_from_every_round() -> None:
    """Drafts that are accepted to their ends grow, up to the room that is left."""
    engine = ToyEngine()
    controller = HeuristicLength(Costs(), 4)
    drafters = [Guesser(1.0)]
    loop = generate(
        engine.open_session(), PROMPT, Sampler(GREEDY), Limits(30), drafters=drafters, controller=controller
    )
    assert [this.drafted for this in run(loop, alone(engine))] == [0, 4, 6, 8, 7]


@pytest.mark.parametrize("cached", [0, 1, 4])
def test_the_rows_of_a_prefill_are_those_that_it_runs(cached: int) -> None:
    session = ToyEngine().open_session()
    if cached:
        session.engine.forward([Rows(session, TokenTree.chain(PROMPT[:cached]), [0])])
        session.commit(range(cached))
    (first,) = run(generate(session, PROMPT, Sampler(GREEDY), Limits(1)), alone(session.engine))
    assert (first.rows, len(first.token_ids)) == (len(PROMPT) - cached, 1)


def test_the_rows_of_a_scored_prompt_are_no_other_sequences() -> None:
    class Noting(FixedLength):
        def plan(self, drafters: Sequence[Drafter], limit: int, other_rows: int = 0) -> RoundPlan:
            noted.append(other_rows)
            return super().plan(drafters, limit, other_rows)

    noted: list[int] = []
    engine = ToyEngine()
    loop = generate(
        engine.open_session(),
        PROMPT,
        Sampler(GREEDY),
        Limits(12),
        drafters=[Guesser(1.0)],
        controller=Noting(Costs(), 2),
        prompt_logprobs=Logprobs(),
    )
    assert len(list(run(loop, alone(engine)))) > 2
    assert set(noted) == {0}


@pytest.mark.parametrize("most", [1, 2, 5, 6, 7])
def test_max_new_tokens_is_exact(most: int) -> None:
    tokens, rounds = generated(GREEDY, Limits(most), Guesser(1.0))
    assert len(tokens) == most
    assert rounds[-1].finish_reason == "length"


@pytest.mark.parametrize("stop_at", range(1, 12))
def test_a_stop_token_inside_a_draft_ends_the_output_there(stop_at: int) -> None:
    plain, _ = generated(GREEDY, Limits(12))
    stop = frozenset({plain[stop_at]})
    tokens, rounds = generated(GREEDY, Limits(12, stop), Guesser(1.0))
    assert tokens == plain[: plain.index(plain[stop_at]) + 1]
    assert rounds[-1].finish_reason == "stop"
    assert all(this.accepted <= len(this.token_ids) for this in rounds)


@pytest.mark.parametrize("after", range(1, 8))
def test_the_tokens_before_a_processor_s_exception_do_not_depend_on_drafts(after: int) -> None:
    def fail(logits: Float32Array, context: Sequence[int]) -> Float32Array:
        if len(context) >= len(PROMPT) + after:
            raise ZeroDivisionError("a processor's own fault")
        return logits

    plain, _ = generated(GREEDY, Limits(after))
    controller, seen = FixedLength(Costs(), 4), list[Round]()
    session = ToyEngine().open_session()
    sampler, drafters = Sampler(GREEDY, [fail]), [Guesser(1.0)]
    rounds = run(
        generate(session, PROMPT, sampler, Limits(12), drafters=drafters, controller=controller), alone(session.engine)
    )
    with pytest.raises(ZeroDivisionError, match="own fault"):
        seen.extend(rounds)
    assert [token for this in seen for token in this.token_ids] == plain
    assert not any(this.corrected for this in seen)  # every draft is right


def test_a_processor_that_fails_behind_the_stop_token_does_not_fail() -> None:
    """As one that follows a grammar, which has no state there. Plain decoding never asks for it."""
    plain, _ = generated(GREEDY, Limits(12))
    stop = plain[2]

    def fail(logits: Float32Array, context: Sequence[int]) -> Float32Array:
        if stop in context[len(PROMPT) :]:
            raise ZeroDivisionError("a processor's own fault")
        return logits

    controller, session = FixedLength(Costs(), 6), ToyEngine().open_session()
    loop = generate(
        session,
        PROMPT,
        Sampler(GREEDY, [fail]),
        Limits(12, frozenset({stop})),
        drafters=[Guesser(1.0)],
        controller=controller,
    )
    rounds = list(run(loop, alone(session.engine)))
    assert [token for this in rounds for token in this.token_ids] == plain[: plain.index(stop) + 1]
    assert set(rounds[-1].origins) == {"accepted"}


@pytest.mark.parametrize("luck", [0.0, 1.0])
def test_a_full_context_ends_the_output(luck: float) -> None:
    tokens, rounds = generated(GREEDY, Limits(1000), Guesser(luck), context_length=20)
    assert len(tokens) == 20 - len(PROMPT) + 1  # the last token needs no place of its own
    assert rounds[-1].finish_reason == "context"


def test_a_prefill_in_chunks_changes_nothing() -> None:
    assert generated(GREEDY, Limits(20), chunk=2)[0] == generated(GREEDY, Limits(20))[0]


class Counter:
    """The part of a session that a prefill needs: it counts rows."""

    def __init__(self, length: int, most: int) -> None:
        self.length, self.pending, self._most = length, 0, most

    def max_rows(self, block: int = 1) -> int:
        return self._most

    def commit(self, path: Sequence[int]) -> None:
        self.length += len(path)

    def rewind(self, length: int) -> int:
        self.length = length
        return length


@pytest.mark.parametrize(
    ("length", "chunks"),
    [
        (0, [(50, []), (64, [(0, 30)]), (64, []), (2, [])]),
        (20, [(64, [(30, 60)]), (64, []), (32, [])]),
        (50, [(64, [(0, 30)]), (64, []), (2, [])]),
        (60, [(64, [(0, 30)]), (64, []), (2, [])]),  # a sequence that was cut within the block
        (100, [(64, []), (16, [])]),
    ],
)
def test_a_block_is_never_cut(length: int, chunks: list[tuple[int, list[tuple[int, int]]]]) -> None:
    tokens = [1] * 50 + [-9] * 30 + [2] * 100
    soft = SoftTokens(50, 30, lambda cancelled: np.zeros((30, VOCAB), np.float32), is_block=True)
    session, found = Counter(length, 64), []
    prefill = _prefill(session, tokens, Limits(1), [soft])  # type: ignore[arg-type]
    outputs = Outputs(np.zeros((1, VOCAB), np.float32), np.zeros((1, VOCAB), np.float32))
    rows = next(prefill)
    while rows is not None:
        session.pending = len(rows.tree)
        found.append((len(rows.tree), list(rows.blocks)))
        try:
            rows = prefill.send(outputs)
        except StopIteration:
            break
    assert found == chunks


@pytest.mark.parametrize("after", [0, 1, 3])
def test_cancelling_stops_within_one_forward(after: int) -> None:
    engine = ToyEngine(chunk=2)
    limits = Limits(50, cancelled=lambda: engine.forwards >= after)
    rounds = list(run(generate(engine.open_session(), PROMPT, Sampler(GREEDY), limits), alone(engine)))
    assert engine.forwards == after
    assert rounds[-1].finish_reason == "cancelled"
    assert rounds[-1].token_ids == ()


def test_a_cancellation_between_rounds_takes_no_time() -> None:
    engine = ToyEngine()
    limits = Limits(50, cancelled=lambda: engine.forwards >= 4)
    rounds = list(run(generate(engine.open_session(), PROMPT, Sampler(GREEDY), limits), alone(engine)))
    assert [this.finish_reason for this in rounds] == [None] * 4 + ["cancelled"]
    assert rounds[-1].seconds == 0.0


@pytest.mark.parametrize("cut", [1, 2, 3])
def test_a_driver_may_cut_a_prefill_short(cut: int) -> None:
    engine = ToyEngine()

    def forward(rows: Rows) -> Outputs:
        tokens = rows.tree.tokens.tolist()
        if len(rows.wanted) < len(tokens):
            tokens = tokens[:cut]
            rows = Rows(rows.session, TokenTree.chain(tokens), [len(tokens) - 1])
        return engine.forward([rows])[0]

    told: list[tuple[int, int]] = []
    limits = Limits(20, on_prefill=lambda *progress: told.append(progress))
    rounds = list(run(generate(engine.open_session(), PROMPT, Sampler(GREEDY), limits), forward))
    assert [token for this in rounds for token in this.token_ids] == generated(GREEDY, Limits(20))[0]
    assert told == [(min(done, 5), 5) for done in range(cut, 5 + cut, cut)]


def test_a_loop_runs_nothing_itself() -> None:
    """It says what it wants run, and goes on when it is told the outputs."""
    engine = ToyEngine()
    session = engine.open_session()
    loop = generate(session, PROMPT, Sampler(GREEDY), Limits(3))
    wanted = next(loop)
    assert isinstance(wanted, Rows)
    assert wanted.tree.tokens.tolist() == PROMPT
    assert list(wanted.wanted) == [4]
    assert engine.forwards == 0
    first = loop.send(engine.forward([wanted])[0])
    assert isinstance(first, Round)
    assert first.rows == 5
    assert isinstance(next(loop), Rows)
    assert engine.forwards == 1


def test_a_drafter_is_told_how_the_target_chooses() -> None:
    drafter, options = Guesser(1.0), SamplingOptions(0.8, top_k=5, top_p=0.9, repetition_penalty=1.1, seed=7)
    tokens, rounds = generated(options, Limits(30), drafter, 3)
    positions = [sum(len(this.token_ids) for this in rounds[: index + 1]) for index in range(len(rounds) - 1)]
    lengths = [len(PROMPT) + position for position in positions]
    assert drafter.lengths == lengths[: len(drafter.lengths)]
    assert {request.sampler.options for request in drafter.requests} == {options}
    assert len(tokens) == 30


def test_a_tree_is_counted_by_its_depth() -> None:
    _, rounds = generated(GREEDY, Limits(60), Guesser(0.7, tree=True), 7)
    drafted = [this for this in rounds if this.drafted]
    assert any(this.depth < this.drafted for this in drafted)
    assert all(this.accepted <= this.depth <= this.drafted for this in drafted)


@pytest.mark.parametrize("luck", [0.0, 0.6, 1.0])
def test_a_chain_s_rounds_say_which_tokens_were_drafted(luck: float) -> None:
    _, rounds = generated(GREEDY, Limits(60), Guesser(luck), 4)
    assert rounds[0].origins == ("plain",)
    for this in rounds[1:-1]:
        last = "plain" if this.accepted == this.drafted else "corrected"
        assert this.origins == ("accepted",) * this.accepted + (last,)
    assert {origin for this in rounds for origin in this.origins} >= {"accepted" if luck else "corrected"}


def test_a_tree_s_rounds_say_which_tokens_were_drafted() -> None:
    """The target's token corrects a draft only if that has a token in its place: other branches do not count."""
    drafts: list[Draft] = []

    class Recorder(Guesser):
        def draft(self, request: DraftRequest) -> Draft:
            drafts.append(super().draft(request))
            return drafts[-1]

    _, rounds = generated(GREEDY, Limits(80), Recorder(0.7, tree=True), 7)
    seen = set()
    for draft, this in zip(drafts, [each for each in rounds if each.drafted], strict=True):
        edges = list(zip(draft.parents.tolist(), draft.tokens.tolist(), strict=True))
        node = ROOT
        for token in this.token_ids[: this.accepted]:
            node = edges.index((node, token))
        last = "corrected" if any(parent == node for parent, _ in edges) else "plain"
        if this.finish_reason is None:
            assert this.origins == ("accepted",) * this.accepted + (last,)
            seen.add((last, this.accepted < this.depth))
    assert seen >= {("corrected", True), ("plain", True)}


def test_a_reply_that_ends_inside_a_draft_ends_with_an_accepted_token() -> None:
    plain, _ = generated(GREEDY, Limits(12))
    stop = next(token for token in plain[3:] if token not in plain[:3])
    _, rounds = generated(GREEDY, Limits(40, frozenset({stop})), Guesser(1.0), 20)
    assert [this.origins for this in rounds] == [("plain",), ("accepted",) * plain.index(stop)]


def test_a_tree_is_refused_where_the_engine_is_exact_in_chains_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ToySession, "exact_trees", False)
    with pytest.raises(UsageError, match="proposed a tree, and this engine verifies chains"):
        generated(GREEDY, Limits(60), Guesser(0.7, tree=True), 7)
    drafter = Guesser(0.7)
    generated(GREEDY, Limits(60), drafter, 7)
    assert not any(request.trees for request in drafter.requests)


def test_a_drafter_that_proposes_more_than_it_may_is_named() -> None:
    class Chatterbox(Guesser):
        def draft(self, request: DraftRequest) -> Draft:
            return Draft.chain([1] * (request.nodes + 1))

    with pytest.raises(UsageError, match="the drafter guesser proposed 5 tokens where 4 were asked for"):
        generated(GREEDY, Limits(60), Chatterbox(1.0))


def test_reading_done_once_is_not_part_of_what_a_draft_costs() -> None:
    """A drafter that claims an hour of reading per draft has spent, without it, less than no time."""

    class Reader(Guesser):
        def draft(self, request: DraftRequest) -> Draft:
            return replace(super().draft(request), reading_s=3600.0)

    _, rounds = generated(GREEDY, Limits(20), Reader(0.7))
    drafted = [this for this in rounds if this.drafted]
    assert drafted
    assert all(this.draft_seconds < 0 for this in drafted)


class Resting(FixedLength):
    """Rests in two rounds of three."""

    rounds = 0

    def asked(self, drafters: Sequence[Drafter]) -> list[Drafter]:
        self.rounds += 1
        return super().asked(drafters if self.rounds % 3 == 0 else [])


def test_what_a_drafter_slept_through_is_told_when_it_is_asked_again_and_at_the_end() -> None:
    engine, drafter = ToyEngine(), Guesser(0.9)
    plain, _ = generated(GREEDY, Limits(40))
    loop = generate(
        engine.open_session(), PROMPT, Sampler(GREEDY), Limits(40), drafters=[drafter], controller=Resting(Costs(), 2)
    )  # fmt: skip
    rounds = list(run(loop, alone(engine)))
    tokens = [token for this in rounds for token in this.token_ids]
    assert tokens == plain
    assert drafter.tokens == [*PROMPT, *tokens]
    assert len(drafter.requests) == (len(rounds) - 1) // 3
    assert [this.drafted > 0 for this in rounds[1:7]] == [False, False, True] * 2
    assert [this.idle for this in rounds[1:4]] == ["unprofitable", "unprofitable", None]


class Slow(Guesser):
    """Takes 2 ms to ask, and has nothing to say."""

    def __init__(self, clock: Clock) -> None:
        super().__init__(0.0)
        self.asked, self._clock = 0, clock

    def forecast(self, nodes: int) -> Forecast:
        self.asked += 1
        self._clock.now += 0.002
        return Forecast(np.zeros(0, np.float32), self.name)


@pytest.mark.parametrize(("forward_seconds", "least", "most"), [(0.001, 2, 40), (1.0, 190, 200)])
def test_a_drafter_that_is_dear_to_ask_is_asked_seldom(
    clock: Clock, forward_seconds: float, least: int, most: int
) -> None:
    engine, drafter = ToyEngine(before=clock.taking(forward_seconds)), Slow(clock)
    loop = generate(
        engine.open_session(), PROMPT, Sampler(GREEDY), Limits(200), drafters=[drafter], controller=Controller(Costs())
    )  # fmt: skip
    assert sum(1 for _ in run(loop, alone(engine))) == 200
    assert least <= drafter.asked <= most
