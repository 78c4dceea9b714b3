"""Distributions of two models compared: the figures' definitions, and which tokens of a text count."""

from __future__ import annotations

import math

import numpy as np
import pytest

from ondevice.bundle import Bundle
from ondevice.engines.protocol import Outputs
from ondevice.errors import BundleCorruptError, PromptError, UsageError
from ondevice.quality import CHUNK, TEXT, Comparison, measure, text_ids
from tests.fixtures.model_made import BOS, write_bundle
from tests.fixtures.toy_engine import VOCAB, ToyEngine


def logits_of(*shares: float) -> list[float]:
    """Logits of these probabilities, shifted as no softmax notices."""
    return [math.log(share) + 7 for share in shares]


def test_figures_of_known_distributions():
    comparison = Comparison()
    own = np.array([logits_of(0.5, 0.3, 0.2), logits_of(0.1, 0.8, 0.1)], np.float32)
    reference = np.array([logits_of(0.2, 0.5, 0.3), logits_of(0.1, 0.8, 0.1)], np.float32)
    comparison.add(own, reference, [2, 1])
    found = comparison.quality()
    kl = 0.2 * math.log(0.2 / 0.5) + 0.5 * math.log(0.5 / 0.3) + 0.3 * math.log(0.3 / 0.2)
    assert found.tokens == 2
    assert found.kl.value == pytest.approx(kl / 2, rel=1e-5)
    assert found.kl.error == pytest.approx(kl / 2, rel=1e-5)  # of 0 and kl: deviation kl / 2, by the root of 2 - 1
    assert found.kl_median == pytest.approx(kl / 2, rel=1e-5)
    assert found.kl_999 == pytest.approx(0.999 * kl, rel=1e-5)
    assert (found.same_top.value, found.same_top.error) == (0.5, 0.5)
    assert found.change.value == pytest.approx(math.sqrt(0.1**2 / 2), rel=1e-5)
    assert found.perplexity.value == pytest.approx(math.exp(-(math.log(0.2) + math.log(0.8)) / 2), rel=1e-5)
    assert found.reference_perplexity.value == pytest.approx(math.exp(-(math.log(0.3) + math.log(0.8)) / 2), rel=1e-5)
    assert found.ratio.value == pytest.approx(math.sqrt(0.3 / 0.2), rel=1e-5)


def test_errors_shrink_with_the_number_of_tokens():
    random = np.random.default_rng(3)
    own, reference = random.standard_normal((2, 400, 30)).astype(np.float32)
    few, many = Comparison(), Comparison()
    few.add(own[:100], reference[:100], [4] * 100)
    many.add(own, reference, [4] * 400)
    for name in ("kl", "same_top", "change", "perplexity", "ratio"):
        ratio = getattr(few.quality(), name).error / getattr(many.quality(), name).error
        assert ratio == pytest.approx(2, rel=0.35), name


class Recorder(ToyEngine):
    """Notes the tokens of every forward, and which rows' logits are wanted."""

    def __init__(self, most_rows: int = 100) -> None:
        super().__init__(2000)
        self.most_rows = most_rows
        self.seen: list[tuple[int, bool]] = []

    def forward(self, batch):
        for rows in batch:
            wanted = set(rows.wanted)
            self.seen += [(token, row in wanted) for row, token in enumerate(rows.tree.tokens.tolist())]
        return super().forward(batch)


def test_the_second_half_of_every_chunk_counts():
    ids = np.random.default_rng(1).integers(3, VOCAB, 2 * CHUNK + 40).tolist()
    own, reference = Recorder(100), Recorder(37)
    done = []
    found = measure(own, reference, ids, BOS, lambda *each: done.append(each))
    assert found.tokens == 2 * (CHUNK // 2 - 1)  # the last token of a chunk has no next one in it
    assert found.kl.value == pytest.approx(0, abs=1e-9)
    assert found.same_top.value == 1
    for engine in (own, reference):
        assert [token for token, _ in engine.seen] == [BOS, *ids[1:CHUNK], BOS, *ids[CHUNK + 1 : 2 * CHUNK]]
        one = [False] * (CHUNK // 2) + [True] * (CHUNK // 2 - 1) + [False]
        assert [wanted for _, wanted in engine.seen] == one * 2
    assert done[0] == (0, 2 * CHUNK)
    assert done[-1] == (2 * CHUNK, 2 * CHUNK)


def test_the_next_token_is_the_text_s():
    """The toy's logits follow from the tokens before: perplexity is that of one forward over the whole chunk."""
    ids = np.random.default_rng(2).integers(3, VOCAB, CHUNK).tolist()
    engine = Recorder(2000)
    session = engine.open_session()
    session_logits = []
    from ondevice.engines.protocol import Rows, TokenTree

    [outputs] = engine.forward([Rows(session, TokenTree.chain(ids), range(CHUNK))])
    session_logits = outputs.logits.astype(np.float64)
    shares = np.exp(session_logits - session_logits.max(-1, keepdims=True))
    shares /= shares.sum(-1, keepdims=True)
    losses = [-math.log(shares[row, ids[row + 1]]) for row in range(CHUNK // 2, CHUNK - 1)]
    found = measure(Recorder(), Recorder(), ids, None)
    assert found.perplexity.value == pytest.approx(math.exp(np.mean(losses)), rel=1e-5)


def test_a_text_must_have_a_chunk():
    with pytest.raises(PromptError, match=r"has 511 tokens, .* needs 512"):
        measure(Recorder(), Recorder(), [4] * (CHUNK - 1), None)


def test_a_short_context_makes_shorter_chunks():
    short = ToyEngine(64)
    assert measure(short, Recorder(), [4, 5] * 100, None).tokens == 3 * 31


class Damaged(ToyEngine):
    def forward(self, batch):
        return [Outputs(each.logits * np.float32(np.nan), each.hidden) for each in super().forward(batch)]


def test_what_is_not_finite_is_an_error():
    with pytest.raises(BundleCorruptError, match="NaN"):
        measure(Damaged(2000), Recorder(), [4] * CHUNK, None)


def test_the_built_in_text_suffices():
    text = TEXT.read_text("utf-8")
    assert 40_000 < len(text) < 60_000


def test_different_tokens_are_refused(tmp_path):
    one = Bundle.open(write_bundle(tmp_path / "one"))
    assert text_ids("ab<eos>", one, one)[:3] == [BOS, 4, 5]
    bare = Bundle.open(write_bundle(tmp_path / "bare", tokenizer=False, template=False))
    assert text_ids("ab", one, bare) == text_ids("ab", bare, one) == [BOS, 4, 5]
    with pytest.raises(UsageError, match="without a tokenizer"):
        text_ids("ab", bare, bare)
