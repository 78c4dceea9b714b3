"""The threads of an engine."""

from __future__ import annotations

import os
import threading
from contextlib import nullcontext
from dataclasses import dataclass
from queue import SimpleQueue

import numpy as np
from numpy.typing import NDArray

from ondevice.engines.simd.buffers import Buffers
from ondevice.engines.simd.kernels.barrier import spin_for_next
from ondevice.engines.simd.kernels.forward import COUNTER_BYTES, run

Plan = NDArray[np.int64]
State = NDArray[np.int64]


class _Turn:
    """Held by a thread pool at work. Two pools on the same cores stall at their barriers: two small models together
    gave 90 tokens/s each, taking turns 600.
    """

    lock = threading.Lock()

    @classmethod
    def renew(cls) -> None:
        """After a fork, whoever holds it may be a thread that is not here."""
        cls.lock = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_Turn.renew)


@dataclass(frozen=True)
class _Job:
    plan: Plan
    state: State
    before: int
    """Steps that the pool had run before."""


class ThreadPool:
    """Runs plans: the calling thread and `threads - 1` others, which sleep when nothing is to be done for a while."""

    def __init__(self, threads: int, scratch_bytes: int) -> None:
        self.threads = threads
        self._buffers = Buffers()
        self._scratch = [self._buffers.bytes(scratch_bytes) for _ in range(threads)]
        self._together = _Counter(self._buffers)
        self._alone = _Counter(self._buffers)
        self._queues: list[SimpleQueue[_Job | None]] = [SimpleQueue() for _ in range(threads - 1)]
        for number, queue in enumerate(self._queues, 1):
            threading.Thread(target=self._work, args=(number, queue), name=f"ondevice-{number}", daemon=True).start()

    def run(self, plan: Plan, state: State) -> None:
        """Run every step; all threads are through the last one when this returns, even by an interrupt."""
        with _Turn.lock if self.threads > 1 else nullcontext():
            job = _Job(plan, state, self._together.arrivals // self.threads)
            try:
                self._post(job)
            except BaseException:
                self._post(job)  # who has it already will not run it twice
                raise
            finally:
                run(plan, state, 0, self.threads, self._together.address, job.before, self._scratch[0])

    def run_alone(self, plan: Plan, state: State) -> None:
        """Run every step on the calling thread: those of a small drafter are shorter than a barrier."""
        run(plan, state, 0, 1, self._alone.address, self._alone.arrivals, self._scratch[0])

    def close(self) -> None:
        for queue in self._queues:
            queue.put(None)
        self._queues = []

    def _post(self, job: _Job) -> None:
        for queue in self._queues:
            queue.put(job)

    def _work(self, number: int, queue: SimpleQueue[_Job | None]) -> None:
        spin_for_next(self._together.address, -1)  # so that it is not compiled, or loaded, while tokens wait for it
        done = 0
        while (job := queue.get()) is not None:
            if job.before >= done:
                run(
                    job.plan, job.state, number, self.threads, self._together.address, job.before, self._scratch[number]
                )
                done = job.before + len(job.plan)
                # By then the caller is in a kernel too, so that the GIL that `get` needs is free.
                spin_for_next(self._together.address, done * self.threads)


class _Counter:
    """The counters of `kernels.forward.run`. Arrivals are never reset: they tell how many steps have been run."""

    def __init__(self, buffers: Buffers) -> None:
        self._memory = np.zeros(COUNTER_BYTES // 8 + 8, np.int64)
        address = buffers.hold(self._memory)
        self._first = -address % 64 // 8
        self.address = address + 8 * self._first

    @property
    def arrivals(self) -> int:
        """Number of arrivals; exact only while no thread runs."""
        return int(self._memory[self._first])
