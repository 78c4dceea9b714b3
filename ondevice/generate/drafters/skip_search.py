"""The search for sub-layers that drafts of the target itself leave out, so that drafting is fastest on this machine.

`SkipSearch` proposes sets of sub-layers. `SkipSample` tests a set on some text of the target, and measures the costs
that the search needs (`costs_of`). `ondevice tune` and the `swift` drafter drive both.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from statistics import median
from time import perf_counter

from ondevice import machine
from ondevice.engines.layer_path import (
    MAX_RECORDED,
    WHOLE,
    LayerPath,
    SkipRecord,
    Skips,
    SubLayer,
    Survival,
    path_of,
)
from ondevice.engines.protocol import Engine, Rows, Session, TokenTree

PREFIXES = 8
"""The sub-layers that matter least are left out together in this many sizes, from all of them to one eighth."""

RESTARTS = 8
"""Number of restarts of the search, each from the best set with a fifth of the choices inverted."""

MIN_TOKEN_COST = 0.01
"""Lower bound on the cost of a drafted token, as a share of a plain one, against errors of measurement."""


@dataclass(frozen=True)
class SkipCosts:
    """Times measured on this machine, as shares of a plain forward of one row.

    rows : whole forwards of 1, 2, ... rows; the first is 1
    attention, mlp : saved by leaving one block of that kind out of a drafted token
    """

    rows: Sequence[float]
    attention: float
    mlp: float

    def token(self, skips: Skips) -> float:
        """Cost of a drafted token without these sub-layers. For an empty set it is 1."""
        return max(1.0 - sum(self.attention if kind == "attention" else self.mlp for kind, _ in skips), MIN_TOKEN_COST)

    def speed_up(self, survival: Survival, token: float) -> float:
        """Predicted tokens per second relative to plain decoding, at the best draft length."""
        expected = accumulate(survival, initial=1.0)
        next(expected)
        rates = [
            tokens / (self.rows[min(count, len(self.rows) - 1)] + count * token)
            for count, tokens in enumerate(expected, 1)
        ]
        return max(rates, default=0.0)


class SkipSearch:
    """Proposes sets of sub-layers to leave out, and learns from their measured acceptance.

    In order: each sub-layer alone; the sub-layers together that matter least for the time they take, in PREFIXES sizes;
    the best set with one choice inverted, repeated while that improves it; and such walks from RESTARTS nearby sets.

    The papers search with Gaussian processes over all choices, for 1,000 measurements (Draft & Verify), or at random
    with such a process now and then (SWIFT). Fitting one takes time that grows with the cube of the measurements, at
    every step, and the first thing it learns is the effect of each sub-layer alone, which is measured here.

    Attributes:
        tried: survival by set, for all sets measured.
        best: the set with the highest predicted speed-up, whether it pays or not; empty before the first measurement.
            The empty set, whose drafts are whole forwards, cannot pay and is not measured.
    """

    def __init__(
        self, free: Sequence[SubLayer], costs: SkipCosts, tried: Mapping[Skips, Survival] | None = None
    ) -> None:
        """
        Args:
            free: the sub-layers that may be left out.
            costs: costs measured on this machine.
            tried: sets measured by an earlier search.
        """
        self._free = list(free)
        self.costs = costs
        self.tried = {skips: survival for skips, survival in (tried or {}).items() if skips}
        self.best: Skips = max(self.tried, key=self.speed_up, default=frozenset())
        self._restarts = self._starts()
        self._start: Skips | None = None

    def token(self, skips: Skips) -> float:
        """Cost of a drafted token without these sub-layers, as a share of a plain one."""
        return self.costs.token(skips)

    def speed_up(self, skips: Skips) -> float:
        """Predicted speed-up of a set over plain decoding; 0.0 if it was not tried."""
        return self.costs.speed_up(self.tried.get(skips, ()), self.token(skips))

    def record(self) -> SkipRecord:
        """The result so far."""
        best, finished, name = self.best, self.propose() is None, machine.processor_name()
        return SkipRecord(best, self.speed_up(best), self.token(best), name, dict(self.tried), finished)

    def propose(self) -> Skips | None:
        """The set to measure next, the same until it is learnt; None where no better set is in reach."""
        for skips in self._planned():
            if skips not in self.tried:
                return skips
        while True:
            if self._start is not None and self._start not in self.tried:
                return self._start
            centre = self.best if self._start is None else self._start
            for skips in self._neighbours(centre):
                if skips not in self.tried:
                    return skips
            if (start := next(self._restarts, None)) is None:
                return None
            self._start = start

    def learn(self, skips: Skips, survival: Survival) -> None:
        """Record the survival measured for a set."""
        self.tried[skips] = survival
        if self._start is not None and self.speed_up(skips) > self.speed_up(self._start):
            self._start = skips
        if self.speed_up(skips) >= self.speed_up(self.best):
            self.best = skips

    def _planned(self) -> Iterator[Skips]:
        singles = [frozenset({sub}) for sub in self._free]
        yield from singles
        if all(single in self.tried for single in singles):
            ranked = sorted(self._free, key=self._importance)
            for part in range(PREFIXES, 0, -1):
                yield frozenset(ranked[: -(-len(ranked) * part // PREFIXES)])

    def _importance(self, sub: SubLayer) -> float:
        """How much a sub-layer matters: share of wrong tokens without it, per time that it takes."""
        share = self.costs.attention if sub[0] == "attention" else self.costs.mlp
        return (1.0 - self.tried[frozenset({sub})][0] + 1e-3) / max(share, 1e-9)

    def _neighbours(self, skips: Skips) -> Iterator[Skips]:
        """The sets with one choice inverted, in a random order."""
        order = list(self._free)
        random.Random(len(skips)).shuffle(order)
        return (inverted for sub in order if (inverted := skips ^ {sub}))

    def _starts(self) -> Iterator[Skips]:
        for seed in range(RESTARTS):
            inverted = random.Random(seed).sample(self._free, max(2, len(self._free) // 5))
            if start := self.best ^ frozenset(inverted):
                yield start


def survival_of(matched: Sequence[Sequence[bool]]) -> Survival:
    """The probability of 1, 2, ... right tokens in a row. `matched`: by text, at which positions a draft was right."""
    found = [1.0]
    for count in range(1, MAX_RECORDED + 1):
        begins = [all(text[at : at + count]) for text in matched for at in range(len(text) - count + 1)]
        if not begins:
            break
        found.append(min(found[-1], sum(begins) / len(begins)))
    return tuple(found[1:])


# Measuring a set of sub-layers.


ROWS = 5
"""Rows of the larger of two forwards that are timed; a line through both gives the costs of other numbers of rows."""


class SkipSample:
    """A text on which drafts are compared with the target: some tokens after a session's committed ones, and the token
    that the whole target finds likeliest after each of them.

    A path is run over all of the tokens in one forward. Where layers share caches, the result at each position is
    exactly that of a draft there. Elsewhere it is an approximation: in a draft only the drafted tokens' keys and values
    come from the path, here those of all tokens do.
    """

    def __init__(self, engine: Engine, session: Session, tokens: Sequence[int]) -> None:
        """
        Args:
            engine: the session's engine.
            session: used by this sample only; nothing is committed to it.
            tokens: 1 to `session.max_rows()` tokens.
        """
        self._engine, self._session = engine, session
        self._tree = TokenTree.chain(list(tokens))
        self._expected = self._likeliest(WHOLE)

    def matches(self, skips: Skips) -> list[bool]:
        """By position, whether a draft without these sub-layers would be right."""
        found = self._likeliest(path_of(skips))
        return [one == other for one, other in zip(found, self._expected, strict=True)]

    def timings(self, free: Skips, repeats: int) -> Iterator[Callable[[], float]]:
        """Four functions that each run 2 * (repeats + 1) forwards and return a time as a share of a plain one-row
        forward: of a whole forward of ROWS rows, and of drafts of a token without any of `free`, without its attention
        blocks, and without its feed-forward blocks. `costs_of` takes the four results.
        """
        attention = frozenset(sub for sub in free if sub[0] == "attention")
        for rows, path in (
            (ROWS, WHOLE),
            (1, path_of(free)),
            (1, path_of(attention)),
            (1, path_of(free - attention)),
        ):
            yield lambda rows=rows, path=path: self._share(rows, path, repeats)  # type: ignore[misc]

    def close(self) -> None:
        """Close the session."""
        self._session.close()

    def _share(self, rows: int, path: LayerPath, repeats: int) -> float:
        """The median of several ratios, each to the plain forward just before it: the machine's speed varies."""
        token = int(self._tree.tokens[0])
        other = TokenTree.chain([int(token == 0)])  # another token, so that neither forward reuses results of the other
        tree = TokenTree.chain([token] * rows)
        shares = []
        for _ in range(repeats + 1):
            started = perf_counter()
            self._engine.forward([Rows(self._session, other, [0])])
            between = perf_counter()
            self._engine.forward([Rows(self._session, tree, range(rows), path)])
            shares.append((perf_counter() - between) / (between - started))
        return median(shares[1:])  # the first one includes the planning of the path

    def _likeliest(self, path: LayerPath) -> list[int]:
        rows = Rows(self._session, self._tree, range(len(self._tree)), path)
        (outputs,) = self._engine.forward([rows])
        found: list[int] = outputs.logits.argmax(axis=1).tolist()
        return found


def costs_of(timings: Sequence[float], free: Skips) -> SkipCosts:
    """The costs that follow from the four results of `SkipSample.timings`."""
    several, without_all, *without = timings
    row = max(several - 1.0, 0.0) / (ROWS - 1)
    saved = max(1.0 - without_all, 0.0)
    attention, mlp = (max(1.0 - share, 0.0) for share in without)
    each = saved / ((attention + mlp) or 1.0) / (len(free) / 2)  # in proportion to what each kind saves alone
    return SkipCosts([1.0 + row * extra for extra in range(MAX_RECORDED + 1)], each * attention, each * mlp)


def survival_on(samples: Sequence[SkipSample], skips: Skips) -> Survival:
    """The survival of drafts without these sub-layers, measured on some samples."""
    return survival_of([sample.matches(skips) for sample in samples])
