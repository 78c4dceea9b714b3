"""Threads that share a forward, interrupted and at once."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from ondevice.bundle import Bundle
from ondevice.engines.simd.engine import SimdEngine
from ondevice.engines.simd.kernels.step_layouts import WIDTH
from ondevice.engines.simd.thread_pool import ThreadPool
from tests.simd.forwards import run

NOTHING = np.full((7, WIDTH), -1, np.int64)
STATE = np.zeros(64, np.int64)


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_all_threads_arrive_after_every_step(threads: int) -> None:
    pool = ThreadPool(threads, 64)
    for _ in range(50):
        pool.run(NOTHING, STATE)
        pool.run(NOTHING[:2], STATE)
        pool.run_alone(NOTHING, STATE)
    assert pool._together.arrivals == threads * 50 * 9
    pool.close()


def test_an_interrupt_while_work_is_handed_out(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = ThreadPool(3, 64)
    post, interrupts = pool._post, [KeyboardInterrupt]

    def interrupted(job: object) -> None:
        """Only one thread of two has got its work, or both have."""
        if interrupts:
            pool._queues[0].put(job)  # type: ignore[arg-type]
            raise interrupts.pop()
        post(job)  # type: ignore[arg-type]

    monkeypatch.setattr(pool, "_post", interrupted)
    with pytest.raises(KeyboardInterrupt):
        pool.run(NOTHING, STATE)
    pool.run(NOTHING, STATE)
    assert pool._together.arrivals == 3 * 2 * 7
    pool.close()


def test_engines_side_by_side(bundles: dict[str, Bundle]) -> None:
    def logits(_: int) -> np.ndarray:
        engine = SimdEngine(bundles["e2b"], threads=2)
        session = engine.open_session()
        for _ in range(5):
            outputs = run(session, range(40), range(40))
        found = outputs.logits.copy()
        engine.close()
        return found

    with ThreadPoolExecutor(3) as pool:
        first, *others = pool.map(logits, range(3))
    for other in others:
        np.testing.assert_array_equal(first, other)
