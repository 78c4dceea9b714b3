"""Plain forwards that follow each other in one call of the kernels are those of one call each, bit for bit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

import ondevice
from ondevice.bundle import Bundle
from ondevice.engines.protocol import Outputs, Rows, TokenTree
from ondevice.engines.simd.engine import SimdEngine, SimdSession
from ondevice.generate import loop
from ondevice.generate.request import SamplingOptions
from ondevice.generate.sampling import Sampler
from tests.fixtures.tiny_models import CONTEXT, VOCAB
from tests.simd.conftest import LOOKUP
from tests.simd.forwards import drafted, extend, run

OPTIONS = {
    "greedy": SamplingOptions(temperature=0.0),
    "sampled": SamplingOptions(temperature=1.0, seed=1),
    "filtered": SamplingOptions(temperature=0.8, top_k=20, top_p=0.9, min_p=0.05, seed=2),
    "biased": SamplingOptions(temperature=0.7, logit_bias={3: 4.0, 5: -50.0}, seed=3),
}


def continued(session: SimdSession, token: int, most: int, sampler: Sampler, ends: frozenset[int]) -> Outputs:
    continuation = sampler.continuation(most, ends, VOCAB)
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


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("length", [1, 60, 130])
def test_rows_and_caches(pair: tuple[SimdEngine, SimdEngine], options: SamplingOptions, length: int) -> None:
    """With full and sliding caches, which a continuation crosses the end of, on one and on several threads."""
    rng = np.random.default_rng(length)
    ids = rng.integers(0, VOCAB, length).tolist()
    plain, together = (engine.open_session() for engine in pair)
    extend(plain, ids)
    extend(together, ids)
    sampler, context = Sampler(options), list(ids)
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
    continuation = Sampler(OPTIONS["greedy"]).continuation(8, frozenset(), VOCAB)
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


@pytest.mark.parametrize(
    "sampler",
    [
        Sampler(SamplingOptions(repetition_penalty=1.1)),
        Sampler(SamplingOptions(frequency_penalty=0.5)),
        Sampler(SamplingOptions(), [lambda logits, _: logits]),
        Sampler(SamplingOptions(), suppressed=[VOCAB]),
    ],
    ids=["repetition", "frequency", "processor", "beyond the vocabulary"],
)
def test_choices_that_take_python(sampler: Sampler) -> None:
    assert sampler.continuation(8, frozenset(), VOCAB) is None


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
