"""Types of progress callbacks. In a file of its own because every layer uses them, down to the engines."""

from __future__ import annotations

from collections.abc import Callable

Progress = Callable[[int, int], None]
"""Called repeatedly with the amount done and the total amount, in the same unit."""

OnPrepare = Callable[[str, float], None]
"""Called while a bundle is prepared for this machine, with the current stage and the share of all work that is done,
0 to 1, which never falls. An exception from it ends the preparation."""

Advance = Callable[[int], None]
"""Called with the amount done since the last call."""


def silent(done: int, total: int) -> None:
    """A `Progress` that ignores the calls."""


def counted(progress: Progress, total: int) -> Advance:
    """An `Advance` that adds up the amounts and calls `progress` with the sum, first with 0."""
    done = 0

    def advance(count: int) -> None:
        nonlocal done
        done += count
        progress(min(done, total), total)

    advance(0)
    return advance
