"""All that a bundle offers as one drafter: round by round the draft with the most expected tokens per second."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from ondevice.decoding.costs import Costs
from ondevice.decoding.schedule import expected_rate
from ondevice.decoding.trust import Trust
from ondevice.drafters.protocol import Constrained, Draft, Drafter, DraftRequest, Forecast, Reader, Searcher
from ondevice.engines.protocol import Outputs, Session

if TYPE_CHECKING:
    from ondevice.decoding.constraint import Constraint
    from ondevice.decoding.limits import Limits

STEADY_ROUNDS = 16
"""Rounds after which a steady forecast is asked for again, though nothing was drafted."""


class Known(NamedTuple):
    """What a drafter expects of up to so many nodes, and the tokens per second that this comes to."""

    nodes: int
    forecast: Forecast
    rate: float


class Portfolio:
    """Asks its drafters what they expect, and lets the best one draft.

    The hybrid rule of SuffixDecoding (arXiv 2411.04975), the free drafter where its expected accepted length is the
    larger and the model otherwise, over any number of drafters and with measured costs: each at the length that
    suits it best. Whether to draft at all, and how far, is the schedule's business.

    A drafter whose forecasts do not come true loses its place to the next one. While it drafts nothing it is believed
    again little by little, and so has another chance in time.

    drafters : in a tie the first one drafts
    costs : this machine's
    """

    def __init__(self, drafters: Sequence[Drafter], costs: Costs) -> None:
        self.drafters = tuple(drafters)
        self.name = "+".join(drafter.name for drafter in drafters)
        self._costs = costs
        self._searchers = {number: drafter for number, drafter in enumerate(drafters) if isinstance(drafter, Searcher)}
        """Found once: to ask for a protocol takes 20 us, of every round."""
        self._trusts = [Trust() for _ in drafters]
        self._known: list[Known] = []
        self._steady: dict[int, Known] = {}
        """Of drafters whose forecasts stay about as they are."""
        self._untold: list[list[int]] = [[] for _ in drafters]
        """What those were not told yet. To a small model telling six drafters of every round is a tenth of it."""
        self._last: tuple[Outputs, Sequence[int]] | None = None
        """What the last round's tokens were chosen from."""
        self._rounds = 0
        self._chosen: int | None = None
        self._drafted: int | None = None

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
        self._leave()

    @property
    def searched_s(self) -> float:
        return sum(drafter.searched_s for drafter in self._searchers.values())

    def begin(self, prompt_ids: Sequence[int], session: Session) -> None:
        self._leave()
        for drafter in self.drafters:
            drafter.begin(prompt_ids, session)

    def forget(self) -> None:
        self._leave()
        for drafter in self.drafters:
            drafter.forget()

    def forecast(self, nodes: int) -> Forecast:
        self._rounds += 1
        if self._rounds % STEADY_ROUNDS == 0:
            self._steady.clear()
        self._known = [self._ask(number, nodes) for number in range(len(self.drafters))]
        rates = [known.rate for known in self._known]
        self._chosen = rates.index(max(rates))
        best = self._known[self._chosen].forecast
        steady = best.steady and all(known.forecast.steady for known in self._known)
        return Forecast(best.survival, best.source, steady, self._trusts[self._chosen])

    def _ask(self, number: int, nodes: int) -> Known:
        known = self._steady.get(number)
        if known is not None and known.nodes == nodes:
            return known
        self._tell(number)
        forecast = self.drafters[number].forecast(nodes)
        known = Known(nodes, forecast, expected_rate(forecast, self._costs, self._trusts[number]))
        if forecast.steady:
            self._steady[number] = known
        return known

    def draft(self, request: DraftRequest) -> Draft:
        """The draft of the one that this round's forecast chose; makes the forecast where nobody asked for it."""
        if self._chosen is None:
            self.forecast(request.nodes)
        assert self._chosen is not None
        self._tell(self._chosen)
        draft = self.drafters[self._chosen].draft(request)
        self._drafted = len(draft)
        self._steady.pop(self._chosen, None)
        return draft

    def observe(self, emitted: Sequence[int], outputs: Outputs, path: Sequence[int]) -> None:
        self._last = outputs, path
        for number, trust in enumerate(self._trusts):
            self._untold[number] += emitted
            if number not in self._steady or number in self._searchers:
                self._tell(number)
            if self._drafted is None or number != self._chosen:
                trust.rest()
            else:
                trust.observe(self._known[number].forecast.survival, self._drafted, len(path) - 1)
        self._chosen = self._drafted = None

    def _tell(self, number: int) -> None:
        """A drafter hears of the tokens since it was last told."""
        if self._untold[number] and self._last is not None:
            self.drafters[number].observe(self._untold[number], *self._last)
            self._untold[number] = []

    def _leave(self) -> None:
        """What was said so far is no longer what a draft would follow."""
        self._steady.clear()
        self._chosen = self._drafted = self._last = None
        self._untold = [[] for _ in self.drafters]
