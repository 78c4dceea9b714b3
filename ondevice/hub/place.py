"""Where a bundle is fetched to: a hidden directory beside its name, renamed when it is complete."""

from __future__ import annotations

import os
import re
import secrets
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ondevice.bundle import Bundle, model_home
from ondevice.errors import BundleError, UsageError
from ondevice.manifest import Manifest

if sys.platform != "win32":
    import fcntl

_UNFINISHED = ".fetching"
_NAME = re.compile(r"[\w-][\w.+-]*")


class Place:
    """A name under the model home. What was fetched for it stays when a process is killed: the next one goes on."""

    def __init__(self, name: str) -> None:
        """
        Raises:
            UsageError: no directory can have such a name.
        """
        if not _NAME.fullmatch(name) or len(name) > 200:
            raise UsageError(f"{name!r:.99} is no name of a bundle: use letters, digits, points and hyphens")
        self.name = name
        self.out = model_home() / name
        self.unfinished = self.out.with_name(f".{name}{_UNFINISHED}")

    @property
    def is_taken(self) -> bool:
        return self.out.exists() or self.out.is_symlink()

    def has(self, manifest: Manifest) -> bool:
        """Whether that very bundle is there."""
        try:
            return Bundle.open(self.out).manifest == manifest
        except BundleError:
            return False

    @contextmanager
    def making(self) -> Iterator[Path]:
        """The directory that it is made in, for this process alone.

        Raises:
            UsageError: another process fetches the same.
        """
        self.unfinished.mkdir(parents=True, exist_ok=True)
        handle = None if sys.platform == "win32" else os.open(self.unfinished, os.O_RDONLY | os.O_DIRECTORY)
        try:
            if sys.platform != "win32" and handle is not None:
                try:
                    fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError as error:
                    raise UsageError(f"another process fetches {self.name}: wait for it") from error
                except OSError:  # a disk that knows no locks
                    pass
            yield self.unfinished
        finally:
            if handle is not None:
                os.close(handle)

    def keep_only(self, manifest: Manifest) -> None:
        """Remove what an earlier run fetched of another revision; files of the same name are compared by hash later."""
        for path in self.unfinished.rglob("*"):
            if path.is_file() and path.relative_to(self.unfinished).as_posix() not in manifest.files:
                path.unlink()

    def put(self) -> None:
        """Rename what was made to what it is called; what was called so goes."""
        retired = self.out.with_name(f".{self.name}.old-{secrets.token_hex(4)}")  # `ondevice export` would restore it
        if self.is_taken:
            self.out.rename(retired)
        try:
            self.unfinished.rename(self.out)
        except BaseException:
            if retired.exists():
                retired.rename(self.out)
            raise
        if retired.is_symlink():
            retired.unlink()
        else:
            shutil.rmtree(retired, ignore_errors=True)


def unfinished_names() -> list[str]:
    """Bundles whose download was ended."""
    found = model_home().glob(f".*{_UNFINISHED}")
    return sorted(path.name.removeprefix(".").removesuffix(_UNFINISHED) for path in found if path.is_dir())
