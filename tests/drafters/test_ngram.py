import subprocess
import sys

import numpy as np
import pytest

from ondevice.generate.drafters.ngram import NgramDrafter
from ondevice.generate.drafters.protocol import ROOT
from ondevice.generate.request import SamplingOptions
from ondevice.generate.sampling.sampler import Sampler
from ondevice.generate.verify import accept
from tests.drafters.rounds import NO_SESSION, draft, observe
from tests.generate.markov import MarkovTarget, plain


def begun(prompt: list[int], drafter: NgramDrafter | None = None) -> NgramDrafter:
    drafter = drafter or NgramDrafter()
    drafter.begin(prompt, NO_SESSION)
    return drafter


def test_it_drafts_what_followed_the_longest_match() -> None:
    drafted = draft(begun([5, 0, 1, 2, 3, 4, 9, 2, 8, 0, 1, 2]), 2)
    assert drafted.tokens.tolist() == [3, 4]
    assert drafted.parents.tolist() == [ROOT, 0]
    assert drafted.source == "ngram"
    assert drafted.probs is None
    assert ((drafted.confidence > 0) & (drafted.confidence < 1)).all()


def test_nothing_is_drafted_where_nothing_matches() -> None:
    drafter = begun([1, 2, 3, 4])
    assert len(draft(drafter, 8)) == 0
    assert drafter.forecast(8).survival.shape == (0,)


def test_a_forecast_is_that_of_the_draft() -> None:
    drafter = begun([1, 2, 3, 4, 1, 2, 3, 4, 1, 2])
    forecast, drafted = drafter.forecast(6), draft(drafter, 6)
    assert forecast.source == drafted.source
    np.testing.assert_allclose(forecast.survival, np.cumprod(drafted.confidence), rtol=1e-5)
    assert (np.diff(forecast.survival) <= 0).all()
    assert len(drafter.forecast(2).survival) == 2


def test_a_draft_ends_at_the_floor() -> None:
    drafter = begun([1, 2, 3, 4, 1, 2, 3, 4, 1, 2])
    survival = drafter.forecast(6).survival
    assert len(draft(drafter, 6, floor=float(survival[2]) - 1e-4)) == 3
    assert len(draft(drafter, 6, floor=1.0)) == 0


def test_it_learns_what_a_match_is_worth_even_when_others_draft() -> None:
    """The text repeats its words, but what comes next is never what came before."""
    drafter = begun([1, 2])
    for new in range(100, 220):
        observe(drafter, [1, 2, new])
    observe(drafter, [1, 2])
    assert len(draft(drafter, 4)) == 0


def test_it_trusts_a_text_that_repeats_itself() -> None:
    drafter = begun([1, 2, 3, 4, 5])
    for _ in range(40):
        observe(drafter, [1, 2, 3, 4, 5])
    assert drafter.forecast(10).survival[-1] > 0.8


def test_a_draft_follows_everything_observed() -> None:
    drafter = begun([1, 2, 3, 1])
    drafter.forecast(4)
    observe(drafter, [2, 7, 1, 2, 7, 1, 2])
    assert draft(drafter, 1).tokens.tolist() == [7]


def test_text_generated_in_earlier_turns_is_kept_and_their_prompts_are_not() -> None:
    drafter = begun([50, 51, 52])
    observe(drafter, [1, 2, 3, 4])
    begun([9, 1, 2], drafter)
    assert draft(drafter, 1).tokens.tolist() == [3]
    begun([50, 51], drafter)
    assert len(draft(drafter, 2)) == 0


def test_no_match_spans_two_turns() -> None:
    drafter = begun([50])
    observe(drafter, [1, 2])
    begun([51], drafter)
    observe(drafter, [3, 4])
    begun([9, 1, 2], drafter)
    assert len(draft(drafter, 2)) == 0


def test_only_so_many_turns_are_kept() -> None:
    drafter = NgramDrafter(keep_turns=2)
    for turn in range(4):
        begun([90 + turn], drafter)
        observe(drafter, [10 * turn, 10 * turn + 1, 10 * turn + 2, 10 * turn + 3])
    assert len(draft(begun([99, 10, 11], drafter), 1)) == 0
    assert draft(begun([99, 20, 21], drafter), 1).tokens.tolist() == [22]
    assert draft(begun([99, 30, 31], drafter), 1).tokens.tolist() == [32]


def test_a_prompt_that_continues_the_conversation_finds_the_earlier_prompt_too() -> None:
    drafter = begun([50, 51, 52, 53])
    observe(drafter, [1, 2, 3])
    begun([50, 51, 52, 53, 1, 2, 3, 8, 51, 52], drafter)
    assert draft(drafter, 1).tokens.tolist() == [53]


@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("seed", range(3))
def test_output_is_that_of_plain_decoding(temperature: float, seed: int) -> None:
    target = MarkovTarget(6, seed, contrast=3.0)
    options = SamplingOptions(temperature, repetition_penalty=1.05, seed=seed)
    tokens, sampler, accepted = [0, 1, 2], Sampler(options), 0
    drafter = begun(tokens)
    while len(tokens) < 203:
        drafted = draft(drafter, 5)
        verdict = accept(drafted, target.forward(tokens[-1], drafted), tokens, sampler)
        observe(drafter, verdict.emitted)
        tokens += verdict.emitted
        accepted += verdict.accepted
    assert tokens[3:203] == plain(target, [0, 1, 2], Sampler(options), 200)
    assert accepted > 20


def test_the_decoding_layer_does_not_import_numba() -> None:
    modules = "ondevice, ondevice.generate.controller, ondevice.generate.verify"
    check = f"import sys, {modules}; assert 'numba' not in sys.modules"
    subprocess.run([sys.executable, "-c", check], check=True)
