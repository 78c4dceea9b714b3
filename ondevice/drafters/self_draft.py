"""The target drafts for itself, with sub-layers left out: Draft & Verify (Zhang et al., ACL 2024, arXiv 2309.08168)."""

from __future__ import annotations

from collections.abc import Sequence

from ondevice.drafters.partial import START, PartialDrafter, Scores
from ondevice.engines.layer_path import LayerPath
from ondevice.engines.protocol import Engine, Rows, Session, TokenTree


class SkippingDrafter(PartialDrafter):
    """
    Attributes:
        path: of the drafted rows; None where nothing is known that would pay.
    """

    def __init__(self, name: str, engine: Engine, path: LayerPath | None, start: float = START) -> None:
        """
        Args:
            start: the chance of a token to be right, as far as it is known.
        """
        super().__init__(name, start)
        self._engine = engine
        self.path = path

    def ready(self) -> bool:
        return self.path is not None

    def scores(self, session: Session, tokens: Sequence[int]) -> Scores | None:
        if self.path is None:
            return None
        rows = Rows(session, TokenTree.chain(tokens), [len(tokens) - 1], self.path)
        return Scores(self._engine.forward([rows])[0].logits[0])
