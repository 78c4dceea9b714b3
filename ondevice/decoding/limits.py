"""How far a generation may go."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ondevice.progress import Progress, silent


@dataclass(frozen=True)
class Limits:
    """When a generation ends, and who is asked and told on the way.

    cancelled : asked before every forward
    on_prefill : told after every chunk of the prefill how many of the prompt's tokens are done, and how many there are
    """

    max_new_tokens: int
    stop_ids: frozenset[int] = frozenset()
    cancelled: Callable[[], bool] = lambda: False
    on_prefill: Progress = silent
