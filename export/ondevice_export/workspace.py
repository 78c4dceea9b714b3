"""The hidden directory in which a bundle is made, and what is left of those whose maker was killed."""

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
"""Seconds after which a directory is left over where the disk or the system knows no locks on directories."""


class Workspace:
    """A directory `.NAME.partial-RANDOM` beside `out`, locked as long as this process lives and has not closed it.

    The name is random because process ids repeat: in a container every export may have the same.
    """

    def __init__(self, out: Path) -> None:
        while True:
            self.directory = out.with_name(f".{out.name}{_MAKING}{secrets.token_hex(4)}")
            self.directory.mkdir()
            self._handle = _open(self.directory)
            if _lock(self._handle) is not False and self.directory.exists():
                return
            self._release()  # another process took it for a leftover, between the two steps above

    def close(self) -> None:
        """Remove the directory, unless it was renamed."""
        shutil.rmtree(self.directory, ignore_errors=True)
        self._release()

    def _release(self) -> None:
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None


def retired_name(directory: Path) -> Path:
    """What an older bundle is called while a workspace's directory takes its place."""
    return directory.with_name(directory.name.replace(_MAKING, _RETIRED))


def clean(parent: Path) -> None:
    """Remove what killed exports have left in a directory.

    One that was killed between its last two steps has renamed an older bundle and put none in its place: that one gets
    its name back.
    """
    found = [(path, match) for path in sorted(parent.iterdir()) if (match := _NAME.fullmatch(path.name))]
    for path, match in found:
        if match["kind"] == _MAKING and not _is_made(path):
            shutil.rmtree(path, ignore_errors=True)
    for path, match in found:
        if match["kind"] == _MAKING or path.with_name(path.name.replace(_RETIRED, _MAKING)).exists():
            continue  # its export is at work
        with suppress(OSError):
            if parent.joinpath(match["name"]).exists():
                shutil.rmtree(path)
            else:
                path.rename(parent / match["name"])


def _is_made(directory: Path) -> bool:
    """Whether a process is at work in it; after a day surely not, where the system knows no locks."""
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
    """Whether the lock was free and is taken now; None where there are no locks."""
    if sys.platform == "win32" or handle is None:
        return None
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True
