"""Kernels of sampling on scores that are no numbers, or huge, tiny or equal ones, between guard bytes."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest

from ondevice.generate.drafters.ngram import MAX_ID, SuffixAutomaton
from ondevice.generate.request import SamplingOptions
from ondevice.generate.sampling.elementary import exponential
from ondevice.generate.sampling.filters import DIGITS, select_nucleus, select_reaching, select_top_k
from ondevice.generate.sampling.gumbel import key_of
from ondevice.generate.sampling.masks import keep_allowed
from ondevice.generate.sampling.peaks import BLOCK, find_peaks
from ondevice.generate.sampling.row_draw import RowDraw
from tests.fixtures.guards import Guards
from tests.fixtures.hostile import KINDS, filled
from tests.fixtures.pairwise import pairwise_cases

every_kind = pytest.mark.parametrize("kind", KINDS)

VALUES: dict[str, tuple[Any, ...]] = {
    "temperature": (0.0, 1e-310, 1.0, 1e30),
    "top_k": (None, 1, 5, 2**40),
    "top_p": (None, 1e-300, 0.9),
    "min_p": (None, 5e-324, 0.1),
}
OPTIONS = [
    {name: values[index] for (name, values), index in zip(VALUES.items(), case, strict=True)}
    for case in pairwise_cases(VALUES)
]
"""Every two values of different options occur together."""


@every_kind
@pytest.mark.parametrize("count", [1, 5, 300, 5000])
def test_tokens_are_those_of_the_row_or_none(guards: Guards, kind: str, count: int) -> None:
    """With every temperature and filter: the tokens that are kept, and the best ones of the vocabulary and of some."""
    ids = guards.copy(np.random.default_rng(0).permutation(10 * count)[:count].astype(np.int64))
    for seed, chosen in enumerate(OPTIONS):
        scores = guards.copy(filled(kind, count, seed))
        makes_sense = np.isfinite(scores.max())
        with guards.around_all():
            draw = RowDraw(SamplingOptions(**chosen), key_of(seed))
            kept, weights = draw.kept(scores) if chosen["temperature"] else (np.zeros(0), np.zeros(0))
            assert sorted(set(kept.tolist())) == kept.tolist()
            assert ((kept >= 0) & (kept < count)).all()
            assert np.isfinite(weights).all()
            for tokens, most in product((None, ids), (1, 4, 300)):
                best, values = draw.best(scores, tokens, seed, most)
                assert len(best) <= min(most, count)
                assert (len(best) > 0) == makes_sense
                assert not np.isnan(values).any()
                assert set(best.tolist()) <= set(range(count) if tokens is None else tokens.tolist())
        guards.check()


@every_kind
@pytest.mark.parametrize("count", [3, 129, 2000])
def test_kernels_of_filters_stay_in_their_arrays_by_themselves(guards: Guards, kind: str, count: int) -> None:
    """Without the check of the row before them."""
    scores = guards.copy(filled(kind, count))
    weights = guards.copy(scores.astype(np.float64))
    kept, edge = guards.zeros(count, np.intp), guards.zeros(count, np.intp)
    peaks = guards.zeros(-(-count // BLOCK), np.float32)
    find_peaks(scores, peaks)
    for k in (1, 2, count):
        assert select_top_k(scores, peaks, guards.zeros(k, np.float32), kept) <= count
    for least in (*scores[:2].tolist(), 0.0):
        assert select_reaching(scores, peaks, least, kept) <= count
    for needed in (1e-300, 0.5, 0.999, np.nan, np.inf):
        assert 0 <= select_nucleus(weights, needed, guards.zeros(DIGITS), kept, edge) <= count


def test_there_must_be_one_token_for_each_score() -> None:
    draw = RowDraw(SamplingOptions(), key_of(0))
    for tokens, most in ((np.arange(3), 1), (np.arange(5), 1), (None, 0)):
        with pytest.raises(ValueError, match="cannot be chosen from"):
            draw.best(np.zeros(4, np.float32), tokens, 0, most)


@every_kind
@pytest.mark.parametrize("words", [1, 3, 9])
def test_masks_shorter_and_longer_than_the_row(guards: Guards, kind: str, words: int) -> None:
    scores, out = guards.copy(filled(kind, 150)), guards.zeros(150, np.float32)
    mask = guards.full(words, 0xFFFFFFFF, np.uint32)
    keep_allowed(scores, mask, out)
    np.testing.assert_array_equal(out[: 32 * words], scores[: 32 * words])
    assert (out[32 * words :] == -np.inf).all()


def test_an_exponential_of_anything_is_a_number_from_0_on_or_nan() -> None:
    for x in (np.nan, np.inf, -np.inf, 1e308, -1e308, 3e38, -3e38, 5e-324, 0.0, 709.9, -745.2):
        found: Any = exponential(x)
        assert np.isnan(found) if np.isnan(x) else found >= 0


def test_the_automaton_s_tables_have_room(guards: Guards) -> None:
    """For texts of few and of many different tokens, also the largest id; other ids are refused."""
    rng = np.random.default_rng(0)
    for alphabet in (1, 2, 50, MAX_ID):
        with guards.around_all():
            automaton = SuffixAutomaton()
            for size in (1, 70, 500):
                automaton.extend(rng.integers(0, alphabet, size).tolist())
                automaton.continuation(20)
                automaton.end_text()
        guards.check()
    for token in (-1, MAX_ID + 1, 2**70):
        with pytest.raises(ValueError, match="token ids"):
            automaton.extend([1, token])
