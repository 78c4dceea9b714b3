"""The grammar drafter: drafts the tokens that a grammar forces, because the target cannot choose any others."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ondevice.engines.protocol import Outputs, Session
from ondevice.generate.drafters.protocol import Draft, DraftRequest, Forecast
from ondevice.generate.request import Constraint

SOURCE = "grammar"


class GrammarDrafter:
    """Drafts forced tokens. All of them are accepted, at any temperature. Without a grammar it drafts nothing."""

    name = SOURCE

    def __init__(self) -> None:
        self._constraint: Constraint | None = None

    def constrain(self, constraint: Constraint | None) -> None:
        self._constraint = constraint

    def begin(self, prompt_ids: Sequence[int], session: Session) -> None:
        """Does nothing: the text does not matter."""

    def forget(self) -> None:
        self._constraint = None

    def forecast(self, nodes: int) -> Forecast:
        return Forecast(np.ones(len(self._forced(nodes)), np.float32), SOURCE)

    def draft(self, request: DraftRequest) -> Draft:
        tokens = self._forced(request.nodes)
        return Draft.chain(tokens, [1.0] * len(tokens), SOURCE)

    def observe(self, emitted: Sequence[int], outputs: Outputs, path: Sequence[int]) -> None:
        """Does nothing: the loop appends emitted tokens to the constraint."""

    def _forced(self, most: int) -> list[int]:
        """Up to `most` tokens that must follow, up to the first place where there is a choice."""
        path: list[int] = []
        if self._constraint is None:
            return path
        while len(path) < most and (token := self._constraint.forced(path)) is not None:
            path.append(token)
        return path
