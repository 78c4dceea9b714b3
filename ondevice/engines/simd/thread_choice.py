"""How many threads a kind of work runs on, learnt from the work itself: as many as make it faster, and no more."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from dataclasses import dataclass, field
from statistics import median

MEMORY = 3
"""Runs that a median is taken of: enough to shrug off one bad moment, few enough to follow a machine that changes."""

TRIAL_SHARE = 0.01
"""Of all time, what trials of other thread counts may lose."""

BETWEEN_TRIALS = 16
"""Runs at least from one trial to the next."""

GAIN = 0.97
"""More threads must take less than this share of the time: a core that gains next to nothing is left to others."""

WAITED = 0.5
"""Threads' time lost at barriers, in threads, from which on one thread fewer is tried at once."""

WAKING = 1e-3
"""Seconds of a run below which the first one with more threads says little: they take 0.1 ms to wake up."""

CHANGED = 1.2
"""Times as long as when fewer threads were tried in vain: then another program has come, and they are tried anew."""

FORGOTTEN = 2.0
"""Seconds after which times say nothing about the machine now; eight runs if that is longer."""


class ThreadChoice:
    """For one kind of work.

    Two threads of a forward wait for each other hundreds of times. Where other processes want the cores too, one of
    them is stopped for a time slice, some milliseconds, and the other waits: with one of two cores busy, two threads
    took 1.6 times as long as one. And a forward of a tenth of a millisecond is not worth any meeting.

    So now and then another count is tried, for one run or three, and kept where it is faster. Trials may lose no more
    than TRIAL_SHARE of the time: what a count lost when it was last tried tells when it can be afforded again, and
    before that, what shorter work lost by it. Without the latter the four kinds of forwards of a round with an early
    exit tried one thread all at once, 75 ms in a reply of 2.7 s at E2B's shape. Waiting at barriers is a sign that
    fewer threads may be faster, and brings their trial forward.

    Attributes:
        threads: to run next with.
        tried: whether any other count was.
    """

    def __init__(self, most: int, start: int | None = None, others: Collection[ThreadChoice] = ()) -> None:
        """
        Args:
            most: threads that there are.
            start: what served work of another size; None takes all.
            others: of other kinds of work on these threads; more may come.
        """
        self._others = others
        self._ladder = ladder(most)
        self._rung = len(self._ladder) - 1 if start is None else self._ladder.index(start)
        self.tried = False
        self._losses = [0.0] * len(self._ladder)
        """Seconds that the last trial of each rung lost."""
        self._limits = [0.0] * len(self._ladder)
        """What it was compared with, in seconds per unit."""
        self._recent: deque[float] = deque(maxlen=MEMORY)
        self._trial: _Trial | None = None
        self._credit = 0.0
        self._since_trial = 0
        self._waiting = 0
        self._upwards = False
        self._last: float | None = None
        self.threads = self._ladder[self._rung]

    def observe(self, seconds: float, waited: float, now: float, units: int = 1) -> None:
        """Learn from a run with `threads`.

        Args:
            seconds: that it took.
            waited: share of the threads' time for which they stood at barriers.
            now: on a clock in seconds.
            units: of work that it was; runs are compared by their seconds per unit.
        """
        if len(self._ladder) == 1:
            return
        last, self._last = self._last, now
        if last is None:
            return  # it woke the threads, or read the weights from the disk
        if now - last > max(FORGOTTEN, 8 * seconds):
            self._recent.clear()
            self._end_trial()
        self._credit += TRIAL_SHARE * seconds
        if self._trial is not None:
            self._trial.add(seconds, units)
            if self._trial.decided:
                self._conclude(self._trial)
            return
        self._recent.append(seconds / units)
        self._since_trial += 1
        self._waiting = self._waiting + 1 if waited * self.threads > WAITED else 0
        rung = self._due(now)
        if rung is not None:
            more = rung > self._rung
            limit = median(self._recent) * (GAIN if more else 1.0)
            self._trial = _Trial(rung, limit, waking=more and seconds < WAKING)
            self.threads = self._ladder[rung]

    def _due(self, now: float) -> int | None:
        """The rung to try now."""
        if len(self._recent) < MEMORY - 1:
            return None
        rested = self._since_trial >= BETWEEN_TRIALS
        below, top = self._rung - 1, len(self._ladder) - 1
        if self._rung and self._waiting >= MEMORY - 1:
            tried = self._losses[below] > 0 and median(self._recent) < CHANGED * self._limits[below]
            if rested or not tried:
                return below
        upwards = self._rung == 0 or (self._upwards and self._rung < top)
        rung = self._rung + 1 if upwards else below
        if not rested or self._credit < (self._losses[rung] or self._expected_loss(rung)):
            return None
        if any(other.tries(now) for other in tuple(self._others)):
            return None  # it may tell that this one need not
        self._upwards = not upwards
        return rung

    def _expected_loss(self, rung: int) -> float:
        """Seconds that a trial would lose that never was: fewer threads are worth less to longer work."""
        if rung > self._rung:
            return 0.0
        own = median(self._recent)
        lost = ((other, other.lost_share(rung)) for other in tuple(self._others))
        return own * min((share for other, share in lost if share and other.takes_at_most(own)), default=0.0)

    def tries(self, now: float) -> bool:
        """Whether a trial is under way, and runs still come."""
        return self._trial is not None and self._last is not None and now - self._last < FORGOTTEN

    def takes_at_most(self, seconds: float) -> bool:
        """Whether it is known to be as short as that."""
        return bool(self._recent) and median(self._recent) <= seconds

    def lost_share(self, rung: int) -> float:
        """Of a run, what the last trial of a rung lost; 0 where it lost nothing or there was none."""
        return self._losses[rung] / self._limits[rung] if self._limits[rung] else 0.0

    def _conclude(self, trial: _Trial) -> None:
        self.tried = True
        if trial.faster:
            self._losses[trial.rung] = self._losses[self._rung] = 0.0
            self._rung = trial.rung
            self._recent = deque(trial.times, maxlen=MEMORY)
        else:
            self._losses[trial.rung], self._limits[trial.rung] = trial.lost, trial.limit
            self._credit -= trial.lost
        self._end_trial()

    def _end_trial(self) -> None:
        self._trial = None
        self._since_trial = self._waiting = 0
        self._credit = min(self._credit, max(self._losses))
        self.threads = self._ladder[self._rung]


@dataclass
class _Trial:
    """Runs with the threads of another rung, of which none may take longer than `limit`, in seconds per unit."""

    rung: int
    limit: float
    waking: bool
    """Whether the next run wakes threads, and does not count."""
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
        return len(self.times) == MEMORY or not self.faster


def ladder(most: int) -> list[int]:
    """The thread counts to choose from: one, two, four, ... and all but one and all."""
    counts = {max(1, most - 1), most}
    count = 1
    while count < most:
        counts.add(count)
        count *= 2
    return sorted(counts)
