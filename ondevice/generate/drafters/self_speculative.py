"""Self-speculation: drafters that run a part of the target itself, token by token.

`SkippingDrafter` (`self`) leaves out the sub-layers that `ondevice tune` found dispensable: Draft & Verify (Zhang et
al., ACL 2024, arXiv 2309.08168). `SwiftDrafter` (`swift`) finds them while it generates: SWIFT (Xia et al., ICLR 2025,
arXiv 2410.06916). `EarlyExitDrafter` (`early-exit`) leaves after a lower layer, with a head trained for that: AdaDecode
(Wei et al., ICML 2025, arXiv 2506.03700, first called ParaDecode). The search of the first two is in `skip_search`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from time import perf_counter
from typing import NamedTuple

from ondevice.arrays import Float32Array, Int64Array
from ondevice.engines.layer_path import LayerPath, PathMemory, SkipRecord, free_sub_layers, path_of
from ondevice.engines.protocol import Engine, Outputs, Rows, Session, TokenTree
from ondevice.generate.costs import Costs
from ondevice.generate.drafters.acceptance import PositionAcceptance
from ondevice.generate.drafters.protocol import Draft, DraftRequest, Forecast
from ondevice.generate.drafters.skip_search import SkipSample, SkipSearch, costs_of, survival_on
from ondevice.generate.drafters.trees import GuessedTree, TreeDrafter
from ondevice.generate.request import Limits
from ondevice.generate.sampling.sampler import Guess

START = 0.7
"""Prior probability that a drafted token is accepted."""


class NextLogits(NamedTuple):
    """Logits for the token that follows.

    logits : float32[C]
    candidates : int64[C], their token ids; None for the whole vocabulary, in order
    """

    logits: Float32Array
    candidates: Int64Array | None = None


class PartialDrafter(TreeDrafter, ABC):
    """Drafts a chain from `scores`, drawing with the target's noise (`Sampler.guess`).

    Drafted rows are pending rows of the target's own session, which the verification overwrites or reuses.
    """

    def __init__(self, name: str, vocab_size: int, start: float = START) -> None:
        super().__init__(vocab_size, acceptance=PositionAcceptance(start))
        self.name = name
        self._limits: Limits | None = None

    @abstractmethod
    def scores(self, session: Session, tokens: Sequence[int]) -> NextLogits | None:
        """The logits after the last of these tokens, which begin with the newest one; None if they are not valid."""

    def ready(self) -> bool:
        """Whether it can draft at present."""
        return True

    def expect(self, limits: Limits) -> None:
        self._limits = limits

    def rest(self) -> None:
        self._limits = self._session = None

    def forecast(self, nodes: int) -> Forecast:
        return Forecast(self._acceptance.survival(nodes if self.ready() else 0), self.name)

    def draft(self, request: DraftRequest) -> Draft:
        session, newest = self._session, self._newest
        if newest is None or session is None or not self.ready():
            return Draft.empty()

        def guess(tree: GuessedTree, node: int) -> list[Guess]:
            if self._limits is not None and self._limits.cancelled():
                return []
            path = tree.paths[node]
            scores = self.scores(session, [newest, *path])
            if scores is None:
                return []
            return request.sampler.guess(scores.logits, scores.candidates, request.context, path)

        return self._grow(request, guess, step_runs=True).draft(self.name)


class SkippingDrafter(PartialDrafter):
    """Drafts with some of the target's sub-layers left out.

    Attributes:
        path: the layers that drafted rows pass; None where no path is known to pay.
    """

    def __init__(self, name: str, engine: Engine, path: LayerPath | None, start: float = START) -> None:
        """
        Args:
            name: name of the drafter.
            engine: runs the sequences; must have partial forwards.
            path: see the attribute.
            start: prior probability that a drafted token is accepted.
        """
        super().__init__(name, engine.target.vocab_size, start)
        self._engine = engine
        self.path = path

    def ready(self) -> bool:
        return self.path is not None

    def scores(self, session: Session, tokens: Sequence[int]) -> NextLogits:
        assert self.path is not None
        rows = Rows(session, TokenTree.chain(tokens), [len(tokens) - 1], self.path)
        return NextLogits(self._engine.forward([rows])[0].logits[0])


# swift.


SAMPLE_TOKENS = 32
"""Generated tokens on which a set of sub-layers is tested; the paper's default."""

SAMPLE_AGE = 256
"""Tokens after which newer ones are taken as the sample."""

SEARCH_SHARE = 0.02
"""Share of the time of generating that the search may take, whatever it finds; half of that as a part of `auto`."""

REPEATS = 3
"""Timings of a path, of which the median is used. Few, because the reply waits meanwhile."""

MIN_SPEED_UP = 1.02
"""Predicted speed-up over plain decoding from which a set of sub-layers is used for drafts."""


