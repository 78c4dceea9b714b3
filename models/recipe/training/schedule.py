"""Progress of a training run in tokens, and its learning rate."""

import math
from dataclasses import dataclass

WARM_UP = 1_000_000  # tokens
DECAY = 0.25  # share of the run over which the learning rate falls


@dataclass
class Budget:
    """A run ends when its tokens are spent.

    The length need not be known at the beginning: the rate stays flat until the last quarter, and `finish` starts that
    quarter at once.
    """

    tokens: int
    spent_tokens: int = 0
    core_seconds: float = 0.0  # CPU time of all processes; a stopped or waiting run uses none
    finishing: bool = False

    def spend(self, tokens: int, core_seconds: float) -> None:
        """Count one step."""
        self.spent_tokens += tokens
        self.core_seconds += core_seconds

    def finish(self) -> None:
        """Start the decay now, unless it has begun."""
        if not self.finishing and self.progress < 1 - DECAY:
            self.tokens = math.ceil(self.spent_tokens / (1 - DECAY))
        self.finishing = True

    @property
    def progress(self) -> float:
        """From 0 to 1."""
        return min(1.0, self.spent_tokens / self.tokens)

    @property
    def rate(self) -> float:
        """Factor on the peak learning rate: linear up, flat, then 1 - sqrt to zero."""
        warm = min(1.0, (self.spent_tokens + 1) / min(WARM_UP, 0.1 * self.tokens))
        return warm * (1 - math.sqrt(max(0.0, self.progress - (1 - DECAY)) / DECAY))
