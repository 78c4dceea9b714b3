"""The threads of an engine."""

from __future__ import annotations

import threading
from queue import SimpleQueue

import numpy as np
from numpy.typing import NDArray

from ondevice.engines.simd.buffers import Buffers
from ondevice.engines.simd.kernels.forward import run

Plan = NDArray[np.int64]
State = NDArray[np.int64]


class Crew:
    """Runs plans: the calling thread and `threads - 1` others, which sleep in between."""

    def __init__(self, threads: int, scratch_bytes: int) -> None:
        self.threads = threads
        self._buffers = Buffers()
        self._counter = self._buffers.bytes(64)
        self._arrived = 0
        self._scratch = [self._buffers.bytes(scratch_bytes) for _ in range(threads)]
        self._queues: list[SimpleQueue[tuple[Plan, State, int] | None]] = [SimpleQueue() for _ in range(threads - 1)]
        for number, queue in enumerate(self._queues, 1):
            threading.Thread(target=self._work, args=(number, queue), name=f"ondevice-{number}", daemon=True).start()

    def run(self, plan: Plan, state: State) -> None:
        """Run every step; all threads are through the last one when this returns."""
        arrived = self._arrived
        self._arrived += len(plan) * self.threads
        for queue in self._queues:
            queue.put((plan, state, arrived))
        run(plan, state, 0, self.threads, self._counter, arrived, self._scratch[0])

    def run_alone(self, plan: Plan, state: State) -> None:
        """Run every step on the calling thread."""
        run(plan, state, 0, 1, self._counter, 0, self._scratch[0])

    def close(self) -> None:
        for queue in self._queues:
            queue.put(None)
        self._queues = []

    def _work(self, number: int, queue: SimpleQueue[tuple[Plan, State, int] | None]) -> None:
        while (job := queue.get()) is not None:
            plan, state, arrived = job
            run(plan, state, number, self.threads, self._counter, arrived, self._scratch[number])
