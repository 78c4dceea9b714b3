from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

import numpy as np
import pytest

from ondevice.arrays import Float32Array
from ondevice.errors import BundleCorruptError
from ondevice.generate import verify
from ondevice.generate.drafters.protocol import Draft
from ondevice.generate.request import SamplingOptions
from ondevice.generate.sampling.row_draw import RowDraw
from ondevice.generate.sampling.sampler import Sampler
from ondevice.generate.verify import accept, accept_matching, accept_ratio, draw
from tests.generate.markov import MarkovTarget, plain, random_tree, speculative

VOCAB = 4
TRIALS = 4000
CHI_SQUARE_15_DF = 37.7
"""Exceeded once in a thousand when 16 cells have the chances they should have."""

GREEDY = SamplingOptions(temperature=0)
SAMPLED = SamplingOptions(temperature=0.8, top_k=3, repetition_penalty=1.2, seed=4)


class Drafting(Protocol):
    def __call__(self, tokens: list[int], sampler: Sampler) -> Draft: ...


def one_hot(*tokens: int, vocab_size: int = 6) -> np.ndarray:
    return 10 * np.eye(vocab_size, dtype=np.float32)[list(tokens)]


def test_matching_walks_the_chain_to_the_first_miss() -> None:
    verdict = accept_matching(Draft.chain([1, 2, 3]), one_hot(1, 2, 5, 0), [0], Sampler(GREEDY))
    assert (verdict.path, verdict.emitted, verdict.accepted) == ((0, 1, 2), (1, 2, 5), 2)


def test_matching_adds_a_bonus_token_when_all_are_accepted() -> None:
    verdict = accept_matching(Draft.chain([1, 2]), one_hot(1, 2, 3), [0], Sampler(GREEDY))
    assert (verdict.path, verdict.emitted) == ((0, 1, 2), (1, 2, 3))


def test_an_empty_draft_is_plain_decoding() -> None:
    verdict = accept(Draft.empty(), one_hot(4), [0], Sampler(GREEDY))
    assert (verdict.path, verdict.emitted) == ((0,), (4,))


def test_matching_takes_the_sibling_that_fits_and_skips_other_branches() -> None:
    #      root -> 1 -> 2          rows: 0 newest, 1: token 1, 2: token 3, 3: token 2 (below 1), 4: token 4 (below 3)
    #           -> 3 -> 4 -> 5     5: token 5 (below 4)
    draft = Draft(np.array([1, 3, 2, 4, 5]), np.array([-1, -1, 0, 1, 3]))
    verdict = accept_matching(draft, one_hot(3, 0, 4, 0, 5, 1), [0], Sampler(GREEDY))
    assert (verdict.path, verdict.emitted) == ((0, 2, 4, 5), (3, 4, 5, 1))


def test_the_tokens_before_a_row_of_nan_are_emitted() -> None:
    """As by plain decoding, which then ends with the error."""
    logits, sampler = one_hot(1, 2, 3), Sampler(GREEDY)
    logits[2] = np.nan
    verdict = accept_matching(Draft.chain([1, 2]), logits, [0], sampler)
    assert (verdict.path, verdict.emitted, verdict.accepted) == ((0, 1), (1, 2), 2)
    assert isinstance(verdict.error, BundleCorruptError)
    with pytest.raises(BundleCorruptError):
        accept_matching(Draft.chain([3]), logits[2:].repeat(2, axis=0), [0, 1, 2], sampler)


def test_the_tokens_before_a_row_of_nan_are_emitted_under_the_ratio_rule() -> None:
    logits, sampler = one_hot(1, 2, 3), Sampler(SamplingOptions(seed=1))
    logits[2] = np.nan
    draft = replace(Draft.chain([1, 2]), probs=np.eye(6, dtype=np.float32)[[1, 2]] * np.float32(0.5))
    verdict = accept_ratio(draft, logits, [0], sampler, sampler.rng)
    assert (verdict.path, verdict.emitted, verdict.accepted) == ((0, 1), (1, 2), 2)
    assert isinstance(verdict.error, BundleCorruptError)


def test_the_context_of_a_choice_holds_the_draft_path() -> None:
    seen = []

    def spy(logits: Float32Array, context: Sequence[int]) -> Float32Array:
        seen.append(list(context))
        return logits

    accept_matching(Draft.chain([1, 2]), one_hot(1, 2, 3), [9, 0], Sampler(GREEDY, [spy]))
    assert seen == [[9, 0], [9, 0, 1], [9, 0, 1, 2]]


