"""The prefix cache: sessions of finished sequences, so that a prompt with the same beginning is not computed again."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from ondevice.engines.protocol import Engine, Session
from ondevice.forks import ReentrantLock

MIN_COPIED = 16
"""Common tokens from which a session is copied: a copy costs about as much as computing so few."""


class PrefixCache:
    """Idle sessions, the least recently used one first. Safe to use from several threads."""

    def __init__(self, engine: Engine, max_bytes: int) -> None:
        """
        Args:
            engine: opens sessions; all sessions kept are its own.
            max_bytes: limit on the keys and values kept. The newest session is kept even if it alone exceeds the limit,
                unless that is 0.
        """
        self._engine = engine
        self._max_bytes = max_bytes
        self._lock = ReentrantLock()  # reentrant: garbage collected under it may end a generation, which calls `keep`
        self._held = False
        """Whether the thread that has the lock is in a method, whose sessions must not be closed by another one."""
        self._sessions: list[Session] = []

    def __len__(self) -> int:
        """Number of sessions kept."""
        return len(self._sessions)

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values kept."""
        with self._hold():
            return sum(session.nbytes for session in self._sessions)

    def shared(self, prompt_ids: Sequence[int]) -> int:
        """Length of the longest common beginning of a prompt and a kept session, in tokens."""
        with self._hold():
            return max((common_length(session.tokens, prompt_ids) for session in self._sessions), default=0)

    def take(self, prompt_ids: Sequence[int]) -> Session:
        """A session that holds the beginning of a prompt, as long as any kept session does; otherwise an empty one.

        The prompt's last token is never included, because its outputs are needed. A kept session that shares at least
        half of its tokens is taken out of the cache and rewound to the shared part; of another one that part is copied.
        Of several that share as much, the shortest is used, which loses least.
        """
        with self._hold():
            shared = [(common_length(session.tokens, prompt_ids[:-1]), session) for session in self._sessions]
            most, best = max(shared, key=lambda each: (each[0], -each[1].length), default=(0, None))
            if best is None or not most:
                return self._engine.open_session()
            if 2 * most < best.length:
                return best.fork(most) if most >= MIN_COPIED else self._engine.open_session()
            self._sessions.remove(best)
        best.rewind(most)
        return best

    def keep(self, session: Session) -> None:
        """Add a session, and close the least recently used ones beyond the limit."""
        surplus: list[Session] = []
        with self._hold() as is_first:
            self._sessions.append(session)
            while is_first and self._sessions and self.nbytes > self._max_bytes:
                if len(self._sessions) == 1 and self._max_bytes:
                    break
                surplus.append(self._sessions.pop(0))
        for each in surplus:
            each.close()

    def clear(self) -> None:
        """Close all sessions."""
        with self._hold():
            sessions, self._sessions = self._sessions, []
        for session in sessions:
            session.close()

    @contextmanager
    def _hold(self) -> Iterator[bool]:
        """Hold the lock; yields whether this thread is not in another method already."""
        with self._lock.lock:
            was_held = self._held
            try:
                self._held = True
                yield not was_held
            finally:
                self._held = was_held


def common_length(first: Sequence[int], second: Sequence[int]) -> int:
    """Length of the longest common beginning of two sequences."""
    most = min(len(first), len(second))
    if list(first[:most]) == list(second[:most]):
        return most
    return next(index for index in range(most) if first[index] != second[index])
