"""The parts of another process's memory, sampled while it runs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from threading import Event, Thread
from types import TracebackType
from typing import Self

INTERVAL_S = 0.005


@dataclass(frozen=True)
class Memory:
    """Resident bytes: anonymous ones are the process's own, file-backed ones the system can drop and read again."""

    anonymous: int
    file_backed: int

    @property
    def total(self) -> int:
        return self.anonymous + self.file_backed

    @classmethod
    def parse(cls, status: str) -> Memory | None:
        """From a Linux `/proc/<pid>/status`; None for a process that has ended or a system that does not say."""
        fields = dict(line.split(":", 1) for line in status.splitlines() if ":" in line)
        if "RssAnon" not in fields or "RssFile" not in fields:
            return None
        anonymous, file_backed, shared = (int(fields.get(name, "0").split()[0]) * 1024 for name in _FIELDS)
        return cls(anonymous, file_backed + shared)


_FIELDS = ("RssAnon", "RssFile", "RssShmem")


class MemoryWatch:
    """Samples a process until the end of the `with` block.

    peak : the largest sample; None if the system does not say. A spike between samples is missed.
    """

    def __init__(self, pid: int) -> None:
        self.peak: Memory | None = None
        self._status = Path(f"/proc/{pid}/status")
        self._done = Event()
        self._thread = Thread(target=self._sample, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._done.set()
        self._thread.join()

    def _sample(self) -> None:
        while not self._done.wait(INTERVAL_S):
            try:
                memory = Memory.parse(self._status.read_text("ascii", errors="replace"))
            except OSError:
                return
            if memory is not None and (self.peak is None or memory.total > self.peak.total):
                self.peak = memory
