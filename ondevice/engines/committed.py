"""How much of a sequence an engine holds: the part of `Engine` that does not depend on what runs the graphs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from ondevice.contract import AttentionKind
from ondevice.errors import UsageError


class Cache(Protocol):
    """KV rows of all layers of one attention kind."""

    def gather(self, length: int, path: Sequence[int]) -> None:
        """Move the pending rows `path` (ascending) to follow `length` without gaps."""
        ...

    def can_rewind(self, length: int) -> bool: ...

    def clear(self) -> None: ...


class CommittedRows:
    """Which rows of an engine's caches are committed, and which only pending; see `Engine.commit` and `.rewind`."""

    def __init__(self, caches: Mapping[AttentionKind, Cache]) -> None:
        self._committed_in = caches
        self._length = 0
        self._pending = 0

    @property
    def length(self) -> int:
        return self._length

    def commit(self, path: Sequence[int]) -> None:
        if list(path) != sorted(set(path)) or (path and not 0 <= path[0] <= path[-1] < self._pending):
            raise ValueError(f"{list(path)} are not rows of the last forward")
        if list(path) != list(range(len(path))):
            for cache in self._committed_in.values():
                cache.gather(self._length, path)
        self._length += len(path)
        self._pending = 0

    def rewind(self, length: int) -> int:
        if not 0 <= length <= self._length:
            raise ValueError(f"cannot rewind to {length} from {self._length}")
        self._pending = 0
        if all(cache.can_rewind(length) for cache in self._committed_in.values()):
            self._length = length
        else:
            self._length = 0
            for cache in self._committed_in.values():
                cache.clear()
        return self._length


def context_within(wanted: int | None, available: int) -> int:
    """The context length to use: what was asked for, or all there is.

    Raises:
        UsageError: more than the model has, or too few for a prompt and an answer.
    """
    if wanted is None:
        return available
    if not 1 < wanted <= available:
        raise UsageError(f"a context of {wanted} tokens is not possible: this model has 2 to {available}")
    return wanted
