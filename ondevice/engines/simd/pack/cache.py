"""Packs in the cache directory: opening one dates it, and before a new one is written, unused ones are removed.

Nothing else tells that a pack is obsolete: a bundle that was exported again may have a copy elsewhere, a layout of
another version belongs to another installation, and both may be in daily use. So one that was not opened for two weeks
goes; at worst it is packed again.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from ondevice.machine import cache_directory

if sys.platform != "win32":
    import fcntl

KEPT_S = 14 * 86400
"""Seconds since a pack was last opened after which it is removed."""

ABANDONED_S = 60
"""Seconds since the last byte of an unfinished pack that no process holds: its writer was killed."""

SURELY_ABANDONED_S = 86400
"""The same on a disk that knows no locks."""

_PACK, _PART = re.compile(r"[0-9a-f]{40}\.pack"), re.compile(r"[0-9a-f]{40}\w+\.part")
_CODE = re.compile(r"kernels-[0-9a-f]{16}")
"""Names of packs, of those that are being written, and of directories with compiled code. The cache directory may hold
files of other programs."""


def pack_sizes() -> list[int]:
    """Bytes of every pack in the cache directory."""
    return [status.st_size for _, status in _files(_PACK)]


def mark_used(path: Path) -> None:
    """Set the date of a pack that was opened. The system dates reads, if at all, those of a backup too."""
    with suppress(OSError):
        os.utime(path)


def remove_unused() -> None:
    """Remove packs and compiled code that nobody has opened for long, and packs that were never finished.

    A process that has a removed pack mapped goes on using it; Windows refuses to remove such a one, which is as good.
    """
    now = time.time()
    unused = [path for path, status in _files(_PACK) if now - status.st_mtime > KEPT_S]
    unfinished = [path for path, status in _files(_PART) if _is_abandoned(path, now - status.st_mtime)]
    for path in unused + unfinished:
        with suppress(OSError):
            path.unlink()
    for path in [path for path, status in _files(_CODE) if now - status.st_mtime > KEPT_S]:
        shutil.rmtree(path, ignore_errors=True)  # of another version: every process dates its own


def hold(handle: int) -> None:
    """Mark an open file as being written, until it is closed or this process ends, however that happens."""
    if sys.platform != "win32":  # Windows does not let others remove a file that is open
        with suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _is_abandoned(path: Path, age: float) -> bool:
    """Whether the writer of an unfinished pack, `age` seconds old, is gone."""
    return age > SURELY_ABANDONED_S or (age > ABANDONED_S and not _is_held(path))


def _is_held(path: Path) -> bool:
    if sys.platform == "win32":
        return False
    try:
        with path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:  # held, or nobody knows
        return True
    return False


def _files(names: re.Pattern[str]) -> Iterator[tuple[Path, os.stat_result]]:
    """Files of the cache directory with such names. Another process may remove any of them at any time."""
    with suppress(OSError):
        for path in sorted(cache_directory().iterdir()):
            if names.fullmatch(path.name):
                with suppress(OSError):
                    yield path, path.stat()