class SwiftDrafter(SkippingDrafter):
    """Drafts with sub-layers left out, and searches for the best set of them while it generates.

    Between rounds it compares drafts with the text that was just generated, one set of sub-layers at a time, as long as
    its share of the time and its limit in seconds allow. The objective is that of `ondevice tune`: tokens per second as
    predicted from measured costs. (The paper maximises agreement for a fixed share of skipped layers.)

    The best set and everything tried are kept in the cache directory for the next process. The search ends when no
    better set is in reach. The emitted tokens depend on none of it.

    Attributes:
        searched_s: seconds that the search has taken.
    """

    def __init__(self, engine: Engine, costs: Costs, share: float = SEARCH_SHARE) -> None:
        """
        Args:
            engine: runs the sequences; must have partial forwards.
            costs: updated with the expected cost of a drafted token.
            share: share of the time of generating that the search may take.
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
        """When the current stretch of generating began."""
        self._step_s = 0.0
        """Seconds of the last step of the search."""
        self._sample: SkipSample | None = None
        self._new = 0
        """Tokens generated since the sample was taken."""
        self._search: SkipSearch | None = None
        self._timings: list[float] = []
        """The timings made so far that the search needs: see `SkipSample.timings`."""
        self._untimed: Iterator[Callable[[], float]] | None = None
        """The timings still to be made."""
        self._finished = self._record.finished or not self._free
        self._adopt(self._record)

    def begin(self, prompt_ids: Sequence[int], session: Session) -> None:
        super().begin(prompt_ids, session)
        latest = self._memory.read(self._memory.swift_files)
        if latest is not None and latest.speed_up > self._record.speed_up:  # found by another drafter meanwhile
            self._record = latest
            self._adopt(latest)
        self._since = perf_counter()

    def rest(self) -> None:
        """The generation has ended: save what was found."""
        super().rest()
        self._save()

    def forget(self) -> None:
        super().forget()
        self._drop_sample()

    def observe(self, emitted: Sequence[int], outputs: Outputs, path: Sequence[int]) -> None:
        super().observe(emitted, outputs, path)
        now = perf_counter()
        self._generated_s += now - self._since
        self._new += len(emitted)
        if not self._finished and self._may_search() and self._session is not None:
            self._search_step(self._session)
            self._step_s = perf_counter() - now
            self.searched_s += self._step_s
        self._since = perf_counter()

    def _may_search(self) -> bool:
        spent = self.searched_s + self._step_s
        return spent <= self._share * self._generated_s and spent < self._memory.swift_seconds

    def _search_step(self, session: Session) -> None:
        """One step of the search, a few forwards at most."""
        if self._sample is None or self._new >= SAMPLE_AGE:
            self._take_sample(session)
        elif self._search is None:
            self._measure(self._sample)
        elif (skips := self._search.propose()) is None:
            self._finished = True
            self._save()
        else:
            before = self._search.best
            self._search.learn(skips, survival_on([self._sample], skips))
            if self._search.best != before:
                self._adopt(self._search.record())

    def _take_sample(self, session: Session) -> None:
        """Take the last SAMPLE_TOKENS tokens, with a copy of the session up to them."""
        self._drop_sample()
        length = session.length - SAMPLE_TOKENS
        if length <= 0:
            return
        tokens = list(session.tokens[length:])
        if min(tokens) < 0:  # soft tokens, whose embeddings are not kept
            return
        fork = session.fork(length)
        if fork.length == length:
            self._sample, self._new = SkipSample(self._engine, fork, tokens), 0
        else:  # a sliding cache no longer holds the rows that this needs
            fork.close()

    def _measure(self, sample: SkipSample) -> None:
        """Make the next timing; after the last one, create the search."""
        if self._untimed is None:
            self._untimed = sample.timings(self._free, REPEATS)
        if (timing := next(self._untimed, None)) is not None:
            self._timings.append(timing())
            return
        free = free_sub_layers(self._engine.target)
        self._search = SkipSearch(free, costs_of(self._timings, self._free), self._record.tried)

    def _adopt(self, record: SkipRecord) -> None:
        """Leave out the sub-layers of a record from now on, if that is expected to pay."""
        path = path_of(record.skips) if record.speed_up > MIN_SPEED_UP else None
        if path != self.path:
            self.path = path
            self._acceptance = PositionAcceptance(record.survival[0] if record.survival else 0.0)
            self._costs.assume(self.name, record.draft_share)

    def _save(self) -> None:
        """Write what was found to the cache directory, unless nothing is new."""
        if self._search is None:
            return
        record, known = self._search.record(), self._record
        if (record.skips, len(record.tried), record.finished) == (known.skips, len(known.tried), known.finished):
            return
        self._record = record
        self._memory.keep(self._memory.swift_files, record)

    def _drop_sample(self) -> None:
        sample, self._sample, self._untimed, self._timings = self._sample, None, None, []
        if sample is not None:
            sample.close()


# early-exit.


ExitHead = Callable[[Session, Float32Array], NextLogits]
"""The logits after a row, from its residual stream, float32[H]. The session is for heads whose buffers are there."""


def trained_head(session: Session, hidden: Float32Array) -> NextLogits:
    """The exit head of the bundle."""
    answer = session.propose("exit", hidden)
    return NextLogits(answer.logits[0], answer.candidates[0])


class EarlyExitDrafter(PartialDrafter):
    """Drafts with the layers below a trained exit head.

    A drafted token costs the layers below the head. The verification reuses their results for all drafted tokens
    (`Rows.path`) and runs only the layers above, for all tokens in one forward. So each token passes each layer once,
    and the upper layers, mostly the larger part, for all tokens of the round together.

    Where layers share keys and values and the head comes after the last layer that has its own, drafted rows write
    everything that the caches hold. Elsewhere the verification writes the keys and values of the layers above.
    """

    def __init__(self, engine: Engine, stop: int, head: ExitHead = trained_head) -> None:
        """
        Args:
            engine: runs the sequences; must have partial forwards.
            stop: the first layer above the head.
            head: reads the residual stream before that layer.
        """
        super().__init__("early-exit", engine.target.vocab_size)
        self._engine = engine
        self._path = LayerPath(stop=stop)
        self._head = head

    def scores(self, session: Session, tokens: Sequence[int]) -> NextLogits | None:
        rows = Rows(session, TokenTree.chain(tokens), [len(tokens) - 1], self._path)
        found = self._head(session, self._engine.forward([rows])[0].hidden[0])
        ids = found.candidates
        if ids is not None and not 0 <= ids.min() <= ids.max() < self._vocab_size:
            return None  # a damaged head may cost speed, but no reply
        return found
