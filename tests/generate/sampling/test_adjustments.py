"""Biases and penalties change logits in a whole row and among a drafter's candidates alike."""

import random
from collections.abc import Iterator
from typing import Any
from unittest.mock import create_autospec

import numpy as np
import pytest

from ondevice.errors import UsageError
from ondevice.generate.request import SamplingOptions
from ondevice.generate.sampling.counts import RECENT, Counts
from ondevice.generate.sampling.sampler import Adjustments, Sampler

VOCAB = 50
CONTEXT = [3, 4, 4, 7, 9, 9, 9, 3]
BEGINS = 3

CHOSEN: list[dict[str, Any]] = [
    {"logit_bias": {7: 2.5, 3: -100.0}},
    {"repetition_penalty": 1.3},
    {"presence_penalty": 0.6},
    {"frequency_penalty": -0.4},
    {"logit_bias": {9: 5.0}, "repetition_penalty": 0.8, "presence_penalty": 1.0, "frequency_penalty": 0.3},
]


def logits(seed: int = 0) -> np.ndarray:
    return (3.0 * np.random.default_rng(seed).standard_normal(VOCAB)).astype(np.float32)


def as_written_down(row: np.ndarray, chosen: dict[str, Any]) -> np.ndarray:
    options = SamplingOptions(**chosen)
    changed = row.copy()
    for token in range(VOCAB):
        changed[token] += np.float32((options.logit_bias or {}).get(token, 0.0))
        if token in CONTEXT:
            penalty = np.float32(options.repetition_penalty)
            changed[token] = changed[token] * penalty if changed[token] < 0 else changed[token] / penalty
        count = CONTEXT[BEGINS:].count(token)
        if count:
            changed[token] -= np.float32(options.presence_penalty + options.frequency_penalty * count)
    return changed


@pytest.mark.parametrize("chosen", CHOSEN, ids=str)
def test_a_row_is_changed_as_one_would_write_it_down(chosen: dict[str, Any]) -> None:
    row = logits()
    before = row.copy()
    changed = Adjustments(SamplingOptions(**chosen), begins=BEGINS).row(row, CONTEXT)
    np.testing.assert_array_equal(changed, as_written_down(row, chosen))
    np.testing.assert_array_equal(row, before)


@pytest.mark.parametrize("chosen", CHOSEN, ids=str)
def test_candidates_are_changed_as_the_row_is(chosen: dict[str, Any]) -> None:
    row, tokens = logits(), np.random.default_rng(1).permutation(VOCAB)[:20]
    adjustments = Adjustments(SamplingOptions(**chosen), suppressed=[5, 11], begins=BEGINS)
    np.testing.assert_array_equal(adjustments.some(row[tokens], tokens, CONTEXT), adjustments.row(row, CONTEXT)[tokens])


@pytest.mark.parametrize("chosen", CHOSEN, ids=str)
def test_texts_that_grow_or_differ_are_counted_as_new_ones_are(chosen: dict[str, Any]) -> None:
    """Also drafts after them, soft tokens in them, and where the prompt is longer than the text."""
    rng, options = random.Random(5), SamplingOptions(**chosen)
    kept, text = Adjustments(options, begins=BEGINS), list[int]()
    for _ in range(400):
        cut = len(text) - rng.choice([0, 0, 0, 1, RECENT, 5 * RECENT])
        text = [*text[: max(cut, 0)], *rng.choices(range(-2, VOCAB), k=rng.choice([0, 1, 1, 4, 2 * RECENT]))]
        if text and rng.random() < 0.2:
            text[rng.randrange(len(text))] = rng.randrange(VOCAB)
        path, tokens = rng.choices(range(VOCAB), k=rng.choice([0, 0, 1, 5])), np.arange(VOCAB)[::-3]
        fresh = Adjustments(options, begins=BEGINS)
        np.testing.assert_array_equal(kept.row(logits(), text, path), fresh.row(logits(), [*text, *path]))
        fresh = Adjustments(options, begins=BEGINS)
        found = kept.some(logits()[tokens], tokens, text, path)
        np.testing.assert_array_equal(found, fresh.some(logits()[tokens], tokens, [*text, *path]))


