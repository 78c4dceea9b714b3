"""The thread pool that runs plans, and how it learns how many threads to use.

`ThreadPool.run` runs all steps of a plan on the calling thread and some others. After each step the threads wait for
each other at a barrier; within a step they claim units of work. `ThreadChoice` learns the number of threads for one
kind of work from the times of its runs. The number of threads changes no result.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from contextlib import nullcontext
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any, NamedTuple, cast

import numpy as np

from ondevice.arrays import Int64Array
from ondevice.engines.simd.buffers import Buffers
from ondevice.engines.simd.kernels.contract.entries import (
    ARRIVALS,
    CLAIMS,
    LINE,
    RUN_TICKS,
    THREADS,
    WAIT_TICKS,
    run,
    spin_for_next,
)
from ondevice.engines.simd.kernels.contract.slots import MOST_RUNS, RAN
from ondevice.engines.simd.kernels.contract.steps import WIDTH
from ondevice.forks import ReentrantLock
from ondevice.native.functions import address_of

NEIGHBOURS = 64
"""Numbers in a range of kinds of work, from one multiple of it to the next. Kinds of one range that have near numbers
take nearly the same time per unit."""


_ONE_AT_A_TIME = ReentrantLock()
"""Held by a thread pool while several of its threads compute.

Two pools on the same cores stall at their barriers: two small models at once gave 90 tokens/s each, in turns 600.
"""


class _Job(NamedTuple):
    """A plan for some threads to run.

    plan, steps : address and number of steps, each WIDTH numbers: see `kernels.forward.run`
    state, slots : address and number of the forward's slots
    draft_plan, draft_steps, draft_state : those of a drafter's step; the plan's where there are no drafts
    threads : number of threads that take part
    before : number of arrivals at the barrier before the first of them begins
    """

    plan: int
    steps: int
    state: int
    slots: int
    draft_plan: int
    draft_steps: int
    draft_state: int
    threads: int
    before: int


class ThreadPool:
    """Runs plans on the calling thread and up to `threads - 1` others, which sleep when there is no work for a while.

    The number that take part is learnt for each kind of work (`ThreadChoice`).
    """

    def __init__(self, threads: int, scratch_bytes: int) -> None:
        """
        Args:
            threads: most threads that take part.
            scratch_bytes: working memory of each.
        """
        self.threads = threads
        self._buffers = Buffers()
        self._scratch = [self._buffers.bytes(scratch_bytes) for _ in range(threads)]
        self._counters = _Counters(self._buffers, threads)
        self._choices: dict[int, ThreadChoice] = {}
        self._queues: list[SimpleQueue[_Job | None]] = [SimpleQueue() for _ in range(threads - 1)]
        for number, queue in enumerate(self._queues, 1):
            threading.Thread(target=self._work, args=(number, queue), name=f"ondevice-{number}", daemon=True).start()

    def run(
        self,
        plan: Int64Array,
        state: Int64Array,
        kind: int,
        units: int = 1,
        *,
        draft: tuple[Int64Array, Int64Array] | None = None,
    ) -> int:
        """Run every step of a plan. When this returns, even by an interrupt, all threads have finished the last step.

        Args:
            plan: int64[steps, WIDTH], the steps.
            state: the forward's slots.
            kind: number of the kind of work, whose runs take the same time per unit: see NEIGHBOURS.
            units: amount of work of a run of the plan.
            draft: the plan and the slots of a drafter's step, if drafts are made between runs of the plan.

        Returns:
            The number of threads that took part.
        """
        choice = self._choices.get(kind)
        if choice is None:
            choice = self._choices[kind] = ThreadChoice(self.threads, self._first_count(kind))
        threads = choice.threads
        if choice.trying:  # a number that may be far slower is tried for one forward, not for several in a call
            state[MOST_RUNS] = min(int(state[MOST_RUNS]), 1)
        with _ONE_AT_A_TIME.lock if threads > 1 else nullcontext():
            started = time.perf_counter()
            self._run(plan, state, threads, draft)
            now = time.perf_counter()
        runs = int(state[RAN])
        choice.observe(now - started, self._counters.waited(threads), now, units * runs, runs)
        return threads

    def close(self) -> None:
        """End the other threads. Call it while no plan runs."""
        for queue in self._queues:
            queue.put(None)
        self._queues = []

    def _first_count(self, kind: int) -> int | None:
        """The thread count that a kind of work begins with: that of the nearest neighbour which has tried several, else
        the highest of all kinds that have, because a busy core slows all kinds; None if none has.
        """
        tried = {other: choice.threads for other, choice in self._choices.items() if choice.tried}
        near = [other for other in tried if other // NEIGHBOURS == kind // NEIGHBOURS]
        return tried[min(near, key=lambda other: abs(other - kind))] if near else max(tried.values(), default=None)

    def _run(
        self, plan: Int64Array, state: Int64Array, threads: int, draft: tuple[Int64Array, Int64Array] | None = None
    ) -> None:
        self._counters.reset_claims()
        arrivals, (draft_plan, draft_state) = self._counters.arrivals, draft or (plan, state)
        job = _Job(
            address_of(plan), len(plan), address_of(state), len(state),
            address_of(draft_plan), len(draft_plan), address_of(draft_state), threads, arrivals,
        )  # fmt: skip
        try:
            self._post(job)
        except BaseException:
            self._post(job)  # for threads that have not got it; the others skip a job that they have run
            raise
        finally:
            self._share(job, 0)

    def _post(self, job: _Job) -> None:
        for queue in self._queues[: job.threads - 1]:
            queue.put(job)

    def _share(self, job: _Job, number: int) -> int:
        """Run a thread's share of every step of a job; returns the number of arrivals when all threads are done. The
        caller of `run` keeps the arrays of the plan alive.
        """
        return run.function(
            job.plan, job.steps, WIDTH, job.state, job.slots,
            job.draft_plan, job.draft_steps, WIDTH, job.draft_state, job.slots,
            number, job.threads, self._counters.address, job.before, self._scratch[number],
        )  # fmt: skip

    def _work(self, number: int, queue: SimpleQueue[_Job | None]) -> None:
        address, done = self._counters.address, None
        while (job := queue.get()) is not None:
            if job is not done:
                arrivals = self._share(job, number)
                done = job
                # When this returns, the caller runs a kernel too, so that the GIL, which `get` needs, is free.
                spin_for_next.function(address, arrivals)


class _Counters:
    """The counters of `kernels.forward.run`. Arrivals and times only grow; claims are of one run."""

    def __init__(self, buffers: Buffers, threads: int) -> None:
        lines, self.address = buffers.rows(THREADS + threads, LINE // 8, np.int64)
        self._lines = memoryview(cast(Any, lines))  # reading a few numbers through numpy takes longer
        self._claims = lines[THREADS:, CLAIMS : CLAIMS + 2]
        self._last = THREADS + threads
        self._ran = self._waited = 0

    def reset_claims(self) -> None:
        """Before a run: nothing is claimed. After its last barrier a thread that is stopped no longer claims."""
        self._claims[:] = 0

    @property
    def arrivals(self) -> int:
        """Number of arrivals at the barrier; exact only while no thread runs."""
        arrivals: int = self._lines[ARRIVALS, 0]
        return arrivals

    def waited(self, threads: int) -> float:
        """Share of their time that so many threads have waited at barriers since the last call.

        For all threads but the calling one, the wait at the last barrier is counted at the next call.
        """
        if threads == 1:
            return 0.0
        ran: int = self._lines[THREADS, RUN_TICKS]
        waited = sum(self._lines[line, WAIT_TICKS] for line in range(THREADS, self._last))
        share = (waited - self._waited) / max(1, threads * (ran - self._ran))
        self._ran, self._waited = ran, waited
        return share


RUNS = 3
"""Runs that a median is taken of, and runs that must agree: enough to ignore one outlier, few enough to follow a
machine whose load changes."""

FEWER_SHARE, MORE_SHARE = 0.005, 0.01
"""Most time that trials of fewer threads without a reason may lose, and those of more threads, as shares of the time
since the last one: when all time counted, a dozen followed each other after an idle minute. With 2 % for more threads,
two processes of one thread each lost 4 % to each other's trials."""

