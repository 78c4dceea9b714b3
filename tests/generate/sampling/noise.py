"""The noise of the draws, token by token."""

from __future__ import annotations

from ondevice.generate.sampling.gumbel import Key, gumbel, hashed
from ondevice.native.functions import kernel


@kernel
def gumbel_at(key: Key, position: int, token: int) -> float:
    """The noise of a token at a position."""
    return gumbel(hashed(hashed(key[0], position), token))
