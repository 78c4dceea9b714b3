"""A sampler and the loop under a constraint, a small one of this test's own: no grammar library is needed for that."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from ondevice.generate import loop
from ondevice.generate.controller import FixedLength, RoundPlan
from ondevice.generate.costs import Costs
from ondevice.generate.drafters.grammar import GrammarDrafter
from ondevice.generate.drafters.ngram import NgramDrafter
from ondevice.generate.drafters.protocol import Draft
from ondevice.generate.loop import pruned
from ondevice.generate.request import Limits, SamplingOptions, TokenMask
from ondevice.generate.sampling.masks import keep_allowed
from ondevice.generate.sampling.sampler import Sampler
from ondevice.generate.verify import accept
from tests.fixtures.toy_engine import VOCAB, ToyEngine

PROMPT = [1, 2, 3]
SEED = 1


class Steps:
    """Allows tokens that lie 0 to `width` above the one before, round the vocabulary; after a 7 follows 0, after two
    of those 0 again. It ends with a 9.
    """

    def __init__(self, width: int = 4, position: int = len(PROMPT), newest: int = 3) -> None:
        self.position = position
        self._width = width
        self._taken = [newest]

    @property
    def finished(self) -> bool:
        return self._taken[-1] == 9

    def allows(self, path: Sequence[int]) -> bool:
        seen = list(self._taken)
        for token in path:
            if token not in self._next(seen):
                return False
            seen.append(token)
        return True

    def forced(self, path: Sequence[int]) -> int | None:
        left = self._next([*self._taken, *path]) if self.allows(path) else []
        return left[0] if len(left) == 1 else None

    def mask(self, path: Sequence[int]) -> TokenMask:
        seen = [*self._taken, *path]
        if seen[-1] == 9:
            return np.array([0xFFFFFFFF], np.uint32)
        return np.array([sum(1 << token for token in self._next(seen)) if self.allows(path) else 0], np.uint32)

    def take(self, tokens: Sequence[int]) -> int:
        for count, token in enumerate(tokens, 1):
            assert self.allows([token])
            self._taken.append(token)
            self.position += 1
            if self.finished:
                return count
        return len(tokens)

    def _next(self, seen: Sequence[int]) -> list[int]:
        if seen[-1] == 9:
            return []
        if seen[-1] == 7 or list(seen[-2:]) == [7, 0]:
            return [0]
        return [(seen[-1] + step) % VOCAB for step in range(self._width + 1)]


@pytest.mark.parametrize("size", [1, 31, 32, 33, 200])
def test_a_mask_leaves_what_its_bits_say(size: int) -> None:
    rng = np.random.default_rng(size)
    mask = rng.integers(0, 1 << 32, size // 32, np.uint32)  # perhaps a word too short
    mask[: len(mask) // 2] = [0, 0xFFFFFFFF, 0][: len(mask) // 2]
    scores, out = rng.standard_normal(size, np.float32), np.zeros(size, np.float32)
    keep_allowed(scores, mask, out)
    bits = np.zeros(size, bool)
    known = np.unpackbits(mask.view(np.uint8), bitorder="little").astype(bool)[:size]
    bits[: len(known)] = known
    np.testing.assert_array_equal(out, np.where(bits, scores, -np.inf))


@pytest.mark.parametrize("options", [{"temperature": 0.0}, {"top_k": 3}, {}, {"top_p": 0.5}, {"min_p": 0.2}], ids=str)
def test_choices_are_those_of_a_processor_that_forbids_the_same(options: dict[str, Any]) -> None:
    def forbid(logits: np.ndarray, context: Sequence[int]) -> np.ndarray:
        constraint = Steps()
        bits = constraint.mask(context[len(PROMPT) :])[0]
        logits[[token for token in range(VOCAB) if not bits >> token & 1]] = -np.inf
        return logits

    sampling = SamplingOptions(seed=5, **options)
    limited, wanted = Sampler(sampling, constraint=Steps()), Sampler(sampling, [forbid])
    rng = np.random.default_rng(0)
    for path in ([], [5], [5, 7], [5, 7, 0], [5, 7, 0, 0, 2]):
        for _ in range(20):
            logits = rng.standard_normal(VOCAB, np.float32)
            context = [*PROMPT, *path]
            token = limited.choose(logits, context)
            assert token == wanted.choose(logits, context)
            np.testing.assert_array_equal(limited.distribution(logits, context), wanted.distribution(logits, context))
            guesses = limited.guess(logits, None, PROMPT, path, 3)
            assert guesses[0].token == token
            assert all(Steps().allows([*path, guess.token]) for guess in guesses)
            some = np.array([8, 2, 0, 5])
            of_some = limited.guess(logits[some], some, PROMPT, path, 3)
            assert all(Steps().allows([*path, guess.token]) for guess in of_some)
    assert limited.guess(logits, None, PROMPT, [1]) == []


def test_a_draft_is_cut_at_what_is_not_allowed() -> None:
    assert pruned(Draft.chain([5, 7, 0, 1, 3]), Steps().allows).tokens.tolist() == [5, 7, 0]
    assert len(pruned(Draft.chain([1, 3]), Steps().allows)) == 0
    whole = Draft.chain([5, 7, 0, 0], [0.5] * 4)
    assert pruned(whole, Steps().allows) is whole
    probs = np.eye(VOCAB, dtype=np.float32)[[5, 7, 1]]
    cut = pruned(Draft(np.array([5, 7, 1]), np.array([-1, 0, 1]), probs=probs), Steps().allows)
    np.testing.assert_array_equal(cut.probs, probs[:2])
    #         5    2     7  8     0   0
    parents = [-1, -1, 0, 0, 2, 1]
    tree = Draft(np.array([5, 2, 7, 8, 0, 0]), np.array(parents), np.arange(6, dtype=np.float32), source="tree")
    left = pruned(tree, Steps().allows)
    assert left.tokens.tolist() == [5, 7, 8, 0]
    assert left.parents.tolist() == [-1, 0, 0, 1]
    assert left.confidence.tolist() == [0.0, 2.0, 3.0, 4.0]
    assert left.source == "tree"


def test_what_is_forced_is_drafted() -> None:
    drafter = GrammarDrafter()
    assert len(drafter.forecast(4).survival) == 0
    drafter.constrain(Steps(newest=7))
    assert drafter.forecast(4).survival.tolist() == [1.0, 1.0]
    assert drafter.forecast(1).survival.tolist() == [1.0]
    drafter.forget()
    assert len(drafter.forecast(4).survival) == 0


def generate(
    drafter: Any, temperature: float, most: int = 60, controller: Any = None, seed: int = SEED
) -> tuple[list[int], str | None, int]:
    """A reply under `Steps`: its tokens, why it ended, and its forwards."""
    engine = ToyEngine()
    sampler = Sampler(SamplingOptions(temperature=temperature, seed=seed), constraint=Steps())
    drafters = [] if drafter is None else [drafter]
    controller = controller or (FixedLength(Costs(), 5) if drafters else None)
    this = loop.generate(engine.open_session(), PROMPT, sampler, Limits(most), drafters=drafters, controller=controller)
    rounds = list(loop.run(this, lambda rows: engine.forward([rows])[0]))
    tokens = [token for each in rounds for token in each.token_ids]
    return tokens, rounds[-1].finish_reason, engine.forwards


class Wild:
    """Drafts what is mostly not allowed, and past the end."""

    name = "wild"

    def begin(self, *about: Any) -> None: ...
    def forget(self) -> None: ...
    def observe(self, *about: Any) -> None: ...
    def forecast(self, nodes: int) -> Any:
        raise AssertionError("the rule of constant length asks for none")

    def draft(self, request: Any) -> Draft:
        last = request.context[-1]
        return Draft.chain([(last + step) % VOCAB for step in (1, 3, 5, 4, 9)][: request.nodes])


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("drafter", [GrammarDrafter, NgramDrafter, Wild])
def test_a_reply_is_the_plain_one_whoever_drafts(drafter: Any, temperature: float) -> None:
    plain, reason, forwards = generate(None, temperature)
    assert Steps().allows(plain)
    assert reason == ("stop" if plain[-1] == 9 else "length")
    tokens, drafted_reason, fewer = generate(drafter(), temperature)
    assert (tokens, drafted_reason) == (plain, reason)
    assert fewer <= forwards
    for most in range(1, len(plain)):
        assert generate(drafter(), temperature, most)[:2] == (plain[:most], "length")


def test_the_ratio_rule_draws_as_the_target_does_though_drafts_are_cut() -> None:
    """Two tokens deep, against the exact distribution; q is far from p, and often not allowed."""
    rng = np.random.default_rng(0)
    logits = rng.standard_normal((3, VOCAB)).astype(np.float32)
    q = rng.dirichlet(np.ones(VOCAB), 2).astype(np.float32)
    counts = np.zeros((VOCAB, VOCAB))
    runs = 4_000
    for _ in range(runs):
        sampler = Sampler(SamplingOptions(seed=int(rng.integers(1 << 40))), constraint=Steps(width=2))
        drawn = [int(rng.choice(VOCAB, p=row / row.sum())) for row in q.astype(np.float64)]
        draft = pruned(Draft(np.array(drawn), np.array([-1, 0]), probs=q), Steps(width=2).allows)
        emitted = accept(draft, logits, PROMPT, sampler).emitted
        first = emitted[0]
        if len(emitted) == 1:  # the second is then another round's
            row = sampler.distribution(logits[1], [*PROMPT, first])
            counts[first] += row
        else:
            counts[first, emitted[1]] += 1
    exact = np.zeros((VOCAB, VOCAB))
    sampler = Sampler(SamplingOptions(seed=0), constraint=Steps(width=2))
    for first, chance in enumerate(sampler.distribution(logits[0], PROMPT)):
        if chance:
            exact[first] = chance * sampler.distribution(logits[1], [*PROMPT, first])
    assert np.abs(counts / runs - exact).max() < 0.025


class Asleep(FixedLength):
    """Rests in every round, and counts those in which it was woken."""

    woken = 0

    def asked(self, drafters: Any) -> list[Any]:
        return []

    def plan(self, drafters: Any, limit: int, other_rows: int = 0) -> RoundPlan:
        self.woken += 1
        return super().plan(drafters, limit, other_rows)


@pytest.mark.parametrize("drafter", [GrammarDrafter, NgramDrafter])
def test_what_is_forced_ends_a_rest_of_who_knows_of_it(drafter: Any) -> None:
    controller = Asleep(Costs(), 5)
    tokens, _, forwards = generate(drafter(), 1.0, controller=controller)
    assert tokens == generate(None, 1.0)[0]
    forced = sum(before == 7 for before in tokens[:-1])
    assert forced
    assert controller.woken == (forced if drafter is GrammarDrafter else 0)
    assert forwards < len(tokens) if drafter is GrammarDrafter else forwards == len(tokens)
