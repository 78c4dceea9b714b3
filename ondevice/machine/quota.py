"""What a Linux control group grants: processor time, in cores, and memory, in bytes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path


def processor_quota(root: Path = Path("/")) -> float | None:
    """The tightest limit on this process's group and the groups around it; None where there is none.

    Args:
        root: where `proc` and `sys` are looked up.
    """
    limits = [limit for group in _groups(root, "cpu") if (limit := _cores(group)) is not None]
    return min(limits, default=None)


def memory_quota(root: Path = Path("/")) -> int | None:
    """The least that this process's group and the groups around it may still take; None where there is no limit.

    Pages of files count as taken, though they would be given back: this may be too little, never too much.
    """
    left = [room for group in _groups(root, "memory") if (room := _room(group)) is not None]
    return min(left, default=None)


def memory_limit(root: Path = Path("/")) -> int | None:
    """The most that this process's group, and the groups around it, may ever take; None where there is no limit."""
    limits = [int(words[0]) for group in _groups(root, "memory") if (words := _limit(group))]
    return min(limits, default=None)


def _groups(root: Path, controller: str) -> Iterator[Path]:
    """Directories of this process's groups that have a controller, from the innermost outwards, of either version."""
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
        elif controller in controllers.split(","):
            hierarchies = [mounts / controllers, mounts / controller]
        else:
            continue
        # A container often sees its own group mounted at the top, and the host's path in /proc.
        inner = Path(path.lstrip("/"))
        for hierarchy in hierarchies:
            for part in (inner, *inner.parents):
                yield hierarchy / part


def _cores(group: Path) -> float | None:
    """Quota over period: `cpu.max` holds both (version 2), two files hold one each (version 1)."""
    words = _words(group / "cpu.max") or _words(group / "cpu.cfs_quota_us") + _words(group / "cpu.cfs_period_us")
    # "max" and -1 mean no limit.
    if len(words) != 2 or not all(word.isdecimal() for word in words) or int(words[1]) == 0:
        return None
    return int(words[0]) / int(words[1])


def _room(group: Path) -> int | None:
    """Limit less usage, in the files of version 2, else 1."""
    words = _words(group / "memory.max") + _words(group / "memory.current") or (
        _words(group / "memory.limit_in_bytes") + _words(group / "memory.usage_in_bytes")
    )
    if len(words) != 2 or not all(word.isdecimal() for word in words):
        return None
    return max(0, int(words[0]) - int(words[1]))


def _limit(group: Path) -> list[str]:
    """The number in the file of version 2, else 1; nothing for "max"."""
    words = _words(group / "memory.max") or _words(group / "memory.limit_in_bytes")
    return [word for word in words[:1] if word.isdecimal()]


def _words(path: Path) -> list[str]:
    try:
        return path.read_text("ascii").split()
    except (OSError, UnicodeDecodeError):
        return []
