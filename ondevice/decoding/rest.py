"""When a drafter is not even asked: by the clock, asking costs more than its drafts bring."""

from __future__ import annotations

ASKED = 4
"""Rounds in which it was asked before that is judged: one may be an accident."""

KEEP = 0.9
"""Weight of what was seen before after a round more: remembers about 10."""

LONG_KEEP = 0.99
"""The same for whether it is worth asking at all: remembers about 100."""

DEAR = 0.02
"""Of a plain round, what asking must take to be worth sparing: 0.1 ms are nothing beside a forward of 50 ms."""

LOSS = 0.01
"""Of all time, what asking may lose: that long is the rest after a loss."""

FIRST = 32
"""Rounds of a rest at most while asking has gained in the long run: the text may soon repeat itself again."""

MOST = 256
"""Rounds of a rest at most where it has not, after one loss upon the other. Only models with rounds of a few hundred
microseconds ever rest, so that is a tenth of a second."""

ACCIDENT = 2.0
"""Times as long as it should take: no round counts for more, for another program may have had the core."""


class Rest:
    """One drafter's. A schedule weighs rows and draft steps against tokens, and leaves out the Python around them. That
    is a thousandth of E2B's round and a third of a small model's, where a draft that just pays by rows loses by the
    clock. So whole rounds in which the drafter was asked are compared with plain ones.
    """

    def __init__(self) -> None:
        self._left = self._asked = 0
        self._longest = FIRST
        self._gain = self._asking = self._weight = 0.0
        self._balance = 0.0
        """Plain rounds that asking has saved in the long run."""

    def begins(self) -> bool:
        """A round begins: whether it is one of rest."""
        if not self._left:
            return False
        self._left -= 1
        return True

    def observe(self, tokens: int, seconds: float, asking: float, plain: float) -> None:
        """Learn from a round in which the drafter was asked.

        Args:
            tokens: that it brought.
            seconds: that all of it took.
            asking: the share of these, in seconds, that a plain round does not have, but for drafting.
            plain: seconds of a plain round.
        """
        usual = tokens * plain
        gain = usual - min(seconds, ACCIDENT * usual)
        self._gain = KEEP * self._gain + gain
        self._balance = LONG_KEEP * self._balance + gain / plain
        self._asking = KEEP * self._asking + asking / plain
        self._weight = KEEP * self._weight + 1.0
        self._asked += 1
        if self._asked >= ASKED and self._gain < 0 and self._asking > DEAR * self._weight:
            self._longest = FIRST if self._balance >= 0 else min(2 * self._longest, MOST)
            self._left = min(round(-self._gain / (LOSS * plain)), self._longest)
            self._asked = 0
            self._gain = self._asking = self._weight = 0.0
