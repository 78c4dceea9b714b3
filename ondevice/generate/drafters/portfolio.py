"""The `auto` drafter: all drafters of a bundle as one, of which each round uses the best."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ondevice.engines.protocol import Outputs, Session
from ondevice.generate.controller import expected_rate
from ondevice.generate.costs import Costs
from ondevice.generate.drafters.acceptance import Trust
from ondevice.generate.drafters.protocol import Constrained, Draft, Drafter, DraftRequest, Forecast, Reader, Searcher
from ondevice.generate.request import Constraint, Limits

STEADY_ROUNDS = 16
"""Rounds after which a steady forecast is asked for again, even if nothing was drafted."""


class Portfolio:
    """Asks its drafters for their forecasts, and lets the one with the most expected tokens per second draft.

    This is the hybrid rule of SuffixDecoding (arXiv 2411.04975), which takes the free drafter where its expected
    accepted length is larger and the model otherwise, extended to any number of drafters and to measured costs: each is
    judged at the draft length that suits it best. The schedule decides whether to draft at all, and how far.

    A drafter whose forecasts do not come true loses its place to the next one. While it drafts nothing its `Trust`
    recovers slowly, so that it is tried again in time.

    drafters : in a tie the first one drafts
    costs : this machine's
    """

    def __init__(self, drafters: Sequence[Drafter], costs: Costs) -> None:
        self.drafters = tuple(drafters)
        self.name = "+".join(drafter.name for drafter in drafters)
        self._costs = costs
        self._searchers = {number: drafter for number, drafter in enumerate(drafters) if isinstance(drafter, Searcher)}
        """Computed once, because an isinstance check of a protocol takes 20 us."""
        self._trusts = [Trust() for _ in drafters]
        self._offers: list[Offer] = []
        """The offers of this round, by drafter."""
        self._steady: dict[int, Offer] = {}
        """Offers with steady forecasts, which are used in several rounds."""
        self._unreported: list[list[int]] = [[] for _ in drafters]
        """By drafter, emitted tokens that it has not observed yet. Drafters with steady forecasts observe several
        rounds together: calling six drafters in every round takes a tenth of a small model's round."""
        self._last: tuple[Outputs, Sequence[int]] | None = None
        """Outputs and path of the last round."""
        self._rounds = 0
        self._chosen: int | None = None
        """The drafter with the best offer of this round."""
        self._drafted: int | None = None
        """Tokens that it drafted; None if it was not asked."""

    def expect(self, limits: Limits) -> None:
        for drafter in self.drafters:
            if isinstance(drafter, Reader):
                drafter.expect(limits)

    def constrain(self, constraint: Constraint | None) -> None:
        for drafter in self.drafters:
            if isinstance(drafter, Constrained):
                drafter.constrain(constraint)

    def rest(self) -> None:
        for drafter in self.drafters:
            if isinstance(drafter, Reader):
                drafter.rest()
        self._reset()

    @property
    def searched_s(self) -> float:
        return sum(drafter.searched_s for drafter in self._searchers.values())

    def begin(self, prompt_ids: Sequence[int], session: Session) -> None:
        self._reset()
        for drafter in self.drafters:
            drafter.begin(prompt_ids, session)

    def forget(self) -> None:
        self._reset()
        for drafter in self.drafters:
            drafter.forget()

    def forecast(self, nodes: int) -> Forecast:
        self._rounds += 1
        if self._rounds % STEADY_ROUNDS == 0:
            self._steady.clear()
        self._offers = [self._ask(number, nodes) for number in range(len(self.drafters))]
        rates = [offer.rate for offer in self._offers]
        self._chosen = rates.index(max(rates))
        best = self._offers[self._chosen].forecast
        steady = best.steady and all(offer.forecast.steady for offer in self._offers)
        return Forecast(best.survival, best.source, steady, self._trusts[self._chosen])

    def draft(self, request: DraftRequest) -> Draft:
        """The draft of the drafter that this round's forecast chose. Makes the forecast if it was not asked for."""
        if self._chosen is None:
            self.forecast(request.nodes)
        assert self._chosen is not None
        self._report(self._chosen)
        draft = self.drafters[self._chosen].draft(request)
        self._drafted = len(draft)
        self._steady.pop(self._chosen, None)
        return draft

    def observe(self, emitted: Sequence[int], outputs: Outputs, path: Sequence[int]) -> None:
        self._last = outputs, path
        for number, trust in enumerate(self._trusts):
            self._unreported[number] += emitted
            if number not in self._steady or number in self._searchers:
                self._report(number)
            if self._drafted is None or number != self._chosen:
                trust.rest()
            else:
                trust.observe(self._offers[number].forecast.survival, self._drafted, len(path) - 1)
        self._chosen = self._drafted = None

    def _ask(self, number: int, nodes: int) -> Offer:
        offer = self._steady.get(number)
        if offer is not None and offer.nodes == nodes:
            return offer
        self._report(number)
        forecast = self.drafters[number].forecast(nodes)
        offer = Offer(nodes, forecast, expected_rate(forecast, self._costs, self._trusts[number]))
        if forecast.steady:
            self._steady[number] = offer
        return offer

    def _report(self, number: int) -> None:
        """Let a drafter observe the tokens emitted since it last did."""
        if self._unreported[number] and self._last is not None:
            self.drafters[number].observe(self._unreported[number], *self._last)
            self._unreported[number] = []

    def _reset(self) -> None:
        """Drop everything that refers to the text so far."""
        self._steady.clear()
        self._chosen = self._drafted = self._last = None
        self._unreported = [[] for _ in self.drafters]


class Offer(NamedTuple):
    """A drafter's forecast for up to `nodes` tokens, and the best expected tokens per second that follow from it."""

    nodes: int
    forecast: Forecast
    rate: float
