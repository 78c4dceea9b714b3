"""The loop over a toy engine: whatever drafts, the tokens are those of plain decoding, and it ends where it should."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from ondevice.decoding.loop import Limits, generate
from ondevice.decoding.record import Round
from ondevice.decoding.sampling import Sampler, SamplingOptions
from ondevice.decoding.schedule import ConstantSchedule
from ondevice.drafters.protocol import Draft, Forecast
from ondevice.engines.protocol import ROOT, Floats
from tests.toy_engine import VOCAB, ToyEngine, logits_after

PROMPT = [3, 1, 4, 1, 5]
GREEDY = SamplingOptions(temperature=0.0)


class Guesser:
    """Drafts chains or trees that follow the greedy target with a given chance per token."""

    name = "guesser"

    def __init__(self, luck: float, tree: bool = False) -> None:
        self._luck, self._tree = luck, tree
        self._rng = np.random.default_rng(5)
        self.tokens: list[int] = []

    def begin(self, prompt_ids: Sequence[int]) -> None:
        self.tokens = list(prompt_ids)

    def forecast(self, k: int) -> Forecast:
        return Forecast(np.full(k, self._luck, np.float32), self.name)

    def draft(self, k: int, floor: float = 0.0) -> Draft:
        paths: list[list[int]] = []
        tokens: list[int] = []
        parents: list[int] = []
        for node in range(k):
            parent = int(self._rng.integers(ROOT, node)) if self._tree and node else node - 1
            path = [] if parent == ROOT else paths[parent]
            right = int(logits_after(self.tokens + path).argmax())
            token = right if self._rng.random() < self._luck else int(self._rng.integers(VOCAB))
            paths.append([*path, token])
            tokens.append(token)
            parents.append(parent)
        return Draft(np.array(tokens, np.int64), np.array(parents, np.int64), source=self.name)

    def observe(self, emitted: Sequence[int], hidden: Floats) -> None:
        """The toy engine's hidden state of a row is its logits."""
        for token, row in zip(emitted, hidden, strict=True):
            np.testing.assert_array_equal(row, logits_after(self.tokens))
            self.tokens.append(token)


def run(
    options: SamplingOptions, limits: Limits, drafter: Guesser | None = None, k: int = 4, **engine: int
) -> tuple[list[int], list[Round]]:
    schedule = None if drafter is None else ConstantSchedule(k)
    rounds = list(generate(ToyEngine(**engine), PROMPT, Sampler(options), limits, drafter=drafter, schedule=schedule))
    return [token for this in rounds for token in this.token_ids], rounds


@pytest.mark.parametrize("tree", [False, True], ids=["chain", "tree"])
@pytest.mark.parametrize("luck", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("k", [1, 3, 7])
@pytest.mark.parametrize("options", [GREEDY, SamplingOptions(0.8, top_k=5, seed=7)], ids=["greedy", "seeded"])
def test_drafts_change_nothing(options: SamplingOptions, k: int, luck: float, tree: bool) -> None:
    plain, _ = run(options, Limits(60))
    drafted, rounds = run(options, Limits(60), Guesser(luck, tree), k)
    assert drafted == plain
    assert len(drafted) == 60
    if luck == 1.0 and options is GREEDY and not tree:
        assert {this.accepted for this in rounds[1:-1]} == {k}


@pytest.mark.parametrize("most", [1, 2, 5, 6, 7])
def test_max_new_tokens_is_exact(most: int) -> None:
    tokens, rounds = run(GREEDY, Limits(most), Guesser(1.0))
    assert len(tokens) == most
    assert rounds[-1].finish_reason == "length"


@pytest.mark.parametrize("stop_at", range(1, 12))
def test_a_stop_token_inside_a_draft_ends_the_output_there(stop_at: int) -> None:
    plain, _ = run(GREEDY, Limits(12))
    stop = frozenset({plain[stop_at]})
    tokens, rounds = run(GREEDY, Limits(12, stop), Guesser(1.0))
    assert tokens == plain[: plain.index(plain[stop_at]) + 1]
    assert rounds[-1].finish_reason == "stop"
    assert all(this.accepted <= len(this.token_ids) for this in rounds)


@pytest.mark.parametrize("luck", [0.0, 1.0])
def test_a_full_context_ends_the_output(luck: float) -> None:
    tokens, rounds = run(GREEDY, Limits(1000), Guesser(luck), context_length=20)
    assert len(tokens) == 20 - len(PROMPT) + 1  # the last token needs no place of its own
    assert rounds[-1].finish_reason == "context"


def test_a_prefill_in_chunks_changes_nothing() -> None:
    assert run(GREEDY, Limits(20), chunk=2)[0] == run(GREEDY, Limits(20))[0]


@pytest.mark.parametrize("after", [0, 1, 3])
def test_cancelling_stops_within_one_forward(after: int) -> None:
    engine = ToyEngine(chunk=2)
    limits = Limits(50, cancelled=lambda: engine.forwards >= after)
    rounds = list(generate(engine, PROMPT, Sampler(GREEDY), limits))
    assert engine.forwards == after
    assert rounds[-1].finish_reason == "cancelled"
    assert rounds[-1].token_ids == ()
