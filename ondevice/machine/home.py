"""Home directories, and paths that begin with one."""

from __future__ import annotations

import os
from os import PathLike
from pathlib import Path

from ondevice.errors import UsageError

NOWHERE = Path(os.devnull)
"""Stands for a home that nobody knows: no directory can be made in it. One that others may write to, such as /tmp,
would not do: what lies in a cache is run.
"""


def home() -> Path:
    """The user's; NOWHERE where the system knows none, as for an unknown user id in a container."""
    try:
        return Path.home()
    except RuntimeError:
        return NOWHERE


def expanded(path: str | PathLike[str]) -> Path:
    """A path with the directory that `~` or `~user` stands for.

    Raises:
        UsageError: it is no path, or there is no such user.
    """
    try:
        return Path(path).expanduser()
    except TypeError as error:
        raise UsageError(f"a path is a string or a pathlib.Path, not {path!r:.99}") from error
    except RuntimeError as error:
        raise UsageError(f"{path}: there is no home directory of this name: write the path out") from error
