"""What limits the tokens of a reply: a grammar, as the loop sees it. Token ids only."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Mask = NDArray[np.uint32]
"""uint32[at least V / 32]: bit t % 32 of word t // 32 says whether token t is allowed; beyond the words none is."""


class Constraint(Protocol):
    """The tokens that may follow, in one reply. What it says depends on the tokens before, and on nothing else: not on
    what was asked earlier, nor on how drafts divide a reply into rounds.

    A `path` is what follows the tokens that were taken so far; behind the end of the reply everything is allowed.

    Attributes:
        position: tokens of the text that were taken, those of the prompt included.
        finished: the reply is complete: no token may follow.
    """

    position: int

    @property
    def finished(self) -> bool: ...

    def allows(self, path: Sequence[int]) -> bool:
        """Whether the reply may go on like this."""
        ...

    def forced(self, path: Sequence[int]) -> int | None:
        """The only token that may follow `path`; None where there are several, or it takes a mask to know."""
        ...

    def mask(self, path: Sequence[int]) -> Mask:
        """All tokens that may follow `path`, none where it is not allowed; valid until the next call."""
        ...

    def take(self, tokens: Sequence[int]) -> int:
        """These are said: how many of them belong to the reply, which may end before the last one."""
        ...
