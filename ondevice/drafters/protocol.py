"""One protocol for every way of guessing what the target will say next."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from ondevice.engines.protocol import ROOT, Floats


def _no_floats() -> NDArray[np.float32]:
    return np.zeros(0, np.float32)


@dataclass(frozen=True)
class Draft:
    """Proposed tokens, a chain or a tree. May be empty.

    tokens : int64[n]
    parents : int64[n], the index of each token's parent in this draft, ROOT for those that follow the newest token
    confidence : float32[n], the drafter's own estimate that the target takes the token given that it took the parent
    probs : float32[n, V] for a stochastic drafter: the distribution each token was drawn from, after the same
        temperature, top-k, top-p and penalties as the target's; None for a deterministic drafter
    source : who drafted it
    """

    tokens: NDArray[np.int64]
    parents: NDArray[np.int64]
    confidence: NDArray[np.float32] = field(default_factory=_no_floats)
    probs: NDArray[np.float32] | None = None
    source: str = "none"

    def __len__(self) -> int:
        return len(self.tokens)

    @classmethod
    def chain(cls, tokens: Sequence[int], confidence: Sequence[float] = (), source: str = "none") -> Draft:
        parents = np.arange(-1, len(tokens) - 1, dtype=np.int64)
        return cls(np.asarray(tokens, np.int64), parents, np.asarray(confidence, np.float32), None, source)

    @classmethod
    def empty(cls) -> Draft:
        return cls.chain([])


@dataclass(frozen=True)
class Forecast:
    """What a drafter expects of its next draft, before it is paid for.

    survival : float32[<=k], the chance that the target takes tokens 1..i; never rising. Shorter than k where the
        drafter has no more to say.
    source : who would draft it
    """

    survival: NDArray[np.float32]
    source: str


class Drafter(Protocol):
    name: str

    def begin(self, prompt_ids: Sequence[int]) -> None:
        """A new sequence starts with these tokens. What was learnt about acceptance stays."""
        ...

    def forget(self) -> None:
        """Draft from nothing that was said so far. What was learnt about acceptance stays."""
        ...

    def forecast(self, k: int) -> Forecast:
        """The chances of a draft of up to `k` tokens; costs next to nothing."""
        ...

    def draft(self, k: int, floor: float = 0.0) -> Draft:
        """Propose up to `k` tokens that follow everything observed so far.

        A deterministic drafter stops before a token whose chance of being taken, with all before it, is under `floor`.
        """
        ...

    def observe(self, emitted: Sequence[int], hidden: Floats) -> None:
        """The target's verdict of a round, whether or not this drafter drafted in it; first called after the prefill.

        Args:
            emitted: tokens that now follow: the accepted drafts and then the target's own token. The last one has no
                KV in the engine yet.
            hidden: float32[n, H], the target's hidden states from which it chose them; they hold until the next
                forward.
        """
        ...


__all__ = ["ROOT", "Draft", "Drafter", "Forecast"]
