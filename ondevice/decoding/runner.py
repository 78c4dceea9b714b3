"""Generations of one engine, several at once: a place in the batch, a sequence to continue, a drafter at hand."""

from __future__ import annotations

import threading
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from os import PathLike

from ondevice import machine
from ondevice.decoding import loop
from ondevice.decoding.batch import Batch, Seat
from ondevice.decoding.costs import Costs
from ondevice.decoding.costs_file import CostsFile
from ondevice.decoding.idle_pool import IdlePool
from ondevice.decoding.limits import Limits
from ondevice.decoding.logprobs import Logprobs
from ondevice.decoding.prefix_cache import PrefixCache
from ondevice.decoding.record import Round, Stats
from ondevice.decoding.sampling import Sampler
from ondevice.decoding.schedule import Schedule, make_schedule
from ondevice.drafters import registry
from ondevice.drafters.draft_model import DraftModel
from ondevice.drafters.protocol import Drafter, Reader
from ondevice.drafters.registry import DrafterEntry
from ondevice.engines.protocol import Engine, Session
from ondevice.errors import UsageError


@dataclass(frozen=True)
class Drafting:
    """Who drafts: a way of drafting, an application's own instance, or nobody; and how many tokens."""

    drafter: DrafterEntry | Drafter | None
    schedule: str
    num_assistant_tokens: int | None


@dataclass(frozen=True)
class Task:
    """One generation's tokens and choices, all checked."""

    prompt_ids: list[int]
    sampler: Sampler
    limits: Limits
    drafting: Drafting
    stats: Stats
    logprobs: Logprobs | None = None
    copies: int = 0
    """Of the prompt's keys and values, left in the cache for other generations of the same prompt."""


