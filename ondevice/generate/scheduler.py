"""The scheduler: runs the generations of one engine, several at once.

`Scheduler.rounds` takes a `GenerationRequest`, waits for a slot in the `Batch`, takes a session with the prompt's
cached beginning from the `PrefixCache`, lends drafters and a controller, runs the loop, and takes everything back
afterwards. So each generation benefits from earlier ones: their cached sequences, and what drafters and costs have
learnt.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Generator, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from os import PathLike
from typing import Generic, TypeVar

from ondevice import machine
from ondevice.engines.protocol import Engine, Session
from ondevice.errors import UsageError
from ondevice.forks import ReentrantLock
from ondevice.generate import loop
from ondevice.generate.batch import Batch, Slot
from ondevice.generate.controller import Controller, make_controller
from ondevice.generate.costs import Costs, CostsFile, measure
from ondevice.generate.drafters import registry
from ondevice.generate.drafters.draft_model import DraftModel
from ondevice.generate.drafters.protocol import Drafter, Reader
from ondevice.generate.drafters.registry import RegisteredDrafter
from ondevice.generate.prefix_cache import PrefixCache
from ondevice.generate.request import Limits, SoftTokens
from ondevice.generate.sampling.sampler import Logprobs, Sampler
from ondevice.generate.stats import Round, Stats


@dataclass(frozen=True)
class Drafting:
    """How a generation drafts.

    drafter : an entry of the registry, an application's own drafter, or None for plain decoding
    schedule : name of the controller: see `make_controller`
    num_assistant_tokens : see `make_controller`
    """

    drafter: RegisteredDrafter | Drafter | None
    schedule: str
    num_assistant_tokens: int | None


@dataclass(frozen=True)
class GenerationRequest:
    """One generation, with everything checked.

    prompt_ids : the prompt
    sampler, limits, drafting : how to choose tokens, when to stop, how to draft
    stats : filled in while the generation runs
    logprobs : looks up emitted tokens; None where that is not wanted
    prompt_logprobs : looks up the prompt's tokens after the first one, so that no cached beginning is used; None where
        that is not wanted
    copies : copies of the prompt's session to leave in the cache after the prefill, for other generations of the same
        prompt
    soft : the prompt's soft tokens, ascending
    """

    prompt_ids: list[int]
    sampler: Sampler
    limits: Limits
    drafting: Drafting
    stats: Stats
    logprobs: Logprobs | None = None
    prompt_logprobs: Logprobs | None = None
    copies: int = 0
    soft: Sequence[SoftTokens] = ()


@dataclass(frozen=True, eq=False)
class Use:
    """The use of an application's own drafter by one generation, which holds this object."""

    drafter: Drafter


