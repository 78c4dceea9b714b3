"""Two drafters as one: whichever expects to gain more drafts."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ondevice.drafters.protocol import Draft, Drafter, DraftRequest, Forecast
from ondevice.engines.protocol import Outputs, Session

Price = Callable[[str], float]
"""What a token drafted by a source costs, in tokens of plain decoding."""


class Fallback:
    """Asks two drafters what they expect and lets the better one draft, round by round.

    The hybrid rule of SuffixDecoding (arXiv 2411.04975), the free drafter where its expected accepted length is the
    larger and the model otherwise, less what drafting that far costs: a small model's MTP step takes a seventh of its
    forward. Whether to draft at all, and how far, is the schedule's business.

    primary : drafts at a cost
    secondary : drafts for next to nothing, and does in a tie
    price : what either costs
    """

    def __init__(self, primary: Drafter, secondary: Drafter, price: Price) -> None:
        self.primary = primary
        self.secondary = secondary
        self.name = f"{primary.name}+{secondary.name}"
        self._price = price
        self._chosen: Drafter | None = None

    def begin(self, prompt_ids: Sequence[int], session: Session) -> None:
        self._chosen = None
        self.primary.begin(prompt_ids, session)
        self.secondary.begin(prompt_ids, session)

    def forget(self) -> None:
        self._chosen = None
        self.primary.forget()
        self.secondary.forget()

    def forecast(self, nodes: int) -> Forecast:
        first, second = self.primary.forecast(nodes), self.secondary.forecast(nodes)
        better = not len(second.survival) or self._worth(first) > self._worth(second)
        self._chosen = self.primary if better else self.secondary
        return first if better else second

    def draft(self, request: DraftRequest) -> Draft:
        """The draft of the child that this round's forecast chose; makes the forecast where nobody asked for it."""
        if self._chosen is None:
            self.forecast(request.nodes)
        assert self._chosen is not None
        return self._chosen.draft(request)

    def observe(self, emitted: Sequence[int], outputs: Outputs, path: Sequence[int]) -> None:
        self._chosen = None
        self.primary.observe(emitted, outputs, path)
        self.secondary.observe(emitted, outputs, path)

    def _worth(self, forecast: Forecast) -> float:
        """Tokens that the best length is expected to gain, before what their verification costs."""
        price, total, most = self._price(forecast.source), 0.0, 0.0
        for chance in forecast.survival.tolist():
            total += chance - price
            most = max(most, total)
        return most