RETURN_RUNS = 4
"""Runs on fewer threads before more are tried again. It doubles after each failed trial, until MORE_SHARE allows a
trial earlier. So a core that was busy for a moment only costs four runs on fewer threads, not sixteen."""

GAIN = 0.97
"""More threads are kept only if they take less than this share of the time: a core that gains nothing stays free."""

WAITED = 0.5
"""Time that threads wait at barriers, as a number of threads, which in RUNS runs one after another is a reason to try
one thread fewer at once."""

WAKING = 1e-3
"""Seconds of a run below which the first run with more threads is not counted: they take 0.1 ms to wake up."""

CHANGED = 1.2
"""Factor by which runs must be slower than when fewer threads failed, for waiting to be a reason again: probably
another program runs now. Where they are faster by it than when more threads failed, it probably has ended."""

FORGOTTEN = 2.0
"""Seconds without a run, or eight run times if that is longer, after which earlier times are dropped."""


class ThreadChoice:
    """Learns how many threads are fastest for one kind of work.

    Threads of a forward wait for each other at hundreds of barriers. If the cores are oversubscribed, the system stops
    one thread for a time slice, some milliseconds, and the others wait: with one of two cores busy, two threads took
    1.6 times as long as one. And a forward of 0.1 ms gains nothing from a second thread.

    So another count is tried now and then, for one to three runs, and kept if each of them is faster than recent runs.
    Fewer threads are tried at once when threads have waited long in several runs, and otherwise only when FEWER_SHARE
    of the time since such a trial pays for what the next one is expected to lose: what the last one lost or, the first
    time, what it loses if the work divides evenly. More threads are tried soon after fewer were chosen, then ever more
    seldom while that fails, down to what MORE_SHARE pays for.

    Attributes:
        threads: number of threads for the next run.
        tried: whether another count was ever tried.
    """

    def __init__(self, most: int, start: int | None = None) -> None:
        """
        Args:
            most: number of threads of the pool.
            start: first count, learnt by another kind of work; None takes `most`.
        """
        self._ladder = ladder(most)
        self._rung = len(self._ladder) - 1 if start is None else self._ladder.index(start)
        self.tried = False
        self._failures: dict[int, _Failure] = {}
        """Rung of the ladder -> its last trial that failed."""
        self._recent: deque[float] = deque(maxlen=RUNS)
        self._trial: _Trial | None = None
        self._credit = {"fewer": 0.0, "more": 0.0}
        """Seconds that a trial may lose now."""
        self._since_trial = self._waiting = 0
        self._return_runs = RETURN_RUNS
        self._last: float | None = None
        self.threads = self._ladder[self._rung]

    @property
    def trying(self) -> bool:
        """Whether the next run tries another number."""
        return self._trial is not None

    def observe(self, seconds: float, waited: float, now: float, units: int = 1, runs: int = 1) -> None:
        """Learn from a run with `threads`.

        Args:
            seconds: duration of the run.
            waited: share of the threads' time that they waited at barriers.
            now: time of its end, in seconds of a monotonic clock.
            units: amount of work; runs are compared by seconds per unit.
            runs: number of runs that followed each other in one call.
        """
        if len(self._ladder) == 1:
            return
        last, self._last = self._last, now
        if last is None:
            return  # the first run also wakes the threads, and may read the weights from disk
        if now - last > max(FORGOTTEN, 8 * seconds):
            self._recent.clear()
            self._end_trial()
        self._credit["fewer"] += FEWER_SHARE * seconds
        self._credit["more"] += MORE_SHARE * seconds
        if self._trial is not None:
            self._trial.add(seconds, units)
            if self._trial.decided:
                self._conclude(self._trial)
            return
        self._recent.append(seconds / units)
        self._since_trial += runs
        self._waiting = self._waiting + runs if waited * self.threads > WAITED else 0
        if len(self._recent) < RUNS:
            return
        usual = sorted(self._recent)[RUNS // 2]
        if (rung := self._due(usual, units)) is not None:
            more = rung > self._rung
            self._trial = _Trial(rung, usual * (GAIN if more else 1.0), waking=more and seconds < WAKING)
            self.threads = self._ladder[rung]

    def _due(self, usual: float, units: int) -> int | None:
        """The rung of the ladder to try now; None if none is due.

        Args:
            usual: seconds per unit of recent runs.
            units: amount of work of the last run, which a trial is expected to have too.
        """
        above, below = self._rung + 1, self._rung - 1
        if above < len(self._ladder):
            failure = self._failures.get(above)
            if self._since_trial >= self._return_runs:
                return above
            if failure is not None and (self._credit["more"] >= failure.lost or CHANGED * usual < failure.usual):
                return above
        if below >= 0:
            failure = self._failures.get(below)
            if failure is not None:
                failure.usual = min(failure.usual, usual)
            if self._waiting >= RUNS and (failure is None or usual > CHANGED * failure.usual):
                return below
            evenly = usual * units * (self._ladder[self._rung] / self._ladder[below] - 1.0)
            if self._credit["fewer"] >= (evenly if failure is None else failure.lost):
                return below
        return None

    def _conclude(self, trial: _Trial) -> None:
        self.tried = True
        if trial.faster:
            self._failures.clear()
            self._recent = deque(trial.times, maxlen=RUNS)
            self._return_runs = RETURN_RUNS
            self._rung = trial.rung
        else:
            self._failures[trial.rung] = _Failure(trial.lost, trial.limit)
            if trial.rung > self._rung:
                self._credit["more"] = 0.0
                self._return_runs *= 2
            else:
                self._credit["fewer"] = 0.0
        self._end_trial()

    def _end_trial(self) -> None:
        self._trial = None
        self._since_trial = self._waiting = 0
        self.threads = self._ladder[self._rung]


@dataclass
class _Failure:
    """A trial whose thread count was not faster.

    lost : seconds that it lost
    usual : seconds per unit of the runs before it or, if they were faster, of any runs since
    """

    lost: float
    usual: float


@dataclass
class _Trial:
    """Runs with the thread count of another rung.

    rung : index in the ladder
    limit : most seconds per unit that a run may take for the count to be kept
    waking : whether the next run also wakes threads, and so is not counted
    times : seconds per unit of the runs so far
    lost : seconds lost so far
    """

    rung: int
    limit: float
    waking: bool
    times: list[float] = field(default_factory=list)
    lost: float = 0.0

    def add(self, seconds: float, units: int) -> None:
        self.lost = max(0.0, self.lost + seconds - self.limit * units)
        if not self.waking:
            self.times.append(seconds / units)
        self.waking = False

    @property
    def faster(self) -> bool:
        return all(time <= self.limit for time in self.times)

    @property
    def decided(self) -> bool:
        return len(self.times) == RUNS or not self.faster


def ladder(most: int) -> list[int]:
    """The thread counts to choose from, ascending: 1, 2, 4, ..., most - 1 and most."""
    counts = {max(1, most - 1), most}
    count = 1
    while count < most:
        counts.add(count)
        count *= 2
    return sorted(counts)
