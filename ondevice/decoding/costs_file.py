"""Costs on disk, so that the first generation of a process drafts as many tokens as the last one of another did."""

from __future__ import annotations

import hashlib
import json
import math
import os
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from time import monotonic
from typing import Any, NamedTuple

VERSION = 1
MOST_BYTES = 1 << 16
MOST_ROWS = 1024
MOST_SECONDS = 3600.0

EVERY_S = 60.0
"""Seconds between two writes of one process."""


class KnownCosts(NamedTuple):
    """Seconds of a forward by its rows, of a drafted token by its drafter, and when that was measured (Unix time)."""

    measured_at: float
    forwards: dict[int, float]
    drafts: dict[str, float]


class CostsFile:
    """The costs of one bundle, machine, engine and number of threads.

    Nothing depends on it: a file that is missing, damaged, of another version or of something else is as good as none,
    and one that cannot be written is not. It is replaced as a whole, so several processes may write it; the last wins.
    """

    def __init__(self, directory: Path, key: Sequence[str]) -> None:
        """
        Args:
            directory: made when something is written.
            key: whose costs they are.
        """
        self._key = list(key)
        digest = hashlib.sha256("\0".join(key).encode()).hexdigest()
        self.path = directory / f"{digest[:32]}.json"
        self._written: float | None = None

    def read(self) -> KnownCosts | None:
        """What the file says, where all of it makes sense."""
        try:
            with self.path.open("rb") as file:
                content = file.read(MOST_BYTES + 1)
            if len(content) > MOST_BYTES:
                return None
            return self._parse(json.loads(content))
        except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
            return None

    def write(self, known: KnownCosts) -> bool:
        """Replace the file; whether it was. Not more often than every EVERY_S seconds."""
        if self._written is not None and monotonic() - self._written < EVERY_S:
            return False
        self._written = monotonic()  # where it cannot be written, that is not tried after every generation either
        entry = {
            "version": VERSION,
            "key": self._key,
            "measured_at": known.measured_at,
            "forwards": {str(rows): seconds for rows, seconds in sorted(known.forwards.items())},
            "drafts": known.drafts,
        }
        temporary = None
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            handle, temporary = tempfile.mkstemp(dir=self.path.parent, prefix=self.path.stem, suffix=".part")
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                json.dump(entry, file)
            Path(temporary).replace(self.path)
        except OSError:
            if temporary is not None:
                with suppress(OSError):
                    Path(temporary).unlink()
            return False
        return True

    def _parse(self, entry: Mapping[str, Any]) -> KnownCosts | None:
        if entry["version"] != VERSION or entry["key"] != self._key:
            return None
        forwards = {int(rows): _seconds(seconds) for rows, seconds in entry["forwards"].items()}
        drafts = {str(source): _seconds(seconds) for source, seconds in entry["drafts"].items()}
        if not forwards or min(forwards) < 1 or max(forwards) > MOST_ROWS:
            return None
        measured_at = float(entry["measured_at"])
        return KnownCosts(measured_at, forwards, drafts) if math.isfinite(measured_at) else None


def _seconds(value: object) -> float:
    """Raises ValueError for what is no time that a forward could take."""
    if not isinstance(value, float) or not 0.0 < value < MOST_SECONDS:
        raise ValueError("not a time")
    return value
