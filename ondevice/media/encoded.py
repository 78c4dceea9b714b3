"""Keeps encoded media, so that the same picture in another conversation is not encoded again."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

from ondevice.arrays import Float32Array

POLL_S = 0.02
"""Seconds between two questions whether a generation that waits for its turn was cancelled."""

Cancelled = Callable[[], bool]
"""Whether the generation that asks was cancelled."""


Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")


class RecentlyUsed(Generic[Key, Value]):
    """Values by key. Those that were not used for longest are dropped first. Safe to use from several threads."""

    def __init__(self, most: int) -> None:
        """
        Args:
            most: the sum of the sizes of values to keep.
        """
        self._most, self._sum = most, 0
        self._kept: OrderedDict[Key, tuple[Value, int]] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: Key) -> Value | None:
        """The value, which is used now; None if it is not kept."""
        with self._lock:
            if key not in self._kept:
                return None
            self._kept.move_to_end(key)
            return self._kept[key][0]

    def keep(self, key: Key, value: Value, size: int = 1) -> None:
        """Keep a value, and drop others, or itself, as far as there is no room."""
        with self._lock:
            self._sum += size - self._kept.pop(key, (value, 0))[1]
            self._kept[key] = value, size
            while self._sum > self._most:
                self._sum -= self._kept.popitem(last=False)[1][1]

    def forget(self) -> None:
        """Drop all values."""
        with self._lock:
            self._kept.clear()
            self._sum = 0


class EncodedMedia:
    """Soft rows by digest, of all generations of a model.

    Safe to use from several threads. What is not kept is encoded by one thread at a time: towers use all cores.
    """

    def __init__(self, most_bytes: int) -> None:
        """
        Args:
            most_bytes: bytes of rows to keep; larger ones are encoded whenever they are needed.
        """
        self._kept: RecentlyUsed[bytes, Float32Array] = RecentlyUsed(most_bytes)
        self._turn = threading.Lock()

    def rows(
        self, digest: bytes, encode: Callable[[Cancelled], Float32Array | None], cancelled: Cancelled
    ) -> Float32Array | None:
        """The soft rows of some content, float32[tokens, H], not to be written to; None after a cancellation.

        Args:
            digest: identifies the content and its number of tokens.
            encode: computes the rows, or returns None after a cancellation.
            cancelled: see `Cancelled`.
        """
        found = self._kept.get(digest)
        if found is not None:
            return found
        while not self._turn.acquire(timeout=POLL_S):
            if cancelled():
                return None
        try:
            found = self._kept.get(digest)  # another generation may have encoded it in the meantime
            if found is None:
                found = encode(cancelled)
                if found is not None:
                    self._kept.keep(digest, found, found.nbytes)
            return found
        finally:
            self._turn.release()

    def forget(self) -> None:
        """Drop all rows."""
        self._kept.forget()
