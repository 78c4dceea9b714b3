"""Costs on disk, so that the first generation of a process drafts as many tokens as the last one of another did."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from time import monotonic
from typing import Any, NamedTuple

from ondevice.json_file import replace_json

VERSION = 2
MOST_BYTES = 1 << 16
MOST_COUNT = 1024
MOST_SECONDS = 3600.0

EVERY_S = 60.0
"""Seconds between two writes of one process."""


class KnownCosts(NamedTuple):
    """Seconds of a forward by rows, of a draft by drafter and tokens, and when they were measured (Unix time)."""

    measured_at: float
    forwards: dict[int, float]
    drafts: dict[str, dict[int, float]]


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
            "forwards": known.forwards,
            "drafts": known.drafts,
        }
        try:
            replace_json(self.path, entry)
        except OSError:
            return False
        return True

    def _parse(self, entry: Mapping[str, Any]) -> KnownCosts | None:
        if entry["version"] != VERSION or entry["key"] != self._key:
            return None
        forwards = _by_count(entry["forwards"])
        drafts = {str(source): _by_count(counts) for source, counts in entry["drafts"].items()}
        measured_at = float(entry["measured_at"])
        return KnownCosts(measured_at, forwards, drafts) if math.isfinite(measured_at) else None


def _by_count(entry: Mapping[str, Any]) -> dict[int, float]:
    """Raises ValueError for what no forward or draft could have, or take."""
    times = {int(count): seconds for count, seconds in entry.items()}
    if not times or min(times) < 1 or max(times) > MOST_COUNT:
        raise ValueError("not counts")
    if not all(isinstance(seconds, float) and 0.0 < seconds < MOST_SECONDS for seconds in times.values()):
        raise ValueError("not times")
    return times
