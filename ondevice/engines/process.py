"""The process that an engine was loaded in. A fork copies its memory and none of its threads."""

from __future__ import annotations

import os

from ondevice.errors import UsageError


class Process:
    """Remembers the process in which it was made."""

    def __init__(self) -> None:
        self._id = os.getpid()

    @property
    def is_this_one(self) -> bool:
        return os.getpid() == self._id

    def check(self) -> None:
        """Refuse to go on in a fork, which would wait for threads, and for holders of locks, that it does not have.

        Raises:
            UsageError: this is another process.
        """
        if not self.is_this_one:
            raise UsageError(
                "this model was loaded before the process was forked, and its threads stayed behind: load it in the "
                'new process (with multiprocessing, start processes by "spawn")'
            )