class Scheduler:
    """Runs generations on an engine. Safe to use from several threads."""

    def __init__(
        self, engine: Engine, max_sequences: int, cache_bytes: int, costs_file: CostsFile | None = None
    ) -> None:
        """
        Args:
            engine: closed with the scheduler.
            max_sequences: generations at the same time.
            cache_bytes: limit on the keys and values of finished sequences.
            costs_file: where costs are kept between processes; None keeps none.
        """
        self.engine = engine
        self.closed = False
        self.batch = Batch(engine, max_sequences)
        self._cache = PrefixCache(engine, cache_bytes)
        self._costs = Costs(engine.experts)
        self._costs_file = costs_file
        if costs_file is not None and (known := costs_file.read()) is not None:
            self._costs.recall(known)
        self._drafters: IdlePool[Sequence[Drafter]] = IdlePool()
        self._controllers: IdlePool[Controller] = IdlePool()
        self._in_use: weakref.WeakSet[Use] = weakref.WeakSet()
        """By running generations. Weak, so that a drafter whose generation was lost to an interrupt becomes free."""
        self.draft_models: list[DraftModel] = []
        """Closed with the engine."""
        self._lock = ReentrantLock()  # reentrant: garbage collected under it may end a generation
        self._engine_closed = False

    def close(self) -> None:
        """Close the engine, at once or when the last generation has ended."""
        self.closed = True
        with self._lock.lock:
            if len(self.batch) or self._engine_closed:  # in this order: counting may end the last generation
                return
            self._engine_closed = True
        self._cache.clear()
        self._drafters.clear()  # one may hold a copy of a sequence: see `SwiftDrafter`
        self.engine.close()
        for model in self.draft_models:
            model.close()

    def forget(self) -> None:
        """Drop all text from the cache and the drafters; what was learnt about costs and acceptance stays.

        Raises:
            UsageError: a generation is running.
        """
        if len(self.batch):
            raise UsageError("this model is generating: wait for it or cancel it before it can forget")
        self._cache.clear()
        for drafters in self._drafters.items():
            for drafter in drafters:
                drafter.forget()

    def measure_costs(self) -> None:
        """Measure the costs of forwards and drafts for later processes, where none are on disk.

        Costs of a model with experts are learnt from real text only, whose rows share experts.
        """
        if self._costs_file is not None and self._costs_file.read() is None and self.engine.experts is None:
            self._costs_file.write(measure(self.engine))

    def rounds(self, request: GenerationRequest) -> Generator[Round, None, None]:
        """Run a generation. It waits for a slot first; a cancelled one ends with a round without rows."""
        with self._slot(request) as slot:
            if slot is None:
                yield Round((), rows=0, finish_reason="cancelled")
                return
            with self._speculation(request) as (drafters, controller), self._session(request) as session:
                request.stats.drafter = "+".join(drafter.name for drafter in drafters) or registry.NONE
                request.stats.costs_age_s = self._costs.age_s if controller else None
                generation = loop.generate(
                    session,
                    request.prompt_ids,
                    request.sampler,
                    request.limits,
                    drafters=drafters,
                    controller=controller,
                    logprobs=request.logprobs,
                    soft=request.soft,
                    prompt_logprobs=request.prompt_logprobs,
                )
                for this in loop.run(generation, slot.forward):
                    if this.rows and not request.stats.new_tokens:
                        self._leave_copies(session, request.copies)
                    request.stats.count(this)
                    slot.pause()
                    yield this
                    slot.resume()

    def save_prefix(self, request: GenerationRequest, path: str | PathLike[str]) -> None:
        """Prefill a prompt, and write its tokens with their keys and values to a file.

        Raises:
            OSError: the file cannot be written.
            UsageError: the scheduler was closed before the prefill was done.
        """
        with self._slot(request) as slot, self._session(request) as session:
            prefill = loop.generate(session, request.prompt_ids, request.sampler, request.limits, soft=request.soft)
            if slot is None or next(loop.run(prefill, slot.forward)).finish_reason == "cancelled":
                raise UsageError("the model was closed before the prompt was saved")
            session.save(path)

    def load_prefix(self, path: str | PathLike[str]) -> int:
        """Put a sequence written by `save_prefix` into the cache; returns its number of tokens."""
        session = self.engine.load_session(path)
        length = session.length
        self._cache.keep(session)
        return length

    # Slots, sessions and drafters, which generations borrow.

    @contextmanager
    def _slot(self, request: GenerationRequest) -> Iterator[Slot | None]:
        """A slot of the batch; None where the request was cancelled, or the scheduler closed, before it had one."""
        slot = self.batch.join(request.limits.cancelled)
        try:
            yield None if self.closed else slot  # `close` leaves the engine open for a slot that was taken before
        finally:
            request.stats.peak_rss_bytes = machine.peak_rss_bytes()
            if slot is not None:
                slot.leave()
            if self.closed:
                self.close()

    @contextmanager
    def _session(self, request: GenerationRequest) -> Iterator[Session]:
        """A session with the cached beginning of the prompt, or an empty one if all of the prompt is to be looked up.

        It goes to the cache however the generation ends.
        """
        fresh = request.prompt_logprobs is not None
        session = self.engine.open_session() if fresh else self._cache.take(request.prompt_ids)
        request.stats.cached_tokens = session.length
        try:
            yield session
        finally:
            if self.closed:
                session.close()
            else:
                session.rewind(session.length)  # an interrupt may have come while rows were being committed
                self._cache.keep(session)

    def _leave_copies(self, session: Session, count: int) -> None:
        """Copy a session after its prefill: a running sequence cannot be shared, as its sliding window moves on."""
        for _ in range(count):
            self._cache.keep(session.fork())

    @contextmanager
    def _speculation(self, request: GenerationRequest) -> Iterator[tuple[Sequence[Drafter], Controller | None]]:
        """Drafters and a controller; ones that have learnt from earlier generations, if there are.

        Greedy and sampled generations have separate ones, because acceptance differs: the reference pair's first
        drafted token is right in 0.95 of the rounds of the former, and in 0.55 of the latter.
        """
        drafting = request.drafting
        if drafting.drafter is None:
            yield (), None
            return
        chosen, name, count = drafting.drafter, drafting.schedule, drafting.num_assistant_tokens
        key = chosen.name, request.sampler.greedy, name, count
        controller = self._controllers.take(key, lambda: make_controller(name, count, self._costs))
        try:
            with self._lent(chosen, request.sampler.greedy) as drafters:
                readers = [drafter for drafter in drafters if isinstance(drafter, Reader)]
                for reader in readers:
                    reader.expect(request.limits)
                try:
                    yield drafters, controller
                finally:
                    for reader in readers:
                        reader.rest()
        finally:
            self._controllers.give_back(key, controller)
            if self._costs_file is not None and (known := self._costs.known()) is not None:
                self._costs_file.write(known)

    @contextmanager
    def _lent(self, chosen: RegisteredDrafter | Drafter, greedy: bool) -> Iterator[Sequence[Drafter]]:
        if not isinstance(chosen, RegisteredDrafter):
            with self._exclusively(chosen):
                yield [chosen]
            return
        key = chosen.name, greedy
        drafters = self._drafters.take(key, lambda: chosen.make(self.engine, self._costs))
        try:
            yield drafters
        finally:
            self._drafters.give_back(key, drafters)

    @contextmanager
    def _exclusively(self, drafter: Drafter) -> Iterator[None]:
        """Use an application's own drafter, which can follow one sequence only.

        Raises:
            UsageError: another generation uses it.
        """
        use = Use(drafter)
        try:
            with self._lock.lock:
                if any(each.drafter is drafter for each in self._in_use):
                    raise UsageError(f"this drafter ({drafter.name}) serves another generation: make a second one")
                self._in_use.add(use)
            yield
        finally:
            with self._lock.lock:
                self._in_use.discard(use)


Item = TypeVar("Item")


class IdlePool(Generic[Item]):
    """Objects that serve one generation at a time, and that later ones reuse: drafters and controllers. Safe to use
    from several threads.
    """

    def __init__(self) -> None:
        self._lock = ReentrantLock()  # reentrant: garbage collected under it may end a generation
        self._idle: dict[Hashable, list[Item]] = {}

    def take(self, key: Hashable, make: Callable[[], Item]) -> Item:
        """Take out the object of this key that was used last; a new one from `make` where there is none."""
        with self._lock.lock:
            idle = self._idle.get(key)
            if idle:
                return idle.pop()
        return make()

    def give_back(self, key: Hashable, item: Item) -> None:
        """Put an object back."""
        with self._lock.lock:
            self._idle.setdefault(key, []).append(item)

    def items(self) -> list[Item]:
        """All idle objects."""
        with self._lock.lock:
            return [item for idle in self._idle.values() for item in idle]

    def clear(self) -> None:
        """Drop all idle objects."""
        with self._lock.lock:
            self._idle = {}
