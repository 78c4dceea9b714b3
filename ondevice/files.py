"""Files that appear complete or not at all, locks between processes, and files that no other user can have written.

Uses the standard library only.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import secrets
import stat
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from ondevice.machine import cache_directory, home

if sys.platform != "win32":
    import fcntl

WRITABLE_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH
MAX_LINKS = 40
"""Symbolic links that a path may lead through, as in Linux."""

_log = logging.getLogger("ondevice")
_said: set[str] = set()
"""The reasons that were logged."""


@contextmanager
def replacing(path: Path, prefix: str | None = None, *, read_only: bool = False) -> Iterator[BinaryIO]:
    """Open a new file for writing, which gets the name `path` when the block ends, and is removed if that raises.

    So an interrupt leaves the old file, or none. A process that is killed leaves one whose name begins with `prefix`
    and ends with `.part` in the directory of `path`. The file has the permissions of the one that it replaces, else
    those of any new file; other users may not write to it, and nobody if it is `read_only`.

    Raises:
        OSError: the file cannot be written; the old one stays.
    """
    new = path.with_name(f"{f'.{path.name}.' if prefix is None else prefix}{secrets.token_hex(8)}.part")
    try:
        file = open(new, "x+b", opener=_open_for_this_user)  # noqa: SIM115
    except OSError as error:
        error.filename = str(path)  # the name that the caller knows
        raise
    try:
        with file:
            yield file
        with suppress(OSError):
            new.chmod(_permissions(path, new, read_only))
        new.replace(path)
    except BaseException as error:
        with suppress(OSError):
            new.unlink()
        if isinstance(error, OSError) and error.errno is not None and error.filename is None:
            error.filename = str(path)  # a write to a full disk names none
        raise


def replace_json(path: Path, entry: Mapping[str, Any]) -> None:
    """Write a JSON file with `replacing`.

    Raises:
        OSError: the file cannot be written; the old content stays.
    """
    with replacing(path) as file:
        file.write(json.dumps(entry, sort_keys=True).encode())


def _open_for_this_user(path: str, flags: int) -> int:
    """Open a new file to which no other user may write."""
    return os.open(path, flags, 0o666 & ~WRITABLE_BY_OTHERS)


def _permissions(old: Path, new: Path, read_only: bool) -> int:
    if read_only and os.name == "posix":  # Windows would refuse to replace it later
        return new.stat().st_mode & (stat.S_IRUSR | stat.S_IRGRP | stat.S_IROTH)
    return stat.S_IMODE((old if old.exists() else new).stat().st_mode) & ~WRITABLE_BY_OTHERS


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


# Trust.
#
# Machine code, packed weights and measurements of the cache directory are used without a proof of where they come from:
# a checksum beside a file finds damage, and whoever can write the file can write the checksum. So they are read only
# where no other user can have written them, by the rule with which ssh reads keys.


def trusted(path: Path) -> bool:
    """Whether a file or directory is there and is that of this user or of root.

    If another user could have written it, the reason is logged, once. What is missing is not trusted: another user
    might create it, in a directory such as /tmp, before it is opened.
    """
    try:
        return not _is_refused(path, _distrust(path))
    except OSError:
        return False


def distrust(path: Path) -> str | None:
    """Why another user could have written a file, or what is in a directory; None if none could, or if it is missing.

    It, and every directory and link on the way to it, must belong to this user or to root, and nobody else may write to
    it. Three things are allowed: a directory with the sticky bit, such as /tmp, in which others cannot replace what is
    this user's; the group of one user, which Debian and Fedora give to everybody, with rights to write; and anything
    above the home directory, because whoever can write there can replace all that is in it.

    On Windows it must be in the user's profile, whose access control lists have the same effect.
    """
    with suppress(OSError):  # missing, or not accessible: then it cannot be read either
        return _distrust(path)
    return None


def make_cache_directory(path: Path) -> None:
    """Create a directory in the cache directory, into which no other user may write.

    The cache directory itself, where it is missing, is for this user alone. Directories in it can be read by others, so
    that one which was made for all users can be shared.

    Raises:
        OSError: it cannot be created, or another user may write to it. This reason is logged, once.
    """
    root = cache_directory()
    for _ in range(2):  # again when it is there: another user may have been faster
        if _is_refused(path, distrust(path)):
            raise PermissionError(errno.EPERM, "other users may write to it", str(path))
        for each in reversed((path, *path.parents)):
            if not each.exists():
                each.mkdir(0o755 if root in each.parents else 0o700, exist_ok=True)


def write_obstacle(directory: Path) -> str | None:
    """Why no files can be kept in a directory, which need not exist yet; None if nothing is known against it."""
    if reason := distrust(directory):
        return reason
    try:
        there = nearest(directory)
        can_write = there.is_dir() and os.access(there, os.W_OK | os.X_OK)
    except OSError as error:
        return f"{directory} cannot be written to ({error.strerror})"
    return None if can_write else f"{directory} cannot be written to"


def nearest(directory: Path) -> Path:
    """The directory or, where it is missing, the nearest one above it that exists.

    Raises:
        OSError: one of them is not accessible.
    """
    return next(each for each in (directory, *directory.absolute().parents) if each.exists())


def _is_refused(path: Path, reason: str | None) -> bool:
    """Whether there is a reason not to use a path. It is logged, once."""
    if reason is not None and reason not in _said:
        _said.add(reason)
        _log.warning("not using %s: %s", path, reason)
    return reason is not None


def _distrust(path: Path) -> str | None:
    """`distrust` for a path that exists.

    Raises:
        OSError: it is missing or not accessible.
    """
    if sys.platform == "win32":
        if not path.resolve().is_relative_to(home().resolve()):
            return f"it is outside of your profile, {home()}"
        path.stat()
        return None
    above_home = {*home().absolute().parents, *home().resolve().parents}
    for place, status in _passed(path.absolute()):
        if place in above_home:
            continue
        if status.st_uid not in (os.geteuid(), 0):
            return f"{place} belongs to user {status.st_uid}, neither to you nor to root"
        if _others_may_write(place, status):
            return f"other users may write to {place} (chmod go-w {place})"
    return None


def _passed(path: Path) -> Iterator[tuple[Path, os.stat_result]]:
    """Every directory, link and file on the way to an absolute path, which is the last one, with its status."""
    rest, place, links = list(reversed(path.parts)), path, 0
    while rest:
        name = rest.pop()
        place = place.parent if name == os.pardir else place / name
        status = place.lstat()
        yield place, status
        if stat.S_ISLNK(status.st_mode):
            links += 1
            if links > MAX_LINKS:
                raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path))
            rest += reversed(place.readlink().parts)
            place = place.parent


def _others_may_write(place: Path, status: os.stat_result) -> bool:
    mode = status.st_mode
    if stat.S_ISLNK(mode) or stat.S_ISCHR(mode) or (stat.S_ISDIR(mode) and mode & stat.S_ISVTX):
        return False  # a device, such as `NO_HOME`, has nothing in it
    if mode & stat.S_IWGRP and (_has_access_list(place) or not _is_own_group(status.st_gid)):
        return True
    return bool(mode & stat.S_IWOTH)


def _has_access_list(place: Path) -> bool:
    """Whether a file has a POSIX access control list, in which the rights of the group are the most that users and
    groups in the list have.
    """
    if sys.platform != "linux":
        return False
    try:
        return bool(os.getxattr(place, "system.posix_acl_access"))
    except OSError:
        return False


def _is_own_group(number: int) -> bool:
    """Whether a group is this user's own: it has the user's name, is the user's first one, and has no other member."""
    if sys.platform == "win32":
        return False
    import grp
    import pwd

    try:
        group, user = grp.getgrgid(number), pwd.getpwuid(os.geteuid())
    except KeyError:
        return False
    return group.gr_name == user.pw_name and number == user.pw_gid and set(group.gr_mem) <= {user.pw_name}