@pytest.mark.parametrize("options", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("seed", range(5))
def test_any_deterministic_draft_leaves_the_output_as_it_was(options: SamplingOptions, seed: int) -> None:
    target = MarkovTarget(VOCAB, seed)
    random = np.random.default_rng(seed)

    def tree(tokens: list[int]) -> Draft:
        return random_tree(int(random.integers(0, 12)), VOCAB, random)

    expected = plain(target, [0, 1], Sampler(options), 200)
    assert speculative(target, [0, 1], Sampler(options), 200, tree)[:200] == expected


def chi_square(target: MarkovTarget, drafting: Drafting, options: SamplingOptions) -> float:
    """Statistic of the two tokens after token 0 over many short generations, each with a seed of its own."""
    counts = np.zeros((VOCAB, VOCAB))
    for trial in range(TRIALS):
        sampler = Sampler(replace(options, seed=TRIALS * (options.seed or 0) + trial))
        first, second, *_ = speculative(target, [0], sampler, 2, partial(drafting, sampler=sampler))
        counts[first, second] += 1
    expected = TRIALS * target.joint(0, Sampler(options))
    possible = expected > 0
    assert not counts[~possible].any()
    return float(((counts - expected)[possible] ** 2 / expected[possible]).sum())


def stochastic(drafter: MarkovTarget, options: SamplingOptions, rng: np.random.Generator) -> Drafting:
    """Draws two tokens, each from the drafter's warped distribution."""
    warp = Sampler(options)

    def drafting(tokens: list[int], sampler: Sampler) -> Draft:
        path, probs = list(tokens), []
        for _ in range(2):
            probs.append(warp.distribution(drafter.logits[path[-1]], path))
            path.append(draw(probs[-1], rng))
        new = np.array(path[len(tokens) :])
        return Draft(new, np.array([-1, 0]), probs=np.array(probs, np.float32), source="dice")

    return drafting


@pytest.mark.parametrize(
    "options",
    [SamplingOptions(seed=1), SamplingOptions(temperature=0.7, top_k=3, seed=2), SamplingOptions(top_p=0.8, seed=3)],
    ids=["plain", "top_k", "top_p"],
)
@pytest.mark.parametrize("drafter", ["agrees", "disagrees"])
def test_the_ratio_rule_keeps_the_joint_distribution_of_two_tokens(options: SamplingOptions, drafter: str) -> None:
    target = MarkovTarget(VOCAB, seed=0)
    other = target if drafter == "agrees" else MarkovTarget(VOCAB, seed=1, contrast=1.5)
    statistic = chi_square(target, stochastic(other, options, np.random.default_rng(9)), options)
    assert statistic < CHI_SQUARE_15_DF


def likeliest_two(drafter: MarkovTarget, probs: Callable[[np.ndarray], np.ndarray] | None) -> Drafting:
    """Greedy drafts that say they were drawn from `probs` of the logits; None: that they are deterministic."""

    def drafting(tokens: list[int], sampler: Sampler) -> Draft:
        first = int(drafter.logits[tokens[-1]].argmax())
        new = np.array([first, int(drafter.logits[first].argmax())])
        claimed = None if probs is None else probs(drafter.logits[[tokens[-1], first]])
        return Draft(new, np.array([-1, 0]), probs=claimed)

    return drafting


def softmax(logits: np.ndarray) -> np.ndarray:
    weights = np.exp(logits)
    return weights / weights.sum(axis=1, keepdims=True)


def test_a_deterministic_draft_has_the_same_distribution_under_either_rule() -> None:
    options = SamplingOptions(seed=6)
    target = MarkovTarget(VOCAB, seed=0)
    for probs in (None, lambda logits: np.eye(VOCAB, dtype=np.float32)[logits.argmax(axis=1)]):
        assert chi_square(target, likeliest_two(target, probs), options) < CHI_SQUARE_15_DF


def test_the_statistic_catches_an_argmax_draft_that_claims_its_softmax() -> None:
    """The bias that this rule has in transformers' Gemma 4 path; shows that the tests above have teeth."""
    target = MarkovTarget(VOCAB, seed=0)
    assert chi_square(target, likeliest_two(target, softmax), SamplingOptions(seed=6)) > 10 * CHI_SQUARE_15_DF


def coupled(drafter: MarkovTarget, claims: bool = False) -> Drafting:
    """Two tokens drawn with the noise that the target takes; `claims`: with the distributions that they come from."""

    def drafting(tokens: list[int], sampler: Sampler) -> Draft:
        path: list[int] = []
        probs = []
        for _ in range(2):
            logits = drafter.logits[path[-1] if path else tokens[-1]]
            probs.append(sampler.distribution(logits, tokens + path))
            path.append(sampler.guess(logits, None, tokens, path)[0].token)
        return Draft(np.array(path), np.array([-1, 0]), probs=np.array(probs, np.float32) if claims else None)

    return drafting


@pytest.mark.parametrize(
    "options",
    [SamplingOptions(seed=1), SamplingOptions(temperature=0.7, top_k=3, seed=2), SamplingOptions(top_p=0.8, seed=3)],
    ids=["plain", "top_k", "top_p"],
)
def test_coupled_drafts_keep_the_joint_distribution_of_two_tokens(options: SamplingOptions) -> None:
    target, other = MarkovTarget(VOCAB, seed=0), MarkovTarget(VOCAB, seed=1, contrast=1.5)
    assert chi_square(target, coupled(other), options) < CHI_SQUARE_15_DF


def test_the_ratio_rule_never_meets_the_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    target, other = MarkovTarget(VOCAB, seed=0), MarkovTarget(VOCAB, seed=1, contrast=1.5)
    options = SamplingOptions(seed=1)
    assert chi_square(target, coupled(other, claims=True), options) < CHI_SQUARE_15_DF

    def silent(*arguments: object) -> int:
        raise AssertionError("noise was drawn")

    sampler = Sampler(options)
    draft = stochastic(other, options, np.random.default_rng(0))([0], sampler)
    monkeypatch.setattr(RowDraw, "best", silent)
    for _ in range(50):  # accepted and not
        accept(draft, target.forward(0, draft), [0], sampler)
    with pytest.raises(AssertionError, match="noise was drawn"):
        accept_matching(draft, target.forward(0, draft), [0], sampler)


def test_the_statistic_catches_a_residual_drawn_with_the_noise_of_the_draft(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bias that vLLM had (issues 47386 and 54282): the rejected token's noise was large, the others' is then not
    independent of it. Shows that the test above has teeth.
    """
    target, other = MarkovTarget(VOCAB, seed=0), MarkovTarget(VOCAB, seed=1, contrast=1.5)
    options = SamplingOptions(seed=1)
    current: list[Sampler] = []
    drafting = coupled(other, claims=True)

    def remembered(tokens: list[int], sampler: Sampler) -> Draft:
        current[:] = [sampler]
        place[:] = tokens
        return drafting(tokens, sampler)

    place: list[int] = []

    def shared(weights: np.ndarray, rng: object) -> int:
        with np.errstate(divide="ignore"):
            logits = np.log(weights).astype(np.float32)
        return current[0].guess(logits, None, place, [])[0].token

    monkeypatch.setattr(verify, "draw", shared)
    assert chi_square(target, remembered, options) > 1.5 * CHI_SQUARE_15_DF


def test_the_ratio_rule_is_greedy_when_the_sampler_is() -> None:
    target = MarkovTarget(VOCAB, seed=3)
    drafting = stochastic(MarkovTarget(VOCAB, seed=4), SamplingOptions(), np.random.default_rng(0))
    expected = plain(target, [0], Sampler(GREEDY), 50)
    sampler = Sampler(GREEDY)
    assert speculative(target, [0], sampler, 50, partial(drafting, sampler=sampler))[:50] == expected


def test_the_ratio_rule_refuses_trees_and_missing_probabilities() -> None:
    sampler, logits = Sampler(SAMPLED), np.zeros((3, VOCAB), np.float32)
    probs = np.full((2, VOCAB), 0.25, np.float32)
    with pytest.raises(ValueError, match="must be a chain"):
        accept(Draft(np.array([1, 2]), np.array([-1, -1]), probs=probs), logits, [0], sampler)
    for wrong in (None, probs[:1]):
        with pytest.raises(ValueError, match="distribution"):
            accept_ratio(Draft(np.array([1, 2]), np.array([-1, 0]), probs=wrong), logits, [0], sampler, sampler.rng)


@pytest.mark.parametrize("count", [1, 5, 512, 513, 3000])
def test_evenly_spaced_uniforms_draw_every_index_as_often_as_its_weight_says(count: int) -> None:
    class Even:
        def __init__(self) -> None:
            self.drawn = 0

        def random(self) -> float:
            self.drawn += 1
            return (self.drawn - 0.5) / 20_000

    weights = np.exp(4 * np.random.default_rng(0).standard_normal(count))
    weights[1::3] = 0.0
    even: Any = Even()
    drawn = [draw(weights, even) for _ in range(20_000)]
    assert drawn == sorted(drawn)
    often = np.bincount(drawn, minlength=count)
    assert not often[weights == 0].any()
    assert np.abs(often - 20_000 * weights / weights.sum()).max() <= 1


def test_draw_never_returns_a_weight_of_zero() -> None:
    class Nearly1:
        def random(self) -> float:
            return 1.0 - 2.0**-53

    class Zero:
        def random(self) -> float:
            return 0.0

    weights = np.array([0.0, 0.1, 0.0, 0.2, 1e-300, 0.0])
    zero: Any = Zero()
    nearly1: Any = Nearly1()
    assert draw(weights, zero) == 1
    assert draw(weights, nearly1) == 3
    # sums of blocks and cumulative sums round differently, so that the end of a block can be overshot
    for trial in range(200):
        weights = np.append(np.random.default_rng(trial).random(1400), np.zeros(50))
        assert draw(weights, nearly1) == 1399
