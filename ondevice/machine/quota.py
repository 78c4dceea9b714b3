"""Processor time that a Linux control group grants, in cores."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path


def processor_quota(root: Path = Path("/")) -> float | None:
    """The tightest limit on this process's group and the groups around it; None where there is none.

    Args:
        root: where `proc` and `sys` are looked up.
    """
    limits = [limit for group in _groups(root) if (limit := _limit(group)) is not None]
    return min(limits, default=None)


def _groups(root: Path) -> Iterator[Path]:
    """Directories of this process's processor groups, from the innermost outwards, of either version."""
    try:
        lines = (root / "proc/self/cgroup").read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError):
        return
    mounts = root / "sys/fs/cgroup"
    for line in lines:
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if not controllers:
            hierarchies = [mounts, mounts / "unified"]
        elif "cpu" in controllers.split(","):
            hierarchies = [mounts / controllers, mounts / "cpu"]
        else:
            continue
        # A container often sees its own group mounted at the top, and the host's path in /proc.
        inner = Path(path.lstrip("/"))
        for hierarchy in hierarchies:
            for part in (inner, *inner.parents):
                yield hierarchy / part


def _limit(group: Path) -> float | None:
    """Quota over period: `cpu.max` holds both (version 2), two files hold one each (version 1)."""
    words = _words(group / "cpu.max") or _words(group / "cpu.cfs_quota_us") + _words(group / "cpu.cfs_period_us")
    # "max" and -1 mean no limit.
    if len(words) != 2 or not all(word.isdecimal() for word in words) or int(words[1]) == 0:
        return None
    return int(words[0]) / int(words[1])


def _words(path: Path) -> list[str]:
    try:
        return path.read_text("ascii").split()
    except (OSError, UnicodeDecodeError):
        return []
