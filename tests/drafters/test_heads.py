"""Trees that medusa grows and chains of blockwise, over a session whose proposals are known."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from ondevice.bundle_format.model_config import HeadsEntry
from ondevice.engines.protocol import Outputs, Proposals
from ondevice.errors import UsageError
from ondevice.generate.drafters.heads import HeadsDrafter
from ondevice.generate.drafters.protocol import ROOT, Draft, DraftRequest
from ondevice.generate.drafters.registry import entry
from ondevice.generate.request import SamplingOptions
from ondevice.generate.sampling.sampler import Sampler
from tests.fixtures.toy_engine import ToyEngine

VOCAB = 6


class Heads:
    """`chances[place]`: those of the tokens that are proposed for it."""

    def __init__(self, chances: list[list[float]], exact_trees: bool = True) -> None:
        self.exact_trees = exact_trees
        self.hidden: list[list[float]] = []
        self._chances = chances

    def propose(self, kind: str, hidden: np.ndarray) -> Proposals:
        self.hidden.append(hidden.tolist())
        ids = np.tile(np.arange(VOCAB), (len(self._chances), 1))
        return Proposals(ids, np.log(np.array(self._chances, np.float32) + 1e-9))


def made(places: int, branches: int | None = None) -> HeadsDrafter:
    target: Any = SimpleNamespace(hidden_size=2, vocab_size=VOCAB)
    return HeadsDrafter(HeadsEntry("medusa", "g", places, VOCAB), target, branches)


def outputs(*hidden: float) -> Outputs:
    rows = np.array([[value, value] for value in hidden or (0.0,)], np.float32)
    return Outputs(np.zeros((len(rows), VOCAB), np.float32), rows)


def began(chances: list[list[float]], branches: int | None = None) -> tuple[HeadsDrafter, Heads]:
    drafter = made(len(chances), branches)
    session: Any = Heads(chances)
    drafter.begin([0], session)
    drafter.observe([0], outputs(), [0])
    return drafter, session


def drafted(chances: list[list[float]], request: DraftRequest, branches: int | None = None) -> Draft:
    return began(chances, branches)[0].draft(request)


SURE, TORN = [0.0, 0.94, 0.03, 0.01, 0.01, 0.01], [0.0, 0.0, 0.0, 0.52, 0.45, 0.03]


def test_sure_heads_draft_a_chain_as_long_as_they_are_many() -> None:
    draft = drafted([SURE, SURE, SURE], DraftRequest(8, [0.1] * 8))
    assert draft.tokens.tolist() == [1, 1, 1]
    assert draft.parents.tolist() == [ROOT, 0, 1]
    assert draft.source == "medusa"


def test_a_torn_place_gives_siblings_and_both_have_the_same_children() -> None:
    draft = drafted([TORN, SURE], DraftRequest(4))
    assert draft.tokens.tolist() == [3, 1, 4, 1]
    assert draft.parents.tolist() == [ROOT, 0, ROOT, 2]


def test_blockwise_drafts_a_chain_whatever_its_heads_think() -> None:
    draft = drafted([TORN, TORN, SURE], DraftRequest(8), branches=1)
    assert draft.tokens.tolist() == [3, 3, 1]
    assert draft.parents.tolist() == [ROOT, 0, 1]


@pytest.mark.parametrize(("nodes", "floor"), [(1, 0.0), (3, 0.0), (8, 0.3), (8, 0.99), (0, 0.0)])
def test_no_more_than_is_asked_for(nodes: int, floor: float) -> None:
    draft = drafted([TORN, SURE, TORN], DraftRequest(nodes, [floor] * nodes))
    assert len(draft) <= nodes
    assert all(np.asarray(draft.confidence) >= min(floor, 1.0)) or not len(draft)
    if floor == 0.99:
        assert not len(draft)


def test_an_engine_that_verifies_chains_gets_chains() -> None:
    drafter = made(2)
    session: Any = Heads([TORN, TORN], exact_trees=False)
    drafter.begin([0], session)
    drafter.observe([0], outputs(), [0])
    draft = drafter.draft(DraftRequest(6, trees=False))
    assert draft.parents.tolist() == [ROOT, 0]
    assert len(drafter.forecast(6).survival) == 2


def test_the_state_is_that_of_the_last_accepted_row() -> None:
    """Verification of one block is all that the next one needs."""
    drafter, session = began([SURE, SURE])
    drafter.observe([1, 4], outputs(7.0, 8.0, 9.0), [0, 1])
    drafter.draft(DraftRequest(2))
    assert session.hidden == [[8.0, 8.0]]


def test_nothing_is_drafted_before_the_first_token_or_after_forgetting() -> None:
    drafter = made(2)
    session: Any = Heads([SURE, SURE])
    drafter.begin([0], session)
    assert not len(drafter.draft(DraftRequest(4)))
    drafter.observe([0], outputs(), [0])
    drafter.forget()
    assert not len(drafter.draft(DraftRequest(4)))


def test_what_the_target_takes_is_learnt() -> None:
    """First children that are always wrong, and second ones that are always right."""
    drafter, _ = began([TORN, SURE])
    before = drafter.forecast(4).survival
    for _ in range(40):
        drafter.draft(DraftRequest(4))
        drafter.observe([4, 1, 5], outputs(*[0.0] * 5), [0, 3, 4])
    draft = drafter.draft(DraftRequest(2))
    assert draft.tokens.tolist() == [4, 1]
    assert draft.confidence[0] > 0.8
    after = drafter.forecast(4).survival
    assert (np.diff(after) <= 0).all()
    assert after[0] != before[0]


def test_a_forecast_never_rises_and_is_no_longer_than_the_tree() -> None:
    drafter, _ = began([SURE, SURE])
    survival = drafter.forecast(16).survival
    assert len(survival) == 16
    assert (np.diff(survival) <= 0).all()
    assert len(drafter.forecast(99).survival) == 72  # 8 children, and 8 for each of them


@pytest.mark.parametrize("row", [[np.nan] * VOCAB, [np.inf] * VOCAB, [-np.inf] * VOCAB])
def test_damaged_heads_draft_nothing(row: list[float]) -> None:
    class Damaged(Heads):
        def propose(self, kind: str, hidden: np.ndarray) -> Proposals:
            return Proposals(np.tile(np.arange(VOCAB), (2, 1)), np.array([row, row], np.float32))

    drafter = made(2)
    session: Any = Damaged([SURE, SURE])
    drafter.begin([0], session)
    drafter.observe([0], outputs(), [0])
    assert not len(drafter.draft(DraftRequest(4)))


def test_tokens_outside_the_vocabulary_are_not_drafted() -> None:
    class Damaged(Heads):
        def propose(self, kind: str, hidden: np.ndarray) -> Proposals:
            found = super().propose(kind, hidden)
            return Proposals(found.candidates + VOCAB, found.logits)

    drafter = made(2)
    session: Any = Damaged([SURE, SURE])
    drafter.begin([0], session)
    drafter.observe([0], outputs(), [0])
    assert not len(drafter.draft(DraftRequest(4)))


def test_a_penalty_sees_the_path() -> None:
    """Each node's children are guessed anew, after its own path."""
    sampler = Sampler(SamplingOptions(temperature=0.0, repetition_penalty=100.0))
    draft = drafted([SURE, SURE, SURE], DraftRequest(3, sampler=sampler, context=[0]))
    tokens, parents = draft.tokens.tolist(), draft.parents.tolist()
    for node, parent in enumerate(parents):
        assert parent == ROOT or tokens[node] != tokens[parent]


def test_a_bundle_without_heads_says_what_to_do() -> None:
    with pytest.raises(
        UsageError, match=r"no medusa heads: use --drafter ngram, or train some and export with --heads"
    ):
        entry("medusa", ToyEngine())
