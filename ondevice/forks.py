"""A process and its forks: locks that are free in a fork, and objects that do not work there."""

from __future__ import annotations

import os
import threading
from typing import ClassVar
from weakref import WeakSet

from ondevice.errors import UsageError


class ReentrantLock:
    """A lock that its own thread may take again. Use it as `with made.lock`.

    This class is not a context manager, because an interrupt in a method `__enter__` written in Python could come after
    the locking, and would leave the lock held for ever; Python's own lock is taken and released without such a gap.

    In a fork it is free, unless the thread that forked has it: the threads that may have held it do not exist there.
    """

    _all: ClassVar[WeakSet[ReentrantLock]] = WeakSet()

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self._all.add(self)

    @classmethod
    def renew(cls) -> None:
        """Free all of them, in a fork."""
        for each in cls._all:
            if each.lock.acquire(blocking=False):
                each.lock.release()
            else:
                each.lock = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=ReentrantLock.renew)


class ForkGuard:
    """Remembers the process that it was made in. A fork copies a process's memory, but none of its threads."""

    def __init__(self) -> None:
        self._id = os.getpid()

    @property
    def in_own_process(self) -> bool:
        """False in a fork."""
        return os.getpid() == self._id

    def check(self) -> None:
        """Refuse to go on in a fork, which would wait forever for threads, and for locks of threads, that it lacks.

        Raises:
            UsageError: this is another process.
        """
        if not self.in_own_process:
            raise UsageError(
                "this model was loaded before the process was forked, and its threads stayed behind: load it in the "
                'new process (with multiprocessing, start processes by "spawn")'
            )
