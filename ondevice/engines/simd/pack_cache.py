"""Packs and compiled code in the cache directory: their sizes, and the removal of unused ones.

Opening a pack sets its date, and one that was not opened for two weeks is removed. There is no better sign that a pack
is obsolete: a bundle that was exported again may have a copy elsewhere, a layout of another version may belong to
another installation, and both may be in daily use. At worst a bundle is packed again.

Without numpy and numba, so that `ondevice info` works where these are missing.
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

from ondevice.files import lock, trusted
from ondevice.machine import cache_directory

KEPT_S = 14 * 86400
"""Seconds after which a pack that was not opened is removed."""

ABANDONED_S = 60
"""Seconds after which an unfinished pack that is not locked is removed: its writer was killed."""

SURELY_ABANDONED_S = 86400
"""Seconds after which an unfinished pack is removed even if it seems locked: some file systems have no locks."""

_PACK, _PART = re.compile(r"[0-9a-f]{40}\.pack"), re.compile(r"[0-9a-f]{40}\w+\.part")
_CODE = re.compile(r"kernels-[0-9a-f]{16}")
"""Names of packs, of unfinished packs, and of directories with compiled code. The cache directory may hold files of
other programs, which must stay."""


def pack_sizes() -> list[int]:
    """The size of every pack in the cache directory, in bytes."""
    return [status.st_size for _, status in _files(_PACK)]


def mark_used(path: Path) -> None:
    """Set the date of a pack to now. Access times would not do: they may be off, and a backup sets them too."""
    with suppress(OSError):
        os.utime(path)


def remove_unused() -> None:
    """Remove packs and compiled code that were not opened for long, and what `remove_unfinished` removes.

    A process that has a removed pack mapped can go on using it; Windows refuses to remove one that is mapped.
    """
    if not trusted(cache_directory()):
        return
    now = time.time()
    for path in [path for path, status in _files(_PACK) if now - status.st_mtime > KEPT_S]:
        with suppress(OSError):
            path.unlink()
    remove_unfinished()
    for path in [path for path, status in _files(_CODE) if now - status.st_mtime > KEPT_S]:
        shutil.rmtree(path, ignore_errors=True)  # code of another version: every process dates the directory it uses


def remove_unfinished() -> None:
    """Remove unfinished packs without a writer. The start that follows a kill finds them too young."""
    now = time.time()
    for path in [path for path, status in _files(_PART) if _is_abandoned(path, now - status.st_mtime)]:
        with suppress(OSError):
            path.unlink()


def _is_abandoned(path: Path, age: float) -> bool:
    """Whether the writer of an unfinished pack, last written `age` seconds ago, is gone."""
    return age > SURELY_ABANDONED_S or (age > ABANDONED_S and not _is_held(path))


def _is_held(path: Path) -> bool:
    """Whether a process has locked a file, or the file system has no locks; Windows refuses to remove an open file."""
    if sys.platform == "win32":
        return False
    try:
        with path.open("rb") as file:
            return not lock(file.fileno())
    except OSError:
        return True


def _files(names: re.Pattern[str]) -> Iterator[tuple[Path, os.stat_result]]:
    """Files of the cache directory whose whole name matches. Another process may remove any of them at any time."""
    with suppress(OSError):
        for path in sorted(cache_directory().iterdir()):
            if names.fullmatch(path.name):
                with suppress(OSError):
                    yield path, path.stat()
