"""Finished sequences, kept so that a prompt that begins like one of them is not computed again."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from ondevice.engines.protocol import Engine, Session

LEAST_SHARED = 16
"""Tokens in common from which a copy is made: it costs about as much as computing so few."""


class PrefixCache:
    """Sessions at rest, the least recently used one first. Safe to use from several threads."""

    def __init__(self, engine: Engine, most_bytes: int) -> None:
        """
        Args:
            engine: whose sessions they are.
            most_bytes: of keys and values kept; the newest sequence stays even where it alone is larger, unless this
                is 0.
        """
        self._engine = engine
        self._most_bytes = most_bytes
        self._lock = threading.Lock()
        self._kept: list[Session] = []

    def __len__(self) -> int:
        with self._lock:
            return len(self._kept)

    @property
    def nbytes(self) -> int:
        with self._lock:
            return sum(session.nbytes for session in self._kept)

    def shared(self, prompt_ids: Sequence[int]) -> int:
        """Tokens that a prompt begins with like a kept sequence, at most."""
        with self._lock:
            return max((common_length(session.tokens, prompt_ids) for session in self._kept), default=0)

    def take(self, prompt_ids: Sequence[int]) -> Session:
        """A session that holds as much of a prompt's beginning as any kept one does, or nothing.

        The prompt's last token is left to be computed, for its outputs. A kept sequence that shares at least half of
        its tokens is continued, and what it holds beyond is lost; of another one the beginning is copied.
        """
        with self._lock:
            shared = [(common_length(session.tokens, prompt_ids[:-1]), session) for session in self._kept]
            most, best = max(shared, key=lambda each: each[0], default=(0, None))
            if best is None or not most:
                return self._engine.open_session()
            if 2 * most < best.length:
                return best.fork(most) if most >= LEAST_SHARED else self._engine.open_session()
            self._kept.remove(best)
        best.rewind(most)
        return best

    def keep(self, session: Session) -> None:
        """Keep a sequence that has ended, and let go of others beyond the limit."""
        with self._lock:
            self._kept.append(session)
            surplus = []
            while self._kept and sum(each.nbytes for each in self._kept) > self._most_bytes:
                if len(self._kept) == 1 and self._most_bytes:
                    break
                surplus.append(self._kept.pop(0))
        for each in surplus:
            each.close()

    def clear(self) -> None:
        """Let go of every sequence."""
        with self._lock:
            kept, self._kept = self._kept, []
        for session in kept:
            session.close()


def common_length(first: Sequence[int], second: Sequence[int]) -> int:
    """How many tokens two sequences begin with alike."""
    most = min(len(first), len(second))
    if list(first[:most]) == list(second[:most]):
        return most
    return next(index for index in range(most) if first[index] != second[index])
