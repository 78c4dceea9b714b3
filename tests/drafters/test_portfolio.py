from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from ondevice.engines.protocol import Outputs, Session
from ondevice.generate.costs import Costs, KnownCosts
from ondevice.generate.drafters.portfolio import STEADY_ROUNDS, Portfolio
from ondevice.generate.drafters.protocol import Draft, DraftRequest, Forecast
from tests.drafters.rounds import NO_SESSION, draft, observe


def costs() -> Costs:
    """Rows are free, and a token of `mtp` takes a tenth of a forward."""
    known = Costs()
    known.recall(KnownCosts(0.0, dict.fromkeys(range(1, 9), 1.0), {"mtp": {1: 0.1, 8: 0.8}, "ngram": {1: 1e-6}}))
    return known


class Scripted:
    """Expects what it was told to, and writes down what it is told."""

    def __init__(self, name: str, *survival: float) -> None:
        self.name = name
        self.survival = np.array(survival, np.float32)
        self.steady = False
        self.calls: list[tuple[str, Any]] = []

    def begin(self, prompt_ids: Sequence[int], session: Session) -> None:
        self.calls.append(("begin", list(prompt_ids)))

    def forget(self) -> None:
        self.calls.append(("forget", None))

    def forecast(self, nodes: int) -> Forecast:
        return Forecast(self.survival[:nodes], self.name, self.steady)

    def draft(self, request: DraftRequest) -> Draft:
        self.calls.append(("draft", (request.nodes, request.floor)))
        return Draft.chain([1] * min(request.nodes, len(self.survival)), source=self.name)

    def observe(self, emitted: Sequence[int], outputs: Outputs, path: Sequence[int]) -> None:
        self.calls.append(("observe", list(emitted)))


@pytest.mark.parametrize(
    ("primary", "secondary", "expected"),
    [
        ((0.7, 0.5), (0.9, 0.8), "ngram"),
        ((0.7, 0.5), (0.8,), "mtp"),
        ((0.7, 0.5), (), "mtp"),
        ((0.9,), (0.85,), "ngram"),
        ((0.9,), (0.7,), "mtp"),
        ((0.9, 0.05), (0.7,), "mtp"),
        ((), (), "mtp"),
    ],
)
def test_the_one_with_the_most_expected_tokens_per_second_drafts(
    primary: tuple[float, ...], secondary: tuple[float, ...], expected: str
) -> None:
    both = Portfolio([Scripted("mtp", *primary), Scripted("ngram", *secondary)], costs())
    assert both.forecast(4).source == expected
    assert draft(both, 4).source == expected


def test_it_has_all_their_names() -> None:
    assert Portfolio([Scripted("mtp"), Scripted("ngram"), Scripted("tree")], costs()).name == "mtp+ngram+tree"


def test_a_shorter_draft_keeps_to_the_forecast_it_was_planned_with() -> None:
    primary, secondary = Scripted("mtp", 0.9, 0.0), Scripted("ngram", 0.7, 0.65)
    both = Portfolio([primary, secondary], costs())
    assert both.forecast(2).source == "ngram"
    assert draft(both, 1, 0.3).source == "ngram"
    assert secondary.calls == [("draft", (1, 0.3))]


def test_the_choice_is_made_anew_each_round_and_needs_no_forecast() -> None:
    primary, secondary = Scripted("mtp", 0.9), Scripted("ngram", 0.1)
    both = Portfolio([primary, secondary], costs())
    assert draft(both, 1).source == "mtp"
    observe(both, [1])
    secondary.survival[0] = 1.0
    assert draft(both, 1).source == "ngram"
    both.begin([1], NO_SESSION)
    secondary.survival[0] = 0.1
    assert draft(both, 1).source == "mtp"


def test_both_hear_everything() -> None:
    primary, secondary = Scripted("mtp", 0.9), Scripted("ngram", 0.1)
    both = Portfolio([primary, secondary], costs())
    both.begin([1, 2], NO_SESSION)
    observe(both, [3])
    assert primary.calls == secondary.calls == [("begin", [1, 2]), ("observe", [3])]


def test_a_steady_one_hears_of_several_rounds_when_it_is_asked_again() -> None:
    primary, secondary = Scripted("mtp", 0.1), Scripted("ngram", 0.9)
    primary.steady = True
    both = Portfolio([primary, secondary], costs())
    both.begin([1, 2], NO_SESSION)
    observe(both, [3])
    for token in range(4, 4 + STEADY_ROUNDS):
        assert draft(both, 1).source == "ngram"
        observe(both, [token])
    heard = [said for call, said in primary.calls if call == "observe"]
    assert len(heard) == 2
    assert heard[0] + heard[1] == list(range(3, 3 + len(heard[0]) + len(heard[1])))
    assert [said for call, said in secondary.calls if call == "observe"] == [[t] for t in range(3, 4 + STEADY_ROUNDS)]


def test_a_steady_one_that_is_chosen_has_heard_everything() -> None:
    primary, secondary = Scripted("mtp", 0.5), Scripted("ngram", 0.9)
    primary.steady = True
    both = Portfolio([primary, secondary], costs())
    both.begin([1], NO_SESSION)
    for token in (2, 3, 4):
        assert draft(both, 1).source == "ngram"
        observe(both, [token])
    secondary.survival[0] = 0.0
    assert draft(both, 1).source == "mtp"
    assert primary.calls == [("begin", [1]), ("observe", [2, 3, 4]), ("draft", (1, 0.0))]


def test_one_that_does_not_keep_its_word_loses_its_place_and_has_another_chance() -> None:
    boaster, modest = Scripted("mtp", 0.9, 0.8), Scripted("ngram", 0.5)
    both = Portfolio([boaster, modest], costs())
    sources = []
    for _ in range(300):
        sources.append(draft(both, 2).source)
        observe(both, [1] if sources[-1] == "mtp" else [1, 1])
    assert sources[0] == "mtp"
    assert sources[:16].count("mtp") <= 4
    assert 2 <= sources[16:].count("mtp") <= 12


def test_a_portfolio_of_portfolios_is_a_drafter_too() -> None:
    inner = Portfolio([Scripted("mtp", 0.3), Scripted("ngram", 0.6)], costs())
    outer = Portfolio([inner, Scripted("tree", 0.2)], costs())
    assert outer.forecast(4).source == "ngram"
    assert draft(outer, 1).source == "ngram"
    observe(outer, [1, 1])