class Runner:
    """Runs generations on an engine, from any thread. What it learns from one helps the next: the machine's costs, the
    drafters' luck, and the finished sequences themselves.
    """

    def __init__(
        self, engine: Engine, max_sequences: int, cache_bytes: int, costs_file: CostsFile | None = None
    ) -> None:
        """
        Args:
            engine: closed with the runner.
            max_sequences: generations at the same time.
            cache_bytes: of keys and values of finished sequences.
            costs_file: where costs stay between processes; None keeps none.
        """
        self.engine = engine
        self.closed = False
        self.batch = Batch(engine, max_sequences)
        self._cache = PrefixCache(engine, cache_bytes)
        self._costs = Costs(engine.experts)
        self._costs_file = costs_file
        if costs_file is not None and (known := costs_file.read()) is not None:
            self._costs.recall(known)
        self._drafters: IdlePool[Drafter] = IdlePool()
        self._schedules: IdlePool[Schedule] = IdlePool()
        self._claims: list[list[Drafter]] = []
        self.draft_models: list[DraftModel] = []
        """Closed with the engine."""
        self._lock = threading.Lock()
        self._engine_closed = False

    def close(self) -> None:
        """Close the engine, when the last generation has ended."""
        self.closed = True
        with self._lock:
            if self._engine_closed or len(self.batch):
                return
            self._engine_closed = True
        self._cache.clear()
        self.engine.close()
        for model in self.draft_models:
            model.close()

    def forget(self) -> None:
        """Drop every text; what was learnt about costs and acceptance stays.

        Raises:
            UsageError: a generation is running.
        """
        if len(self.batch):
            raise UsageError("this model is generating: wait for it or cancel it before it can forget")
        self._cache.clear()
        for drafter in self._drafters.all():
            drafter.forget()

    def rounds(self, task: Task) -> Generator[Round, None, None]:
        """Wait for a place, take what the cache has of the prompt, run the loop, and keep the sequence."""
        with self._place(task) as seat:
            if seat is None:
                yield Round((), rows=0, finish_reason="cancelled")
                return
            with self._lend(task) as (drafter, schedule), self._sequence(task) as session:
                task.stats.drafter = drafter.name if drafter else registry.NONE
                task.stats.costs_age_s = self._costs.age_s if schedule else None
                this_loop = loop.generate(
                    session,
                    task.prompt_ids,
                    task.sampler,
                    task.limits,
                    drafter=drafter,
                    schedule=schedule,
                    logprobs=task.logprobs,
                )
                for this in loop.run(this_loop, seat.forward):
                    if this.rows and not task.stats.new_tokens:
                        self._leave_copies(session, task.copies)
                    task.stats.count(this)
                    seat.pause()
                    yield this
                    seat.resume()

    def save_prefix(self, task: Task, path: str | PathLike[str]) -> None:
        """Run a prompt, and write its tokens with their keys and values to a file.

        Raises:
            OSError: it cannot be written.
            UsageError: the runner was closed before the prompt was read.
        """
        with self._place(task) as seat, self._sequence(task) as session:
            prefill = loop.generate(session, task.prompt_ids, task.sampler, task.limits)
            if seat is None or next(loop.run(prefill, seat.forward)).finish_reason == "cancelled":
                raise UsageError("the model was closed before the prompt was saved")
            session.save(path)

    def load_prefix(self, path: str | PathLike[str]) -> int:
        """Keep a sequence that `save_prefix` wrote, for prompts that begin like it; how many tokens it has."""
        session = self.engine.load_session(path)
        length = session.length
        self._cache.keep(session)
        return length

    @contextmanager
    def _place(self, task: Task) -> Iterator[Seat | None]:
        """A place in the batch, when there is one; None where the task was cancelled before."""
        seat = self.batch.join(task.limits.cancelled)
        try:
            yield seat
        finally:
            task.stats.peak_rss_bytes = machine.peak_rss_bytes()
            self._keep_costs()
            if seat is not None:
                seat.leave()
            if self.closed:
                self.close()

    def _keep_costs(self) -> None:
        """Write down what changed, for the next process."""
        if self._costs_file is None or (known := self._costs.news()) is None:
            return
        if self._costs_file.write(known):
            self._costs.keep(known)

    @contextmanager
    def _sequence(self, task: Task) -> Iterator[Session]:
        """A session for a prompt, with what is known of it already; kept afterwards, however the generation ended."""
        session = self._cache.take(task.prompt_ids)
        task.stats.cached_tokens = session.length
        try:
            yield session
        finally:
            if self.closed:
                session.close()
            else:
                session.rewind(session.length)  # an interrupt may have come while rows moved
                self._cache.keep(session)

    def _leave_copies(self, session: Session, count: int) -> None:
        """Of a prompt that was just read: a running sequence cannot be shared, as its window slides on."""
        for _ in range(count):
            self._cache.keep(session.fork())

    @contextmanager
    def _lend(self, task: Task) -> Iterator[tuple[Drafter | None, Schedule | None]]:
        """A drafter and a schedule for one generation, experienced ones where there are any.

        What they learnt from greedy generations says little of sampled ones: the reference pair's first draft is right
        in 0.95 of the ones, and in 0.55 of the others. So each kind has its own.
        """
        drafting = task.drafting
        if drafting.drafter is None:
            yield None, None
            return
        chosen, name, count = drafting.drafter, drafting.schedule, drafting.num_assistant_tokens
        key = chosen.name, task.sampler.greedy, name, count
        schedule = self._schedules.take(key, lambda: make_schedule(name, count, self._costs))
        try:
            with self._drafter(chosen, task.sampler.greedy) as drafter:
                if not isinstance(drafter, Reader):
                    yield drafter, schedule
                    return
                drafter.expect(task.limits)
                try:
                    yield drafter, schedule
                finally:
                    drafter.rest()
        finally:
            self._schedules.give_back(key, schedule)

    @contextmanager
    def _drafter(self, chosen: DrafterEntry | Drafter, greedy: bool) -> Iterator[Drafter]:
        if not isinstance(chosen, DrafterEntry):
            with self._claim(chosen):
                yield chosen
            return
        key = chosen.name, greedy
        drafter = self._drafters.take(key, lambda: chosen.make(self.engine, self._costs))
        try:
            yield drafter
        finally:
            self._drafters.give_back(key, drafter)

    @contextmanager
    def _claim(self, drafter: Drafter) -> Iterator[None]:
        """An application's own drafter has one sequence to follow."""
        claim = [drafter]
        try:
            with self._lock:
                if any(each[0] is drafter for each in self._claims):
                    raise UsageError(f"this drafter ({drafter.name}) serves another generation: make a second one")
                self._claims.append(claim)
            yield
        finally:
            with self._lock:
                self._claims = [each for each in self._claims if each is not claim]
