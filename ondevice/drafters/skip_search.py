"""Looks for sub-layers that a draft can do without: those with which it is expected to be fastest on this machine."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from ondevice.engines.path_memory import MOST_DRAFTED, Skips, SubLayer, Survival

PREFIXES = 8
"""Sizes, from all to an eighth, in which the sub-layers that are missed least are left out together."""

RESTARTS = 8
"""Sets with a fifth of the best one's choices turned round, from each of which the search goes on."""

LEAST = 0.01
"""A drafted token takes at least this share of a plain one, whatever the clock said."""


@dataclass(frozen=True)
class SkipCosts:
    """Shares of a plain forward of one row, as measured on this machine.

    rows : what whole forwards of 1, 2, ... rows take; the first is 1
    attention, mlp : what leaving one of those blocks out of a drafted token saves
    """

    rows: Sequence[float]
    attention: float
    mlp: float

    def token(self, skips: Skips) -> float:
        """What a drafted token without these takes. Without any it is a plain one, which cannot pay."""
        return max(1.0 - sum(self.attention if kind == "attention" else self.mlp for kind, _ in skips), LEAST)

    def speed_up(self, survival: Survival, token: float) -> float:
        """Times as many tokens per second as plain decoding, at the draft length that suits best."""
        expected = accumulate(survival, initial=1.0)
        next(expected)
        rates = [
            tokens / (self.rows[min(count, len(self.rows) - 1)] + count * token)
            for count, tokens in enumerate(expected, 1)
        ]
        return max(rates, default=0.0)


class SkipSearch:
    """Proposes sets of sub-layers and learns how they did.

    First each sub-layer alone; then, in the order of what is missed least for the time that it takes, more and more of
    them together; then the best set with one choice turned round, over and over while that helps; then such walks from
    sets nearby. The papers search with Gaussian processes over all choices, for 1,000 measurements (Draft & Verify), or
    at random with such a process now and then (SWIFT): fitting one takes time with the cube of the measurements, at
    every step, and what it learns first is what measuring each sub-layer alone tells.

    Attributes:
        tried: all that was measured.
        best: the set that is expected to be fastest, whether it pays or not.
    """

    def __init__(
        self, free: Sequence[SubLayer], costs: SkipCosts, tried: Mapping[Skips, Survival] | None = None
    ) -> None:
        """
        Args:
            free: what may be left out.
            costs: what each takes.
            tried: by a search before.
        """
        self._free = list(free)
        self.costs = costs
        self.tried = dict(tried or {})
        self.best: Skips = max(self.tried, key=self.speed_up, default=frozenset())
        self._restarts = self._starts()
        self._start: Skips | None = None

    @property
    def planned(self) -> int:
        """Sets that are measured at least."""
        return len(self._free) + PREFIXES

    def token(self, skips: Skips) -> float:
        """What a drafted token takes, as a share of a plain one."""
        return self.costs.token(skips)

    def speed_up(self, skips: Skips) -> float:
        """What a set that was tried is expected to come to; 0.0 for another."""
        return self.costs.speed_up(self.tried.get(skips, ()), self.token(skips))

    def propose(self) -> Skips | None:
        """What to measure next; None where nothing better is in reach."""
        for skips in self._planned():
            if skips not in self.tried:
                return skips
        while True:
            centre = self.best if self._start is None else self._start
            for skips in self._neighbours(centre):
                if skips not in self.tried:
                    return skips
            if (start := next(self._restarts, None)) is None:
                return None
            self._start = start
            if start not in self.tried:
                return start

    def learn(self, skips: Skips, survival: Survival) -> None:
        """How a set did."""
        self.tried[skips] = survival
        if self._start is not None and self.speed_up(skips) > self.speed_up(self._start):
            self._start = skips
        if self.speed_up(skips) >= self.speed_up(self.best):
            self.best = skips

    def _planned(self) -> Iterator[Skips]:
        singles = [frozenset({sub}) for sub in self._free]
        yield from singles
        if all(single in self.tried for single in singles):
            ranked = sorted(self._free, key=self._missed)
            for part in range(PREFIXES, 0, -1):
                yield frozenset(ranked[: -(-len(ranked) * part // PREFIXES)])

    def _missed(self, sub: SubLayer) -> float:
        """Tokens that are wrong without it, for what it takes."""
        share = self.costs.attention if sub[0] == "attention" else self.costs.mlp
        return (1.0 - self.tried[frozenset({sub})][0] + 1e-3) / max(share, 1e-9)

    def _neighbours(self, skips: Skips) -> Iterator[Skips]:
        order = list(self._free)
        random.Random(len(skips)).shuffle(order)
        return (skips ^ {sub} for sub in order)

    def _starts(self) -> Iterator[Skips]:
        for seed in range(RESTARTS):
            turned = random.Random(seed).sample(self._free, max(2, len(self._free) // 5))
            yield self.best ^ frozenset(turned)


def survival_of(matched: Sequence[Sequence[bool]]) -> Survival:
    """From which places of some texts a draft was right, to the chances of 1, 2, ... right tokens in a row."""
    found = [1.0]
    for count in range(1, MOST_DRAFTED + 1):
        begins = [all(text[at : at + count]) for text in matched for at in range(len(text) - count + 1)]
        if not begins:
            break
        found.append(min(found[-1], sum(begins) / len(begins)))
    return tuple(found[1:])
