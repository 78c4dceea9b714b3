"""Leaves after a lower layer with a head trained for that, and runs the upper ones for all drafted tokens together:
AdaDecode (Wei et al., ICML 2025, arXiv 2506.03700, first called ParaDecode).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ondevice.drafters.partial import PartialDrafter, Scores
from ondevice.engines.layer_path import LayerPath
from ondevice.engines.protocol import Engine, Floats, Rows, Session, TokenTree

ExitHead = Callable[[Session, Floats], Scores]
"""What may follow a row whose residual stream float32[H] this is; a session, for heads that have buffers there."""


def trained_head(session: Session, hidden: Floats) -> Scores:
    """The bundle's own."""
    answer = session.propose("exit", hidden)
    return Scores(answer.logits[0], answer.candidates[0])


class EarlyExitDrafter(PartialDrafter):
    """A drafted token costs the layers below the head. Verification takes over what they made of all drafted tokens
    (`Rows.path`), and runs the layers above alone: a round costs each layer once for every token, and most layers
    together for all.

    Where layers share keys and values and the head stands behind the last that has its own, drafted rows miss nothing
    in the caches. Elsewhere verification writes the keys and values of the layers above.
    """

    def __init__(self, engine: Engine, stop: int, head: ExitHead = trained_head) -> None:
        """
        Args:
            engine: of the sequences; one that has partial forwards.
            stop: the first layer above the head.
            head: reads the residual stream there.
        """
        super().__init__("early-exit")
        self._engine = engine
        self._vocab_size = engine.target.vocab_size
        self._path = LayerPath(stop=stop)
        self._head = head

    def scores(self, session: Session, tokens: Sequence[int]) -> Scores | None:
        rows = Rows(session, TokenTree.chain(tokens), [len(tokens) - 1], self._path)
        found = self._head(session, self._engine.forward([rows])[0].hidden[0])
        ids = found.candidates
        if ids is not None and not 0 <= ids.min() <= ids.max() < self._vocab_size:
            return None  # a damaged head may cost speed, never a reply
        return found
