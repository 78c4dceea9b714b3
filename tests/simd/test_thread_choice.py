"""The learnt number of threads, tested on simulated machines."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise

import pytest

from ondevice.engines.simd.threads import ThreadChoice, ladder


@dataclass
class Machine:
    """A simulated machine: the time of a run in ms by number of threads, and the share of it spent at barriers.

    stalls : most ms that a run of several threads occasionally loses to other processes
    """

    milliseconds: Mapping[int, float]
    waited: Mapping[int, float]
    stalls: float = 0.0
    stalled: float = 0.0
    noise: float = 0.04

    def run(self, threads: int, rng: random.Random) -> tuple[float, float]:
        milliseconds = self.milliseconds[threads] * (1 + abs(rng.gauss(0, self.noise)))
        waited = self.waited[threads]
        if threads > 1 and rng.random() < self.stalled:
            milliseconds += self.stalls * rng.random()
            waited = max(waited, 0.4)
        return milliseconds / 1e3, waited

    def mean(self, threads: int) -> float:
        usual = self.milliseconds[threads] * (1 + 0.8 * self.noise)
        return (usual + (self.stalls * self.stalled / 2 if threads > 1 else 0)) / 1e3


TWO_IDLE = Machine({1: 66, 2: 48}, {1: 0, 2: 0.03})
TWO_ONE_BUSY = Machine({1: 67, 2: 60}, {1: 0, 2: 0.3}, stalls=90, stalled=0.9, noise=0.1)
SMALL_IDLE = Machine({1: 0.12, 2: 0.23}, {1: 0, 2: 0.3})
SMALL_BUSY = Machine({1: 0.12, 2: 0.23}, {1: 0, 2: 0.3}, stalls=8, stalled=0.05)
EIGHT = Machine({k: 100 / k for k in range(1, 9)}, dict.fromkeys(range(1, 9), 0.02))
EIGHT_SATURATED = Machine({k: 100 / min(k, 3) for k in range(1, 9)}, dict.fromkeys(range(1, 9), 0.1))
EIGHT_ONE_BUSY = Machine(
    {**{k: 100 / k for k in range(1, 8)}, 8: 20}, {**dict.fromkeys(range(1, 8), 0.02), 8: 0.4}
)  # fmt: skip


def played(machine: Callable[[float], Machine], seconds: float, most: int) -> tuple[float, Counter[int]]:
    """Simulate runs; returns the time of the best counts over the actual time, and the number of runs by threads."""
    choice, rng, ran = ThreadChoice(most), random.Random(1), Counter[int]()
    now = best = 0.0
    while now < seconds:
        current = machine(now)
        ran[choice.threads] += 1
        took, waited = current.run(choice.threads, rng)
        best += min(map(current.mean, ladder(most)))
        now += took
        choice.observe(took, waited, now)
    return best / now, ran


@pytest.mark.parametrize(
    ("machine", "seconds", "most", "expected"),
    [
        (TWO_IDLE, 60, 2, 2),
        (TWO_ONE_BUSY, 60, 2, 1),
        (SMALL_IDLE, 2, 2, 1),
        (SMALL_BUSY, 2, 2, 1),
        (EIGHT, 30, 8, 8),
        (EIGHT_SATURATED, 30, 8, 4),
        (EIGHT_ONE_BUSY, 30, 8, 7),
    ],
)
def test_the_best_count_is_found_and_trials_cost_next_to_nothing(
    machine: Machine, seconds: float, most: int, expected: int
) -> None:
    share, ran = played(lambda _: machine, seconds, most)
    assert share > 0.97
    assert ran.most_common(1)[0][0] == expected


def test_a_load_that_comes_and_goes_is_followed() -> None:
    counts: list[Counter[int]] = [Counter(), Counter(), Counter()]
    choice, rng, now = ThreadChoice(2), random.Random(2), 0.0
    while now < 60:
        phase = int(now // 20)
        counts[phase][choice.threads] += 1
        seconds, waited = (TWO_ONE_BUSY if phase == 1 else TWO_IDLE).run(choice.threads, rng)
        now += seconds
        choice.observe(seconds, waited, now)
    assert counts[0][2] > 20 * counts[0][1]
    assert counts[1][1] > 10 * counts[1][2]
    assert counts[2][2] > 2 * counts[2][1]  # two threads are back within five seconds


def test_threads_that_wait_are_fewer_after_a_few_runs() -> None:
    choice = ThreadChoice(2)
    for number in range(4):
        choice.observe(0.1, waited=0.5, now=0.1 * number)
    assert choice.threads == 1


def test_threads_that_wait_and_are_faster_all_the_same_stay() -> None:
    """A failed trial is not repeated at once, however long the threads wait at barriers."""
    choice, now, alone = ThreadChoice(2), 0.0, 0
    for _ in range(200):
        alone += choice.threads == 1
        seconds = 0.1 if choice.threads == 2 else 0.13
        now += seconds
        choice.observe(seconds, waited=0.3, now=now)
    assert 0 < alone <= 200 / 16


def test_a_load_that_comes_after_a_trial_in_vain_is_noticed_at_once() -> None:
    choice, now = ThreadChoice(2), 0.0
    for _ in range(250):  # idle: a trial of one thread fails
        seconds = 0.05 if choice.threads == 2 else 0.1
        now += seconds
        choice.observe(seconds, 0.02, now)
    assert choice.tried
    ran = []
    for _ in range(10):
        ran.append(choice.threads)
        seconds = 0.15 if choice.threads == 2 else 0.1
        now += seconds
        choice.observe(seconds, 0.5 if choice.threads == 2 else 0.0, now)
    assert ran[:7] == [2, 2, 2, 1, 1, 1, 1]


def test_no_kind_of_work_in_a_round_tries_before_it_can_afford_to() -> None:
    """On an idle machine a generation of 96 rounds tries nothing: its forwards are several kinds of work, and a trial
    of each would lose 0.4 of a round. All trials together lose about FEWER_SHARE of the time.
    """
    milliseconds: dict[str, dict[int, float]] = {
        "exit": {1: 30, 2: 15},
        "head": {1: 3.5, 2: 2},
        "verification": {1: 85, 2: 42},
    }
    choices = {kind: ThreadChoice(2) for kind in milliseconds}
    trials, now, lost = Counter[str](), 0.0, 0.0
    for number in range(800):
        for kind, times in milliseconds.items():
            took = times[choices[kind].threads] / 1e3
            trials[kind] += choices[kind].threads == 1
            now, lost = now + took, lost + took - times[2] / 1e3
            choices[kind].observe(took, 0.03, now)
        if number == 75:
            assert not trials.total()
    assert trials.total()
    assert lost < 0.008 * now


@pytest.mark.parametrize("seed", range(20))
def test_a_core_that_is_busy_for_a_moment_costs_a_few_runs(seed: int) -> None:
    """In every forty runs, four lose up to three times their duration to another program, and their threads wait."""
    choice, rng = ThreadChoice(2), random.Random(seed)
    now, ran = 0.0, Counter[int]()
    for number in range(400):
        seconds = 0.022 if choice.threads == 2 else 0.038
        disturbed = number % 40 < 4
        ran[choice.threads] += 1
        if disturbed and choice.threads == 2:
            seconds += 0.066 * rng.random()
        now += seconds
        choice.observe(seconds, 0.3 if disturbed and choice.threads == 2 else 0.02, now)
    assert ran[1] <= 80  # eight after each disturbance; returning after 16 runs would make them 200


def test_more_threads_are_tried_soon_and_then_ever_more_seldom() -> None:
    """Until MORE_SHARE of the time since the last trial pays for another, which loses 0.06 s: every 6 s."""
    choice, now = ThreadChoice(2, 1), 0.0
    ran = []
    for _ in range(160):
        ran.append(choice.threads)
        seconds = {1: 0.1, 2: 0.16}[choice.threads]
        now += seconds
        choice.observe(seconds, 0.3 if choice.threads == 2 else 0.0, now)
    assert [number for number, threads in enumerate(ran) if threads == 2] == [5, 14, 31, 64, 128]


def test_work_is_compared_by_its_units() -> None:
    """Times are compared per row, because the chunks of a prompt differ in size."""
    choice, rng, now = ThreadChoice(2), random.Random(3), 0.0
    for _ in range(300):
        rows = rng.randrange(65, 129)
        seconds = rows * (0.002 if choice.threads == 2 else 0.004)
        now += seconds
        choice.observe(seconds, 0.02, now, rows)
    assert choice.threads == 2


def test_more_threads_are_back_soon_after_a_load_that_slowed_one_thread_too() -> None:
    """Their trials had lost so much that MORE_SHARE pays for the next one after 10 s only."""
    choice, now = ThreadChoice(2, 1), 0.0
    for _ in range(300):
        seconds = {1: 0.02, 2: 0.2}[choice.threads]
        now += seconds
        choice.observe(seconds, 0.3 if choice.threads == 2 else 0.0, now)
    assert choice.threads == 1
    for _ in range(10):
        seconds = {1: 0.01, 2: 0.006}[choice.threads]
        now += seconds
        choice.observe(seconds, 0.02, now)
    assert choice.threads == 2


def test_time_that_passed_does_not_pay_for_trials_that_follow_each_other() -> None:
    choice, now = ThreadChoice(2), 0.0
    ran = []
    for _ in range(6000):
        ran.append(choice.threads)
        seconds = 0.05 if choice.threads == 2 else 0.08
        now += seconds
        choice.observe(seconds, 0.02, now)
    trials = [number for number, threads in enumerate(ran) if threads == 1]
    assert len(trials) > 10
    assert min(later - earlier for earlier, later in pairwise(trials)) > 100


def test_times_of_long_ago_are_forgotten() -> None:
    """A trial that was in progress when a long idle time began is discarded."""
    choice = ThreadChoice(2)
    for number in range(4):
        choice.observe(0.1, waited=0.5, now=0.1 * number)
    assert choice.threads == 1
    choice.observe(0.05, waited=0.0, now=1000.0)
    assert choice.threads == 2


def test_one_thread_has_no_choice() -> None:
    choice = ThreadChoice(1)
    for number in range(100):
        choice.observe(1.0, 0.9, float(number))
    assert choice.threads == 1


@pytest.mark.parametrize(
    ("most", "counts"), [(1, [1]), (2, [1, 2]), (3, [1, 2, 3]), (4, [1, 2, 3, 4]), (8, [1, 2, 4, 7, 8])]
)
def test_counts_to_choose_from(most: int, counts: list[int]) -> None:
    assert ladder(most) == counts
