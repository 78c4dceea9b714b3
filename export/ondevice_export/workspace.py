"""The hidden directory in which a bundle is made, and the removal of directories that killed exports left behind."""

from __future__ import annotations

import os
import re
import secrets
import shutil
import sys
import time
from contextlib import suppress
from pathlib import Path

if sys.platform != "win32":
    import fcntl

_MAKING, _RETIRED = ".partial-", ".old-"

_NAME = re.compile(r"\.(?P<name>.+)(?P<kind>\.partial-|\.old-)[0-9a-f]{8}", re.DOTALL)

ABANDONED_S = 86400
"""Age in seconds after which a directory counts as abandoned, if the system or disk has no locks on directories."""


class Workspace:
    """A directory `.NAME.partial-RANDOM` next to `out`, locked until it is closed or the process ends.

    The name is random because process ids repeat: in containers, every export may have the same id.
    """

    def __init__(self, out: Path) -> None:
        while True:
            self.directory = out.with_name(f".{out.name}{_MAKING}{secrets.token_hex(4)}")
            self.directory.mkdir()
            self._handle = _open(self.directory)
            if _lock(self._handle) is not False and self.directory.exists():
                return
            self._release()  # another process removed it as abandoned before it was locked

    def close(self) -> None:
        """Remove the directory unless it was renamed, and release its lock."""
        shutil.rmtree(self.directory, ignore_errors=True)
        self._release()

    def _release(self) -> None:
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None


def retired_name(directory: Path) -> Path:
    """The temporary name of an older bundle while a workspace's directory replaces it."""
    return directory.with_name(directory.name.replace(_MAKING, _RETIRED))


def clean(parent: Path) -> None:
    """Remove the temporary directories that killed exports left in a directory.

    An export that was killed between its last two renames has renamed an older bundle and not yet replaced it; that
    bundle gets its name back.
    """
    found = [(path, match) for path in sorted(parent.iterdir()) if (match := _NAME.fullmatch(path.name))]
    for path, match in found:
        if match["kind"] == _MAKING and not _is_made(path):
            shutil.rmtree(path, ignore_errors=True)
    for path, match in found:
        if match["kind"] == _MAKING or path.with_name(path.name.replace(_RETIRED, _MAKING)).exists():
            continue  # an export is still using it
        with suppress(OSError):
            if parent.joinpath(match["name"]).exists():
                shutil.rmtree(path)
            else:
                path.rename(parent / match["name"])


def _is_made(directory: Path) -> bool:
    """Whether a process still writes the directory: it is locked or, on systems without locks, less than a day old."""
    handle = _open(directory)
    try:
        locked = _lock(handle)
    finally:
        if handle is not None:
            os.close(handle)
    if locked is None:
        try:
            return time.time() - directory.stat().st_mtime < ABANDONED_S
        except OSError:
            return False
    return not locked


def _open(directory: Path) -> int | None:
    if sys.platform == "win32":
        return None
    try:
        return os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:
        return None


def _lock(handle: int | None) -> bool | None:
    """Try to take the lock: True if it was free, False if another process holds it, None if there are no locks."""
    if sys.platform == "win32" or handle is None:
        return None
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True
