"""Objects that serve one generation at a time and are better for having served others."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

Item = TypeVar("Item")


class IdlePool(Generic[Item]):
    """Drafters and schedules at rest: what they learnt helps the next generation. Safe to use from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._idle: dict[Hashable, list[Item]] = {}

    def take(self, key: Hashable, make: Callable[[], Item]) -> Item:
        """The one of this kind that was used last, or a new one."""
        with self._lock:
            idle = self._idle.get(key)
            if idle:
                return idle.pop()
        return make()

    def give_back(self, key: Hashable, item: Item) -> None:
        with self._lock:
            self._idle.setdefault(key, []).append(item)

    def all(self) -> list[Item]:
        """Those at rest."""
        with self._lock:
            return [item for idle in self._idle.values() for item in idle]
