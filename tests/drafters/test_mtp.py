"""Trees that the MTP drafter grows, over a session whose every draft step is known."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import pytest

from ondevice.engines.protocol import DraftStep, DraftVerdict, Outputs
from ondevice.generate.drafters.mtp import MtpDrafter
from ondevice.generate.drafters.protocol import ROOT, Draft, DraftRequest
from ondevice.generate.request import SamplingOptions
from ondevice.generate.sampling.sampler import Sampler

VOCAB = 6


class Steps:
    """`chances[token]`: those of what follows it. The hidden state holds the path, so that a mixed-up one shows."""

    exact_trees = True

    def __init__(self, chances: dict[int, list[float]]) -> None:
        self._chances = chances
        self._hidden = np.zeros(8, np.float32)
        self.asked: list[list[int]] = []

    def draft_step(self, token: int, hidden: np.ndarray, depth: int = 0) -> DraftStep:
        depth = int((hidden >= 0).sum())
        path = [*hidden[:depth].astype(int).tolist(), token]
        self.asked.append(path)
        self._hidden[:] = hidden  # the session's own array, the same one every time
        self._hidden[depth] = token
        chances = self._chances.get(token, [1.0] * VOCAB)
        return DraftStep(np.arange(VOCAB), np.log(np.array(chances, np.float32) + 1e-9), self._hidden)


def drafted(
    chances: dict[int, list[float]], request: DraftRequest, branches: int = 3, *, writes: bool = False
) -> tuple[Draft, Steps]:
    drafter, steps = MtpDrafter(VOCAB, branches, writes=writes), Steps(chances)
    session: Any = steps
    drafter.begin([0], session)
    drafter.observe([0], outputs(), [0])
    return drafter.draft(request), steps


def outputs() -> Outputs:
    return Outputs(np.zeros((1, VOCAB), np.float32), np.full((1, 8), -1, np.float32))


SURE, TORN = [0.0, 0.94, 0.03, 0.01, 0.01, 0.01], [0.0, 0.0, 0.0, 0.52, 0.45, 0.03]


def test_a_sure_drafter_drafts_a_chain() -> None:
    draft, _ = drafted({0: SURE, 1: SURE}, DraftRequest(4))
    assert draft.tokens.tolist() == [1, 1, 1, 1]
    assert draft.parents.tolist() == [ROOT, 0, 1, 2]


def test_a_torn_one_proposes_siblings_and_looks_beyond_the_likelier_first() -> None:
    draft, steps = drafted({0: TORN, 3: SURE, 4: SURE}, DraftRequest(4))
    assert draft.tokens.tolist()[:2] == [3, 4]
    assert draft.parents.tolist()[:2] == [ROOT, ROOT]
    assert draft.tokens.tolist()[2:] == [1, 1]
    assert draft.parents.tolist()[2:] == [0, 1]
    assert steps.asked == [[0], [0, 3], [0, 3, 1], [0, 4]], "each with the hidden state of its own path"


def test_one_token_of_each_depth_is_read_where_steps_write() -> None:
    """4 is as likely to be followed as 3 and 1, but its step would take the place of that of 3."""
    draft, steps = drafted({0: TORN, 3: SURE, 4: SURE, 1: TORN}, DraftRequest(6), writes=True)
    assert draft.tokens.tolist()[:3] == [3, 4, 1]
    assert steps.asked[:3] == [[0], [0, 3], [0, 3, 1]]
    assert [len(path) for path in steps.asked] == [1, 2, 3, 4]
    everything = drafted({0: TORN, 3: SURE, 4: SURE, 1: TORN}, DraftRequest(6))[1].asked
    assert [0, 4] in everything


def test_nothing_is_added_below_the_floor() -> None:
    draft, steps = drafted({0: TORN}, DraftRequest(4, [0.9] * 4))
    assert len(draft) == 0
    assert steps.asked == [[0]]


@pytest.mark.parametrize(("branches", "trees"), [(1, True), (3, False)])
def test_chains_where_trees_are_not_wanted(branches: int, trees: bool) -> None:
    draft, _ = drafted({0: TORN, 3: TORN}, DraftRequest(4, trees=trees), branches)
    assert draft.depth == len(draft) == 4


def test_siblings_have_the_noise_of_their_place() -> None:
    sampler = Sampler(SamplingOptions(seed=3))
    draft, _ = drafted({0: [1.0] * VOCAB}, DraftRequest(3, sampler=sampler, context=[7, 0]))
    first = [token for token, parent in zip(draft.tokens.tolist(), draft.parents.tolist(), strict=True) if parent == -1]
    guesses = sampler.guess(np.zeros(VOCAB, np.float32), None, [7, 0], [], 3)
    assert first == [guess.token for guess in guesses][: len(first)]


def test_a_forecast_learns_that_second_children_are_taken() -> None:
    drafter, steps = MtpDrafter(VOCAB), Steps({0: TORN})
    session: Any = steps
    drafter.begin([0], session)
    drafter.observe([0], outputs(), [0])
    before = drafter.forecast(4).survival
    assert (np.diff(before) <= 0).all()
    for _ in range(40):
        drafter.draft(DraftRequest(2))
        drafter.observe([4, 0], Outputs(np.zeros((2, VOCAB), np.float32), np.full((2, 8), -1, np.float32)), [0, 1])
    after = drafter.forecast(2).survival
    assert after[0] > 0.8 > before[0]


def test_a_forecast_begins_with_what_is_known_of_the_drafter() -> None:
    drafters = [MtpDrafter(VOCAB), MtpDrafter(VOCAB, acceptance=0.4)]
    assert [drafter.forecast(2).survival.tolist() for drafter in drafters] == [
        pytest.approx([chance, chance**2]) for chance in (0.7, 0.4)
    ]


def test_siblings_that_are_never_taken_are_guessed_in_one_draft_of_eight(monkeypatch: pytest.MonkeyPatch) -> None:
    drafter, steps = MtpDrafter(VOCAB), Steps({0: TORN, 3: SURE})
    session: Any = steps
    drafter.begin([0], session)
    drafter.observe([0], outputs(), [0])
    asked: list[int] = []
    guess = Sampler.guess

    def counted(sampler: Sampler, *given: Any) -> Any:
        asked.append(given[-1])
        return guess(sampler, *given)

    monkeypatch.setattr(Sampler, "guess", counted)
    three = Outputs(np.zeros((3, VOCAB), np.float32), np.full((3, 8), -1, np.float32))
    for _ in range(60):
        asked.clear()
        draft = drafter.draft(DraftRequest(2, [0.1] * 2))
        drafter.observe([3, 1, 0], three, [0, 1, 2])
    assert draft.tokens.tolist() == [3, 1]
    branches = []
    for _ in range(16):
        asked.clear()
        drafter.draft(DraftRequest(2, [0.1] * 2))
        drafter.observe([3, 1, 0], three, [0, 1, 2])
        branches.append(asked[0])
    assert sorted(branches) == [1] * 14 + [3] * 2
    drafter.draft(DraftRequest(2))
    assert asked[-1] == 3, "where a row costs nothing"


# The form of drafts that the engine makes.


def form(drafter: MtpDrafter, request: DraftRequest) -> list[int]:
    return list(drafter.widths(request)[0])


def begun(acceptance: float, branches: int = 3) -> MtpDrafter:
    drafter, session = MtpDrafter(VOCAB, branches, acceptance), cast(Any, Steps({}))
    drafter.begin([0], session)
    drafter.observe([0], outputs(), [0])
    return drafter


def test_first_guesses_and_others_by_their_rates() -> None:
    """Survival of first guesses is 0.5, 0.25, 0.125, 0.06; of second and third ones of the first step 0.1 and 0.05."""
    drafter = begun(0.5)
    assert [form(drafter, DraftRequest(nodes)) for nodes in range(1, 6)] == [
        [1], [1, 1], [1, 1, 1], [2, 1, 1], [2, 1, 1, 1],
    ]  # fmt: skip
    assert form(drafter, DraftRequest(4, trees=False)) == form(begun(0.5, branches=1), DraftRequest(4)) == [1, 1, 1, 1]


def test_another_guess_pays_its_row_where_a_step_does_not_pay() -> None:
    rows, steps = [0.06] * 4, [0.2] * 4
    assert form(begun(0.5), DraftRequest(4, rows, steps)) == [2]
    assert form(begun(0.7), DraftRequest(4, rows, steps)) == [2, 1, 1]
    assert form(begun(0.2), DraftRequest(4, rows, steps)) == []


def test_guesses_that_were_not_drafted_teach_as_well() -> None:
    drafter, request = begun(0.5), DraftRequest(3, [0.15] * 3, [0.2] * 3)
    assert form(drafter, request) == [1]
    for _ in range(30):
        drafter.verified([DraftVerdict(drafted=1, depth=1, accepted=0, hits=0, rank=rank) for rank in (0, 1)])
        drafter.observe([1, 2], outputs(), [0])
        drafter.verified([DraftVerdict(drafted=1, depth=1, accepted=1, hits=1, rank=0)] * 2)
        drafter.observe([1, 2, 3, 4], outputs(), [0])
    assert form(drafter, request) == [2]
    for _ in range(60):
        drafter.verified([DraftVerdict(drafted=2, depth=1, accepted=1, hits=1, rank=0)])
        drafter.observe([1, 2], outputs(), [0])
    assert form(drafter, request) == [1, 1, 1]
