"""Rounds as the loop records them, of a sequence that is alone."""

from __future__ import annotations

from ondevice.generate.stats import ForwardCost, Round


def decoded(rows: int, seconds: float, accepted: int = 0, draft_seconds: float = 0.0, source: str = "dice") -> Round:
    """A round with a chain of `rows - 1` drafts that took `seconds`, those of drafting included."""
    return Round(
        (0,) * (accepted + 1),
        drafted=rows - 1,
        accepted=accepted,
        depth=rows - 1,
        source=source,
        rows=rows,
        seconds=seconds,
        draft_seconds=draft_seconds,
        forward=ForwardCost(rows, rows, seconds - draft_seconds),
    )
