"""How many experts a forward reads by its rows, learnt from what recent rows chose."""

from __future__ import annotations

from ondevice.engines.protocol import ExpertShare

NEWEST = 0.2
"""What the latest forward counts for, beside all before it."""


class ExpertReads:
    """Costs of forwards, freed of the experts that their rows happened to choose, and given those that are likely now.

    Rows that chose out of `pool` experts, each by itself, would read pool * (1 - (1 - top / pool)**rows): all experts
    are the pool where rows have nothing in common, as few as one row takes where all choose alike. Neighbouring tokens
    are in between, by the text. The pool is learnt from forwards of any number of rows, and tells of all others.

    share : what the engine says of the experts of its model
    """

    def __init__(self, share: ExpertShare) -> None:
        self._share = share
        self._pool = float(share.count)

    @property
    def pool(self) -> float:
        """Experts that rows seem to choose from, each by itself."""
        return self._pool

    def observe(self, rows: int, experts: float) -> None:
        """A forward has read so many experts, on average of its layers."""
        if rows > 1:
            self._pool += NEWEST * (self._pool_of(rows, experts) - self._pool)

    def freed(self, seconds: float, experts: float) -> float:
        """What a forward would have taken if all its rows had chosen the same experts."""
        return seconds / self._factor(experts)

    def expected(self, costs: list[float]) -> list[float]:
        """Such seconds of 1, 2, ... rows with the experts that as many rows will probably choose."""
        return [cost * self._factor(self._distinct(self._pool, rows)) for rows, cost in enumerate(costs, 1)]

    def _factor(self, experts: float) -> float:
        return 1.0 + self._share.of_a_row * max(experts - self._share.top, 0.0)

    def _distinct(self, pool: float, rows: int) -> float:
        return float(pool * (1.0 - (1.0 - self._share.top / pool) ** rows))

    def _pool_of(self, rows: int, experts: float) -> float:
        """The pool of which so many rows would read so many experts: they read more of a larger one."""
        low, high = float(self._share.top), float(self._share.count)
        for _ in range(12):  # to a thirtieth of an expert
            middle = (low + high) / 2
            low, high = (middle, high) if self._distinct(middle, rows) < experts else (low, middle)
        return high
