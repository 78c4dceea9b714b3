"""The last few measurements of one thing."""

from __future__ import annotations

from collections import deque
from statistics import median_low

WINDOW = 9
"""Measurements remembered. Their median shrugs off up to four slow ones and follows a growing context."""

STALE = 512
"""Rounds after which what was not measured is forgotten: the machine may have been busy at the time."""

UNCONFIRMED = 64
"""Rounds after which a recalled cost that was not measured here is forgotten: one that is far too high would see to it
that no such draft is made, and so never be corrected."""

RECALLED = 3
"""Measurements that one from another process is worth."""

CERTAIN = 4
"""Measurements behind a cost that is written down: a median of fewer may be a neighbour's burst."""

CHANGE = 1.2
"""Times as long, or as short, as was expected: then the machine has changed, and what is new is written down."""


class Recent:
    """The first of the measurements may be recalled from another process.

    round : of the latest one
    """

    def __init__(self, recalled: float | None = None) -> None:
        self.round = 0 if recalled is None else UNCONFIRMED - STALE
        self.median = recalled or 0.0
        self._recalled = recalled
        self._seconds: deque[float] = deque([] if recalled is None else [recalled], maxlen=WINDOW)

    @property
    def measured(self) -> int:
        """How many measurements this has of its own."""
        return len(self._seconds) - (self._recalled is not None)

    @property
    def certain(self) -> bool:
        """Whether another process may go by it."""
        return self._recalled is not None or len(self._seconds) >= CERTAIN

    @property
    def contradicts(self) -> bool:
        """Whether what was measured since is something else than what was recalled."""
        return self._recalled is not None and far(self.median, self._recalled)

    @property
    def weight(self) -> int:
        """How many measurements this stands for."""
        return len(self._seconds) + (0 if self._recalled is None else RECALLED - 1)

    def add(self, seconds: float, this_round: int) -> bool:
        """Whether this changed anything."""
        before = len(self._seconds), self.median
        self.round = this_round
        self._seconds.append(seconds)
        if len(self._seconds) == WINDOW:
            self._recalled = None
        # The lower one of two: what disturbs a measurement makes it longer.
        self.median = median_low(self._seconds)
        return (len(self._seconds), self.median) != before

    def change(self, factor: float, newest: int) -> None:
        """Keep the newest measurements; where there are none, recall what is known, times a factor."""
        if not newest:
            self._recalled = self.median * factor
            self._seconds.clear()
            self._seconds.append(self._recalled)
        elif newest < len(self._seconds):
            self._recalled = None
            kept = list(self._seconds)[-newest:]
            self._seconds.clear()
            self._seconds.extend(kept)
        self.median = median_low(self._seconds)

    def drop_recalled(self) -> bool:
        """Forget what was recalled; whether anything is left."""
        if self._recalled is not None:
            if self._recalled in self._seconds:
                self._seconds.remove(self._recalled)
            self._recalled = None
            self.median = median_low(self._seconds) if self._seconds else 0.0
        return bool(self._seconds)


def far(seconds: float, other: float) -> bool:
    """Whether the machine must have changed between the two."""
    return not 1.0 / CHANGE <= seconds / other <= CHANGE
