"""Stop strings: text is held back while it could still become one."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable

from ondevice.errors import UsageError


class StopStrings:
    """Cuts a stream of text before the stop string that is complete first.

    Every `push` is one token's text. The outcome depends on the text alone, not on how tokens or drafted batches
    divide it: of several stop strings the one that ends first wins, and of those that end together the longest, as if
    the text came character by character.
    """

    def __init__(self, stops: str | Iterable[str] | None = ()) -> None:
        self._stops = (stops,) if isinstance(stops, str) else tuple(stops or ())
        for stop in self._stops:
            if not isinstance(stop, str) or not stop:
                raise UsageError(f"a stop string must be a non-empty string, not {stop!r}")
        self._held = ""
        self._given = 0
        self._ends: list[int] = []
        """Where each token's text ends in the whole text."""
        self.matched = False

    @property
    def final_tokens(self) -> int:
        """Tokens that belong to the reply for certain: whatever comes, their text is not part of a stop string.

        After a match these are all that the kept text needs, one that reaches beyond the cut included. The number
        depends on the tokens alone, not on how rounds divide them.
        """
        count = bisect_right(self._ends, self._given)
        reached = self._ends[count - 1] if count else 0
        return count + 1 if self.matched and reached < self._given else count

    def push(self, text: str) -> str:
        """The part of the text so far that is final now. After a match: nothing."""
        if self.matched:
            return ""
        self._ends.append(self._given + len(self._held) + len(text))
        return self._advance(text, last=False)

    def finish(self, text: str = "") -> str:
        """End the stream: take the last text, which no further token brought, and give up what was held back."""
        if self.matched:
            return ""
        if self._ends:
            self._ends[-1] += len(text)
        return self._advance(text, last=True)

    def _advance(self, text: str, *, last: bool) -> str:
        self._held += text
        cut = self._find()
        if cut is not None:
            self.matched = True
        elif last:
            cut = len(self._held)
        else:
            cut = len(self._held) - self._open_suffix()
        text, self._held = self._held[:cut], self._held[cut:]
        self._given += len(text)
        return text

    def _find(self) -> int | None:
        found = [(at + len(stop), at) for stop in self._stops if (at := self._held.find(stop)) >= 0]
        return min(found)[1] if found else None

    def _open_suffix(self) -> int:
        """Length of the longest end of the held text that is the beginning of a stop string."""
        longest = max((len(stop) for stop in self._stops), default=1) - 1
        for length in range(min(longest, len(self._held)), 0, -1):
            if any(stop.startswith(self._held[-length:]) for stop in self._stops):
                return length
        return 0
