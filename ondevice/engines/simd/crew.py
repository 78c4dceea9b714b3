"""The threads of an engine."""

from __future__ import annotations

import threading
from queue import SimpleQueue

import numpy as np
from numpy.typing import NDArray

from ondevice.engines.simd.buffers import Buffers
from ondevice.engines.simd.kernels.forward import COUNTER_BYTES, run

Plan = NDArray[np.int64]
State = NDArray[np.int64]


class Crew:
    """Runs plans: the calling thread and `threads - 1` others, which sleep in between."""

    def __init__(self, threads: int, scratch_bytes: int) -> None:
        self.threads = threads
        self._buffers = Buffers()
        self._scratch = [self._buffers.bytes(scratch_bytes) for _ in range(threads)]
        self._together = _Counter(self._buffers)
        self._alone = _Counter(self._buffers)
        self._queues: list[SimpleQueue[tuple[Plan, State, int] | None]] = [SimpleQueue() for _ in range(threads - 1)]
        for number, queue in enumerate(self._queues, 1):
            threading.Thread(target=self._work, args=(number, queue), name=f"ondevice-{number}", daemon=True).start()

    def run(self, plan: Plan, state: State) -> None:
        """Run every step; all threads are through the last one when this returns."""
        before = self._together.take(plan)
        for queue in self._queues:
            queue.put((plan, state, before))
        run(plan, state, 0, self.threads, self._together.address, before, self._scratch[0])

    def run_alone(self, plan: Plan, state: State) -> None:
        """Run every step on the calling thread: a drafter's are too short to wake another one."""
        run(plan, state, 0, 1, self._alone.address, self._alone.take(plan), self._scratch[0])

    def close(self) -> None:
        for queue in self._queues:
            queue.put(None)
        self._queues = []

    def _work(self, number: int, queue: SimpleQueue[tuple[Plan, State, int] | None]) -> None:
        while (job := queue.get()) is not None:
            plan, state, before = job
            run(plan, state, number, self.threads, self._together.address, before, self._scratch[number])


class _Counter:
    """What threads meet on, and the steps that it has counted."""

    def __init__(self, buffers: Buffers) -> None:
        self.address = buffers.bytes(COUNTER_BYTES)
        self._steps = 0

    def take(self, plan: Plan) -> int:
        """The steps before this plan."""
        before = self._steps
        self._steps += len(plan)
        return before
