"""Files and directories that appear complete or not at all, and locks between processes. Standard library only."""

from __future__ import annotations

import json
import secrets
import shutil
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

if sys.platform != "win32":
    import fcntl


@contextmanager
def replacing(path: Path, prefix: str | None = None) -> Iterator[BinaryIO]:
    """Open a new file for writing, which gets the name `path` when the block ends, and is removed if that raises.

    So an interrupt leaves the old file, or none. A process that is killed leaves one whose name begins with `prefix`
    and ends with `.part` in the directory of `path`. The file has the permissions of the one that it replaces, else
    those of any new file.

    Raises:
        OSError: the file cannot be written; the old one stays.
    """
    new = path.with_name(f"{f'.{path.name}.' if prefix is None else prefix}{secrets.token_hex(8)}.part")
    try:
        file = new.open("x+b")
    except OSError as error:
        error.filename = str(path)  # the name that the caller knows
        raise
    try:
        with file:
            yield file
        with suppress(OSError):
            shutil.copymode(path, new)
        new.replace(path)
    except BaseException:
        with suppress(OSError):
            new.unlink()
        raise


def replace_json(path: Path, entry: Mapping[str, Any]) -> None:
    """Write a JSON file with `replacing`, and its directory if that is missing.

    Raises:
        OSError: the file cannot be written; the old content stays.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as file:
        file.write(json.dumps(entry, sort_keys=True).encode())


def rename_over(new: Path, path: Path, retired: Path) -> None:
    """Rename a directory to `path`. One that has this name already is renamed to `retired`, and back if that raises."""
    replaces = path.exists() or path.is_symlink()
    if replaces:
        path.rename(retired)
    try:
        new.rename(path)
    except BaseException:
        if replaces:
            retired.rename(path)
        raise


def lock(handle: int) -> bool | None:
    """Lock an open file or directory for this process, until it is closed or the process ends in any way.

    Returns:
        False if another process has locked it; None if the system, or the file system, has no locks.
    """
    if sys.platform == "win32":
        return None
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True