def test_a_text_that_grows_is_counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where drafts follow it."""
    restart = create_autospec(Counts.restart, side_effect=Counts.restart)
    monkeypatch.setattr(Counts, "restart", restart)
    sampler = Sampler(SamplingOptions(0.0, repetition_penalty=1.1, presence_penalty=0.5), begins=4000)
    text = [3] * 4000
    for token in range(VOCAB):
        for length in range(6):
            sampler.choose(logits(), text, [7, 3, 9, 8, 4, 5][:length])
        text.append(token)
    assert restart.call_count == 2  # of the whole text, and of what was generated


def test_the_biases_of_candidates() -> None:
    adjustments = Adjustments(SamplingOptions(logit_bias={7: 2.5, 3: -100.0}), suppressed=[5])
    found = adjustments.among(np.array([9, 7, 20, 5]))
    assert found is not None
    assert [part.tolist() for part in found] == [[1, 3], [2.5, -np.inf]]
    assert adjustments.among(np.array([9, 20])) is None


def test_a_guess_depends_on_the_text_by_penalties_alone() -> None:
    assert not Sampler(SamplingOptions(logit_bias={7: 2.5}), suppressed=[5]).reads_text
    assert Sampler(SamplingOptions(presence_penalty=0.5)).reads_text


def test_biases_alone_never_read_the_text() -> None:
    class Unread(list[int]):
        def __iter__(self) -> Iterator[int]:
            raise AssertionError("a long context was copied")

    sampler, tokens = Sampler(SamplingOptions(temperature=0.0, logit_bias={7: 100.0}), suppressed=[5]), np.arange(VOCAB)
    assert sampler.choose(logits(), Unread(CONTEXT)) == 7
    for candidates in (None, tokens):
        assert sampler.guess(logits(), candidates, Unread(CONTEXT), Unread())[0].token == 7


def test_nothing_is_changed_where_nothing_was_asked_for() -> None:
    assert not Adjustments(SamplingOptions())
    assert Adjustments(SamplingOptions(), suppressed=[1])


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("top_k", [None, 5])
@pytest.mark.parametrize("candidates", [None, np.arange(VOCAB)[::-1].copy()], ids=["all", "some"])
def test_what_is_suppressed_is_neither_chosen_nor_guessed(
    temperature: float, top_k: int | None, candidates: np.ndarray | None
) -> None:
    best = int(logits().argmax())
    options = SamplingOptions(temperature=temperature, top_k=top_k, seed=1)
    for seed in range(20):
        row = logits(seed)
        best = int(row.argmax())
        sampler = Sampler(options, suppressed=[best])
        assert sampler.choose(row, [0]) != best
        seen = row if candidates is None else row[candidates]
        guesses = sampler.guess(seen, candidates, [0], [], 4)
        assert guesses
        assert best not in [guess.token for guess in guesses]
        assert guesses[0].token == sampler.choose(row, [0])


def test_a_sampler_for_guesses_keeps_all_but_processors() -> None:
    best = int(logits().argmax())
    sampler = Sampler(SamplingOptions(temperature=0), [lambda row, context: -row], suppressed=[best])
    assert sampler.without_processors().choose(logits(), []) == int(np.argsort(-logits())[1])


@pytest.mark.parametrize(
    "chosen",
    [
        {"presence_penalty": "much"},
        {"presence_penalty": 1e7},
        {"frequency_penalty": float("nan")},
        {"frequency_penalty": None, "logit_bias": [1]},
        {"logit_bias": {"a": 1}},
        {"logit_bias": {1.5: 1}},
        {"logit_bias": {-1: 1}},
        {"logit_bias": {1: "x"}},
        {"logit_bias": {1: float("inf")}},
        {"logit_bias": {1: -1e9}},
    ],
    ids=str,
)
def test_senseless_choices(chosen: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        SamplingOptions(**chosen)
