"""The thread pool of forwards: interrupts, several callers, and waiting times."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from typing import ClassVar

import numpy as np
import pytest

from benchmarks.speed.busy import AllThreads
from ondevice.bundle import Bundle
from ondevice.engines.simd import threads as thread_pool
from ondevice.engines.simd.engine import SimdEngine
from ondevice.engines.simd.kernels.contract.entries import LINE, SLEEPERS, SPINS, THREADS
from ondevice.engines.simd.kernels.contract.slots import MOST_RUNS, SLOTS
from ondevice.engines.simd.kernels.contract.steps import WIDTH
from ondevice.engines.simd.kernels.isa import memory
from ondevice.engines.simd.kernels.isa.memory import claim_part, first_unit
from ondevice.engines.simd.threads import ThreadPool
from tests.simd.forwards import run

NOTHING = np.full((7, WIDTH), -1, np.int64)
STATE = np.zeros(64, np.int64)


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_all_threads_arrive_after_every_step(threads: int) -> None:
    pool = ThreadPool(threads, 64)
    ran = 0
    for _ in range(50):
        ran += 7 * pool.run(NOTHING, STATE, kind=0)
        ran += 2 * pool.run(NOTHING[:2], STATE, kind=1)
        assert pool._counters.arrivals == ran
    pool.close()


def test_an_interrupt_while_work_is_handed_out(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = ThreadPool(3, 64)
    post, interrupts = pool._post, [KeyboardInterrupt]

    def interrupted(job: object) -> None:
        """Interrupt after one of two threads has got its work, or after both have."""
        if interrupts:
            pool._queues[0].put(job)  # type: ignore[arg-type]
            raise interrupts.pop()
        post(job)  # type: ignore[arg-type]

    monkeypatch.setattr(pool, "_post", interrupted)
    with pytest.raises(KeyboardInterrupt):
        pool.run(NOTHING, STATE, kind=0)
    assert pool.run(NOTHING, STATE, kind=0) == 3
    assert pool._counters.arrivals == 3 * 2 * 7
    pool.close()


def test_threads_that_wait_are_told_of() -> None:
    """Ten threads without work, on fewer cores, report that they wait at the barrier nearly all of the time."""
    pool = ThreadPool(10, 64)
    shares = []
    for _ in range(5):
        pool._run(NOTHING, STATE, 10)
        shares.append(pool._counters.waited(10))
    assert max(shares) > 0.2
    pool._run(NOTHING, STATE, 1)
    assert pool._counters.waited(1) == 0.0
    pool.close()


def test_threads_that_sleep_at_the_barrier_are_woken() -> None:
    """Ten threads on fewer cores: those that wait for one that has no core sleep, and the last one wakes them."""
    pool = ThreadPool(10, 64)
    lines, slept = pool._counters._lines, False
    for _ in range(300):
        pool._run(NOTHING, STATE, 10)
        slept |= any(lines[THREADS + thread, SPINS] == memory._FEWEST_SPINS for thread in range(10))
    assert slept
    assert pool._counters.arrivals == 300 * 10 * len(NOTHING)
    pool.close()
    deadline = time.monotonic() + 30
    while lines[SLEEPERS, 0] and time.monotonic() < deadline:  # some may still wake up after the last run has returned
        time.sleep(0.001)
    assert lines[SLEEPERS, 0] == 0


def test_each_kind_of_work_has_threads_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    class Fixed:
        made, trying = 0, False
        started: ClassVar[list[int | None]] = []

        def __init__(self, most: int, start: int | None) -> None:
            Fixed.made += 1
            self.threads = min(most, Fixed.made)
            self.tried = Fixed.made != 1
            Fixed.started.append(start)

        def observe(self, *_: float) -> None: ...

    monkeypatch.setattr(thread_pool, "ThreadChoice", Fixed)
    pool = ThreadPool(3, 64)
    assert [pool.run(NOTHING, STATE, kind) for kind in (5, 6, 7, 6, 5)] == [1, 2, 3, 2, 1]
    assert pool.run(NOTHING, STATE, 4) == 3
    assert pool.run(NOTHING, STATE, 70) == 3
    assert Fixed.started == [None, None, 2, 2, 3], "from the nearest neighbour that has tried, or the most of any"
    pool.close()


@pytest.mark.parametrize("threads", [1, 2, 3, 7])
@pytest.mark.parametrize("units", [0, 1, 2, 5, 16, 96, 1000])
def test_every_unit_of_a_step_is_claimed_once(units: int, threads: int) -> None:
    """Threads claim in a random order, some seldom; each claims its own share from front to end before others'."""
    rng = np.random.default_rng(units)
    for _ in range(20):
        counters = np.zeros((threads, LINE // 8), np.int64)
        odds = rng.random(threads) ** 4 + 1e-3
        firsts = [first_unit(units, thread, threads) for thread in range(threads + 1)]
        nexts, ends, claimed, left = firsts[:-1], firsts[1:], list[int](), set(range(threads))
        while left:
            some = sorted(left)
            thread = int(rng.choice(some, p=odds[some] / odds[some].sum()))
            start, stop = claim_part(counters.ctypes.data, units, thread, threads)
            claimed += range(start, stop)
            owner = next((each for each in range(threads) if firsts[each] <= start < firsts[each + 1]), None)
            if owner is None:
                assert start == stop
                left.remove(thread)
            elif owner == thread:
                assert start == nexts[owner]
                nexts[owner] = stop
            else:
                assert nexts[thread] == ends[thread], "its own share comes first"
                assert stop == ends[owner]
                ends[owner] = start
        assert sorted(claimed) == list(range(units))


def test_a_thread_takes_over_the_shares_of_threads_that_do_not_run() -> None:
    """Parts of each share get smaller, down to one unit."""
    counters, claimed, sizes = np.zeros((3, LINE // 8), np.int64), list[int](), dict[int, list[int]]()
    while (part := claim_part(counters.ctypes.data, 99, 1, 3))[0] < part[1]:
        claimed += range(*part)
        sizes.setdefault(part[0] // 33, []).append(part[1] - part[0])
    assert claimed[:33] == list(range(33, 66))
    assert sorted(claimed) == list(range(99))
    assert sorted(sizes) == [0, 1, 2]
    for own in sizes.values():
        assert own == sorted(own, reverse=True)
        assert own[-1] == 1


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


def test_another_number_of_threads_is_tried_for_one_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a core is busy, two threads can take ten times as long as one: six forwards of that would be felt."""

    class Trying(AllThreads):
        trying = True

    state = np.zeros(SLOTS, np.int64)
    for choice, left in ((Trying, 1), (AllThreads, 6)):
        monkeypatch.setattr(thread_pool, "ThreadChoice", choice)
        pool, state[MOST_RUNS] = ThreadPool(1, 64), 6
        monkeypatch.setattr(pool, "_run", lambda *_: None)
        pool.run(NOTHING, state, kind=0)
        assert state[MOST_RUNS] == left
        pool.close()
