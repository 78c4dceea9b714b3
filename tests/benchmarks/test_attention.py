"""The benchmarks of attention measure what they say."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from benchmarks import attention
from benchmarks.attention_quality import LOOKUP, Comparison, Variant, first_drafts, missed, with_needle
from ondevice.bundle import Bundle


def test_every_attention_is_timed() -> None:
    found = attention.measure([1024], 1)
    products, whole = found["1024"]["products"], found["1024"]["whole"]
    assert set(products) < set(whole)
    assert all(value > 0 for value in (*products.values(), *whole.values()))
    assert len(attention.report(found, [1024]).splitlines()) == 2 + 2 + len(whole)


def test_a_needle_is_twice_in_its_text() -> None:
    text, other = list(range(4000)), list(range(5000, 7000))
    found, end = with_needle(text, other, np.random.default_rng(0))
    first = next(place for place, token in enumerate(found) if token >= 5000)
    needle = found[first : first + 32]
    assert found[-31:] == needle[:-1]
    assert end.tolist() == needle[16:]


def test_equal_answers_differ_in_nothing() -> None:
    rng = np.random.default_rng(0)
    logits = rng.standard_normal((5, 9)).astype(np.float32)
    logits -= np.log(np.exp(logits).sum(axis=1, keepdims=True))
    sums = Comparison()
    sums.add(logits, logits, np.arange(4))
    assert (sums.tokens, sums.same, sums.divergence) == (4, 4, 0)
    assert sums.nats == pytest.approx(-logits[np.arange(4), np.arange(4)].sum())


def test_what_a_choice_leaves_out_is_no_less_than_at_best(reference_bundle: Path) -> None:
    session = Variant("", "int8", LOOKUP).session(Bundle.open(reference_bundle), 1)
    tokens = np.random.default_rng(0).integers(5, 4000, 3300).tolist()
    found = missed(session, tokens)
    assert len(found) == 2
    assert all(0 <= best <= left < 1 for left, best in found)
    drafts, taken = first_drafts(session, tokens)
    assert len(drafts) == len(taken) > 30
