"""How likely the target found the tokens that were emitted, and which it found likelier."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ondevice.decoding.record import TokenLogprob

MOST = 20
"""Alternatives, as in OpenAI's interface."""


class Logprobs:
    """Looks up what was emitted in the rows of logits that it was chosen from. Those do not depend on drafts, nor does
    the order in which a row is summed, so neither do the figures.
    """

    def __init__(self, top: int = 0) -> None:
        """
        Args:
            top: alternatives, 0 to `MOST`.
        """
        self._top = top

    def of(self, logits: NDArray[np.float32], token_id: int) -> TokenLogprob:
        """Of one token; the logits are float32[V]."""
        scores = logits.astype(np.float64)
        peak = scores.max()
        total = peak + np.log(np.exp(scores - peak).sum())
        top = self._likeliest(logits)
        return TokenLogprob(
            token_id,
            float(scores[token_id] - total),
            tuple((token, float(scores[token] - total)) for token in top),
        )

    def _likeliest(self, logits: NDArray[np.float32]) -> list[int]:
        if not self._top:
            return []
        least = np.partition(logits, -min(self._top, len(logits)))[-min(self._top, len(logits))]
        found = np.flatnonzero(logits >= least)
        return [int(token) for token in found[np.argsort(-logits[found], kind="stable")][: self._top]]
