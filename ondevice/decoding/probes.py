"""When to try again what did not pay."""

from __future__ import annotations

import math

SHARE = 0.01
"""Share of the time that failing probes may cost."""

LEAST_INTERVAL = 8
"""Rounds between failing probes, where they cost so little that their share would allow more."""

CONVINCING = 1.0
"""Plain steps that probes must gain to start from scratch when they fail again."""


class Probes:
    """Ever rarer while they fail, at once again while they succeed.

    What probes gain is summed up, never below 0 (CUSUM, Page 1954): the sum soon leaves 0 once they gain on average,
    and keeps falling back to it while they lose on average, however often one succeeds.
    """

    def __init__(self) -> None:
        self._credit = 0.0
        self._interval = 1
        self._wait = 0

    def due(self) -> bool:
        """Count one round; whether it should probe."""
        self._wait -= 1
        return self._wait < 0

    def end(self) -> None:
        """Drafts pay again: what probes gained says nothing about the next time that they do not."""
        self._credit = 0.0

    def observe(self, gain: float, loss: float) -> None:
        """A probe's outcome.

        Args:
            gain: plain steps that it saved; negative where it cost some.
            loss: plain steps that a failing probe costs.
        """
        self._credit = min(max(self._credit + gain, 0.0), 2 * CONVINCING)
        if self._credit >= CONVINCING:
            self._interval = 1
        if self._credit:
            self._wait = 0
        else:
            self._interval = min(2 * self._interval, max(math.ceil(loss / SHARE), LEAST_INTERVAL))
            self._wait = self._interval
