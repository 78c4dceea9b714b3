"""The threads of an engine."""

from __future__ import annotations

import os
import threading
import time
from contextlib import nullcontext
from dataclasses import dataclass
from queue import SimpleQueue

import numpy as np
from numpy.typing import NDArray

from ondevice.engines.simd.buffers import Buffers
from ondevice.engines.simd.kernels.barrier import spin_for_next
from ondevice.engines.simd.kernels.forward import ARRIVALS, LINE, TICKS, run
from ondevice.engines.simd.thread_choice import ThreadChoice

Plan = NDArray[np.int64]
State = NDArray[np.int64]

NEIGHBOURS = 64
"""Numbers of kinds of work, from a multiple of it on, that are near in size where they are near."""


class _Turn:
    """Held by a thread pool of which several threads are at work. Two pools on the same cores stall at their barriers:
    two small models together gave 90 tokens/s each, taking turns 600.
    """

    lock = threading.Lock()

    @classmethod
    def renew(cls) -> None:
        """After a fork, whoever holds it may be a thread that is not here."""
        cls.lock = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_Turn.renew)


@dataclass(frozen=True, eq=False)
class _Job:
    plan: Plan
    state: State
    threads: int
    before: int
    """Arrivals at the barrier when nobody had begun."""


class ThreadPool:
    """Runs plans: the calling thread and up to `threads - 1` others, which sleep when nothing has come for a while.

    How many take part is learnt for each kind of work. It changes no result.
    """

    def __init__(self, threads: int, scratch_bytes: int) -> None:
        self.threads = threads
        self._buffers = Buffers()
        self._scratch = [self._buffers.bytes(scratch_bytes) for _ in range(threads)]
        self._counters = _Counters(self._buffers, threads)
        self._choices: dict[int, ThreadChoice] = {}
        self._queues: list[SimpleQueue[_Job | None]] = [SimpleQueue() for _ in range(threads - 1)]
        for number, queue in enumerate(self._queues, 1):
            threading.Thread(target=self._work, args=(number, queue), name=f"ondevice-{number}", daemon=True).start()

    def run(self, plan: Plan, state: State, kind: int, units: int = 1) -> int:
        """Run every step; all threads are through the last one when this returns, even by an interrupt.

        Args:
            kind: number of a kind of work, which takes the same time each time. From one multiple of NEIGHBOURS to the
                next, what is near in number is near in size.
            units: such times that this work takes.

        Returns:
            threads that took part.
        """
        choice = self._choices.get(kind)
        if choice is None:
            choice = self._choices[kind] = ThreadChoice(self.threads, self._served(kind), self._choices.values())
        threads = choice.threads
        with _Turn.lock if threads > 1 else nullcontext():
            started = time.perf_counter()
            self._run(plan, state, threads)
            now = time.perf_counter()
        choice.observe(now - started, self._counters.waited(threads), now, units)
        return threads

    def close(self) -> None:
        for queue in self._queues:
            queue.put(None)
        self._queues = []

    def _served(self, kind: int) -> int | None:
        """The threads of the nearest neighbour that has tried, or the most of any kind: a busy core is one for all."""
        tried = {other: choice.threads for other, choice in self._choices.items() if choice.tried}
        near = [other for other in tried if other // NEIGHBOURS == kind // NEIGHBOURS]
        return tried[min(near, key=lambda other: abs(other - kind))] if near else max(tried.values(), default=None)

    def _run(self, plan: Plan, state: State, threads: int) -> None:
        job = _Job(plan, state, threads, self._counters.arrivals)
        try:
            self._post(job)
        except BaseException:
            self._post(job)  # who has it already will not run it twice
            raise
        finally:
            run(plan, state, 0, threads, self._counters.address, job.before, self._scratch[0])

    def _post(self, job: _Job) -> None:
        for queue in self._queues[: job.threads - 1]:
            queue.put(job)

    def _work(self, number: int, queue: SimpleQueue[_Job | None]) -> None:
        address, done = self._counters.address, None
        spin_for_next(address, -1)  # so that it is not compiled, or loaded, while tokens wait for it
        while (job := queue.get()) is not None:
            if job is not done:
                run(job.plan, job.state, number, job.threads, address, job.before, self._scratch[number])
                done = job
                # By then the caller is in a kernel too, so that the GIL that `get` needs is free.
                spin_for_next(address, job.before + len(job.plan) * job.threads)


class _Counters:
    """The counters of `kernels.forward.run`, which are never reset."""

    def __init__(self, buffers: Buffers, threads: int) -> None:
        words = LINE // 8
        memory = np.zeros((TICKS + threads + 1) * words, np.int64)
        address = buffers.hold(memory)
        first = -address % LINE // 8
        self.address = address + 8 * first
        self._lines = memory[first:][: (TICKS + threads) * words].reshape(-1, words)
        self._ticks = self._lines[TICKS:]
        self._ran = self._waited = 0

    @property
    def arrivals(self) -> int:
        """Number of arrivals at the barrier; exact only while no thread runs."""
        return int(self._lines[ARRIVALS, 0])

    def waited(self, threads: int) -> float:
        """Share of their time for which so many threads have stood at the barrier since the last call.

        For all but the calling thread, the last barrier counts for the next call.
        """
        if threads == 1:
            return 0.0
        ran, waited = int(self._ticks[0, 0]), int(self._ticks[:, 1].sum())
        share = (waited - self._waited) / max(1, threads * (ran - self._ran))
        self._ran, self._waited = ran, waited
        return share
