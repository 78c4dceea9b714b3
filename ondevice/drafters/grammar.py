"""Drafts what a grammar forces: the target cannot say anything else."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ondevice.decoding.constraint import Constraint
from ondevice.drafters.protocol import Draft, DraftRequest, Forecast
from ondevice.engines.protocol import Outputs, Session

SOURCE = "grammar"


class GrammarDrafter:
    """Every token of it is taken, also above temperature 0: it is the only one with a chance. Without a grammar it
    drafts nothing.
    """

    name = SOURCE

    def __init__(self) -> None:
        self._constraint: Constraint | None = None

    def constrain(self, constraint: Constraint | None) -> None:
        self._constraint = constraint

    def begin(self, prompt_ids: Sequence[int], session: Session) -> None:
        """No text matters."""

    def forget(self) -> None:
        self._constraint = None

    def forecast(self, nodes: int) -> Forecast:
        return Forecast(np.ones(len(self._forced(nodes)), np.float32), SOURCE)

    def draft(self, request: DraftRequest) -> Draft:
        tokens = self._forced(request.nodes)
        return Draft.chain(tokens, [1.0] * len(tokens), SOURCE)

    def observe(self, emitted: Sequence[int], outputs: Outputs, path: Sequence[int]) -> None:
        """The constraint is told by the loop."""

    def _forced(self, most: int) -> list[int]:
        path: list[int] = []
        if self._constraint is None:
            return path
        while len(path) < most and (token := self._constraint.forced(path)) is not None:
            path.append(token)
        return path
