"""How long work tells how far it is."""

from __future__ import annotations

from collections.abc import Callable

Progress = Callable[[int, int], None]
"""Called now and then with what is done and all there is to do, in the same unit."""

OnPrepare = Callable[[str, float], None]
"""Called while a bundle is prepared for this machine, with what is going on and the share of all that is done, 0 to 1,
which never falls. An exception that it raises ends the preparation."""

Advance = Callable[[int], None]
"""Called with what was done since the last time."""


def silent(done: int, total: int) -> None:
    """For those who need not know."""


def counted(progress: Progress, total: int) -> Advance:
    """Sums up for `progress`, which hears of the beginning too."""
    done = 0

    def advance(count: int) -> None:
        nonlocal done
        done += count
        progress(min(done, total), total)

    advance(0)
    return advance
