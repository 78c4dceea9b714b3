"""How far a training run has come, and what learning rate belongs there."""

import math
import time
from dataclasses import dataclass

import workers


@dataclass
class Budget:
    """A run ends when its tokens or its minutes are spent, whichever comes first."""

    tokens: int
    minutes: float
    spent_tokens: int = 0
    spent_seconds: float = 0.0
    clock: float = 0.0  # when time was last counted

    def start(self) -> None:
        """Count time from now on."""
        self.clock = time.monotonic()

    def spend(self, tokens: int) -> None:
        """Count the tokens of one step and the time since the last one."""
        now = time.monotonic()
        self.spent_tokens += tokens
        self.spent_seconds += workers.total(now - self.clock) / workers.count()  # all processes agree on the progress
        self.clock = now

    def spent(self) -> dict[str, float]:
        """What a resumed run has to know."""
        return {"spent_tokens": self.spent_tokens, "spent_seconds": self.spent_seconds}

    @property
    def progress(self) -> float:
        """From 0 to 1."""
        return min(1.0, max(self.spent_tokens / self.tokens, self.spent_seconds / 60 / self.minutes))


def warmup_stable_decay(progress: float, warmup: float = 0.01, decay: float = 0.3) -> float:
    """Factor on the peak learning rate: linear up, flat, then 1 - sqrt to zero over the last `decay` of the run."""
    if progress < warmup:
        return max(progress, 0.001) / warmup
    if progress < 1 - decay:
        return 1.0
    return 1 - math.sqrt((progress - (1 - decay)) / decay)
