from collections.abc import Sequence

import numpy as np
import pytest

from ondevice.drafters.fallback import Fallback
from ondevice.drafters.protocol import Draft, DraftRequest, Forecast
from ondevice.engines.protocol import Outputs, Session
from tests.drafters.rounds import NO_SESSION, draft, observe

PRICES = {"mtp": 0.1, "ngram": 0.0}


class Scripted:
    """Expects what it was told to, and writes down what it is told."""

    def __init__(self, name: str, *survival: float) -> None:
        self.name = name
        self.survival = np.array(survival, np.float32)
        self.calls: list[tuple[str, object]] = []

    def begin(self, prompt_ids: Sequence[int], session: Session) -> None:
        self.calls.append(("begin", list(prompt_ids)))

    def forget(self) -> None:
        self.calls.append(("forget", None))

    def forecast(self, nodes: int) -> Forecast:
        return Forecast(self.survival[:nodes], self.name)

    def draft(self, request: DraftRequest) -> Draft:
        self.calls.append(("draft", (request.nodes, request.floor)))
        return Draft.chain([1] * min(request.nodes, len(self.survival)), source=self.name)

    def observe(self, emitted: Sequence[int], outputs: Outputs, path: Sequence[int]) -> None:
        self.calls.append(("observe", list(emitted)))


@pytest.mark.parametrize(
    ("primary", "secondary", "expected"),
    [
        ((0.7, 0.5), (0.9, 0.8), "ngram"),
        ((0.7, 0.5), (0.9,), "mtp"),
        ((0.7, 0.5), (), "mtp"),
        ((0.9,), (0.85,), "ngram"),
        ((0.9,), (0.75,), "mtp"),
        ((0.9, 0.05), (0.79,), "mtp"),
        ((), (), "mtp"),
    ],
)
def test_the_one_that_expects_more_after_its_price_drafts(
    primary: tuple[float, ...], secondary: tuple[float, ...], expected: str
) -> None:
    both = Fallback(Scripted("mtp", *primary), Scripted("ngram", *secondary), PRICES.__getitem__)
    assert both.forecast(4).source == expected
    assert draft(both, 4).source == expected


def test_it_has_both_names() -> None:
    assert Fallback(Scripted("mtp"), Scripted("ngram"), PRICES.__getitem__).name == "mtp+ngram"


def test_a_shorter_draft_keeps_to_the_forecast_it_was_planned_with() -> None:
    primary, secondary = Scripted("mtp", 0.9, 0.0), Scripted("ngram", 0.7, 0.65)
    both = Fallback(primary, secondary, PRICES.__getitem__)
    assert both.forecast(2).source == "ngram"
    assert draft(both, 1, 0.3).source == "ngram"
    assert secondary.calls == [("draft", (1, 0.3))]


def test_the_choice_is_made_anew_each_round_and_needs_no_forecast() -> None:
    primary, secondary = Scripted("mtp", 0.9), Scripted("ngram", 0.1)
    both = Fallback(primary, secondary, PRICES.__getitem__)
    assert draft(both, 1).source == "mtp"
    observe(both, [1])
    secondary.survival[0] = 1.0
    assert draft(both, 1).source == "ngram"
    both.begin([1], NO_SESSION)
    secondary.survival[0] = 0.1
    assert draft(both, 1).source == "mtp"


def test_both_hear_everything() -> None:
    primary, secondary = Scripted("mtp", 0.9), Scripted("ngram", 0.1)
    both = Fallback(primary, secondary, PRICES.__getitem__)
    both.begin([1, 2], NO_SESSION)
    observe(both, [3])
    assert primary.calls == secondary.calls == [("begin", [1, 2]), ("observe", [3])]
