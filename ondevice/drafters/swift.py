"""The target drafts for itself, without sub-layers that it finds dispensable while it generates: SWIFT (Xia et al.,
ICLR 2025, arXiv 2410.06916).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from time import perf_counter

from ondevice import machine
from ondevice.decoding.costs import Costs
from ondevice.drafters.acceptance import PositionAcceptance
from ondevice.drafters.self_draft import SkippingDrafter
from ondevice.drafters.skip_sample import SkipSample, costs_of, survival_on
from ondevice.drafters.skip_search import SkipSearch
from ondevice.engines.path_memory import PathMemory, SkipRecord, free_sub_layers, path_of
from ondevice.engines.protocol import Engine, Outputs, Session

SAMPLE = 32
"""Generated tokens that a set of sub-layers is judged by: the paper's default."""

RENEWED = 256
"""Tokens after which they are newer ones."""

SHARE = 0.02
"""Of the time of generating, what searching may take, whatever it finds; beside other drafters half of that."""

REPEATS = 3
"""Timings of a path of which the median counts: few, for the reply waits meanwhile."""

GAIN = 1.02
"""What a set must promise over plain decoding to be drafted with."""


class SwiftDrafter(SkippingDrafter):
    """Between rounds it compares drafts with the text that was just generated, one set of sub-layers at a time, as long
    as its share of the time and its seconds in all allow. The objective is that of `ondevice tune`: tokens per second
    as predicted from measured costs, where the paper takes the most agreement with a fixed share of layers skipped.

    What was found, and all that was tried, stays in the cache directory for the next process. The search ends where
    nothing better is in reach. Which tokens come out depends on none of it.

    Attributes:
        searched_s: seconds that the search has taken.
    """

    def __init__(self, engine: Engine, costs: Costs, share: float = SHARE) -> None:
        """
        Args:
            engine: of the sequences; one that has partial forwards.
            costs: told what a token is expected to take.
            share: of the time of generating, for the search.
        """
        memory = engine.paths
        assert memory is not None
        self._memory: PathMemory = memory
        self._record = memory.read(memory.swift_files) or SkipRecord()
        super().__init__("swift", engine, None)
        self._costs = costs
        self._share = share
        self._free = frozenset(free_sub_layers(engine.target))
        self.searched_s = 0.0
        self._generated_s = 0.0
        self._since = 0.0
        self._unit_s = 0.0
        """Seconds of the last piece of work."""
        self._sample: SkipSample | None = None
        self._new = 0
        """Tokens since the sample was taken."""
        self._search: SkipSearch | None = None
        self._timings: list[float] = []
        self._untimed: Iterator[Callable[[], float]] | None = None
        self._finished = self._record.finished or not self._free
        self._adopt(self._record)

    def begin(self, prompt_ids: Sequence[int], session: Session) -> None:
        super().begin(prompt_ids, session)
        latest = self._memory.read(self._memory.swift_files)
        if latest is not None and latest.speed_up > self._record.speed_up:  # that another one has found meanwhile
            self._record = latest
            self._adopt(latest)
        self._since = perf_counter()

    def rest(self) -> None:
        """The generation has ended: what was found is kept."""
        super().rest()
        self._keep()

    def forget(self) -> None:
        super().forget()
        self._drop_sample()

    def observe(self, emitted: Sequence[int], outputs: Outputs, path: Sequence[int]) -> None:
        super().observe(emitted, outputs, path)
        now = perf_counter()
        self._generated_s += now - self._since
        self._new += len(emitted)
        if not self._finished and self._may_search() and self._session is not None:
            self._work(self._session)
            self._unit_s = perf_counter() - now
            self.searched_s += self._unit_s
        self._since = perf_counter()

    def _may_search(self) -> bool:
        spent = self.searched_s + self._unit_s
        return spent <= self._share * self._generated_s and spent < self._memory.swift_seconds

    def _work(self, session: Session) -> None:
        """One piece of it, of a few forwards at most."""
        if self._sample is None or self._new >= RENEWED:
            self._take_sample(session)
        elif self._search is None:
            self._measure(self._sample)
        elif (skips := self._search.propose()) is None:
            self._finished = True
            self._keep()
        else:
            before = self._search.best
            self._search.learn(skips, survival_on([self._sample], skips))
            if self._search.best != before:
                self._adopt(self._found(self._search))

    def _take_sample(self, session: Session) -> None:
        self._drop_sample()
        length = session.length - SAMPLE
        if length <= 0:
            return
        tokens = list(session.tokens[length:])
        fork = session.fork(length)
        if fork.length == length:
            self._sample, self._new = SkipSample(self._engine, fork, tokens), 0
        else:  # a sliding cache has lost the rows that this would need
            fork.close()

    def _measure(self, sample: SkipSample) -> None:
        """One of the timings; after the last, the search begins."""
        if self._untimed is None:
            self._untimed = sample.timings(self._free, REPEATS)
        if (timing := next(self._untimed, None)) is not None:
            self._timings.append(timing())
            return
        free = free_sub_layers(self._engine.target)
        self._search = SkipSearch(free, costs_of(self._timings, self._free), self._record.tried)

    def _found(self, search: SkipSearch) -> SkipRecord:
        best = search.best
        name = machine.processor_name()
        return SkipRecord(best, search.speed_up(best), search.token(best), name, dict(search.tried), self._finished)

    def _adopt(self, record: SkipRecord) -> None:
        """Draft without these from now on, where that is expected to pay."""
        path = path_of(record.skips) if record.speed_up > GAIN else None
        if path != self.path:
            self.path = path
            self._acceptance = PositionAcceptance(record.survival[0] if record.survival else 0.0)
            self._costs.assume(self.name, record.draft_share)

    def _keep(self) -> None:
        if self._search is None:
            return
        record = self._found(self._search)
        if (record.skips, len(record.tried)) == (self._record.skips, len(self._record.tried)) and not self._finished:
            return
        self._record = record
        self._memory.keep(self._memory.swift_files, record)

    def _drop_sample(self) -> None:
        sample, self._sample, self._untimed = self._sample, None, None
        self._timings = self._timings if self._search is not None else []
        if sample is not None:
            sample.close()
