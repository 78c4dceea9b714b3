"""Two drafters as one: whichever expects more accepted tokens drafts."""

from __future__ import annotations

from collections.abc import Sequence

from ondevice.drafters.protocol import Draft, Drafter, Forecast
from ondevice.engines.protocol import Outputs

MARGIN = 0.1
"""Accepted tokens by which the primary must be ahead; in a near tie the secondary drafts, since it costs nothing."""


class Fallback:
    """Asks two drafters what they expect and lets the better one draft, round by round.

    The hybrid rule of SuffixDecoding (arXiv 2411.04975): the free drafter where its expected accepted length is the
    larger, the model otherwise. Whether to draft at all, and how far, is the schedule's business.

    primary : drafts at a cost
    secondary : drafts for free
    """

    def __init__(self, primary: Drafter, secondary: Drafter) -> None:
        self.primary = primary
        self.secondary = secondary
        self.name = f"{primary.name}+{secondary.name}"
        self._chosen: Drafter | None = None

    def begin(self, prompt_ids: Sequence[int]) -> None:
        self._chosen = None
        self.primary.begin(prompt_ids)
        self.secondary.begin(prompt_ids)

    def forget(self) -> None:
        self._chosen = None
        self.primary.forget()
        self.secondary.forget()

    def forecast(self, k: int) -> Forecast:
        first, second = self.primary.forecast(k), self.secondary.forecast(k)
        ahead = float(first.survival.sum()) - float(second.survival.sum())
        self._chosen = self.primary if ahead > MARGIN or not len(second.survival) else self.secondary
        return first if self._chosen is self.primary else second

    def draft(self, k: int, floor: float = 0.0) -> Draft:
        """The draft of the child that this round's forecast chose; makes the forecast where nobody asked for it."""
        if self._chosen is None:
            self.forecast(k)
        assert self._chosen is not None
        return self._chosen.draft(k, floor)

    def observe(self, emitted: Sequence[int], outputs: Outputs) -> None:
        self._chosen = None
        self.primary.observe(emitted, outputs)
        self.secondary.observe(emitted, outputs)
