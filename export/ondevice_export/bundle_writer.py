"""Writes a bundle into a temporary sibling directory and renames it, so that it appears complete or not at all."""

from __future__ import annotations

import dataclasses
import os
import re
import secrets
import shutil
import sys
import time
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

from ondevice.bundle import MANIFEST, sha256
from ondevice.bundle_format.manifest import FileEntry, Manifest
from ondevice.bundle_format.tensor_table import TensorTable
from ondevice.errors import UsageError
from ondevice.files import lock, rename_over

_MAKING, _RETIRED = ".partial-", ".old-"

_NAME = re.compile(r"\.(?P<name>.+)(?P<kind>\.partial-|\.old-)[0-9a-f]{8}", re.DOTALL)

ABANDONED_S = 86400
"""Age in seconds after which a directory counts as abandoned, if the system or disk has no locks on directories."""


class BundleWriter:
    """Collects a bundle's files in a hidden sibling directory of `out`.

    `commit` renames the directory to `out`; leaving the context without a commit removes it. A killed export leaves its
    directory behind, and the next export to the same parent directory removes it.
    """

    def __init__(self, out: Path) -> None:
        self.out = out
        self._workspace: Workspace | None = None

    def __enter__(self) -> Self:
        check_replaceable(self.out)
        self.out.parent.mkdir(parents=True, exist_ok=True)
        clean(self.out.parent)
        self._workspace = Workspace(self.out)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._workspace is not None:
            self._workspace.close()

    @property
    def directory(self) -> Path:
        """The temporary directory in which the files are collected."""
        assert self._workspace is not None, "within the context only"
        return self._workspace.directory

    def commit(self, manifest: Manifest, tensors: dict[str, TensorTable]) -> None:
        """Write `bundle.json` with the size and SHA-256 of every file, then rename the directory to `out`.

        An older bundle at `out` is replaced.

        Raises:
            BundleCorruptError: the tensor tables do not match the model, so no engine would load the bundle.
        """
        files = {path.name: _seal(path) for path in sorted(self.directory.iterdir())}
        manifest = dataclasses.replace(manifest, files=files, tensors=tensors)
        manifest.check_tensors()
        path = self.directory / MANIFEST
        path.write_text(manifest.to_json(), encoding="utf-8")
        _seal(path)
        check_replaceable(self.out)
        retired = retired_name(self.directory)
        rename_over(self.directory, self.out, retired)
        shutil.rmtree(retired, ignore_errors=True)


def check_replaceable(out: Path) -> None:
    """Check that an export may write to `out`: it is missing, an empty directory, or an older bundle.

    Raises:
        UsageError: `out` is a file, or a directory that is neither empty nor a bundle.
    """
    if not out.exists() and not out.is_symlink():
        return
    if not out.is_dir():
        raise UsageError(f"{out} exists and is not a directory: choose another --out")
    if any(out.iterdir()) and not (out / MANIFEST).is_file():
        raise UsageError(f"{out} is neither a bundle nor empty, it will not be overwritten: choose another --out")


def _seal(path: Path) -> FileEntry:
    """Flush a file to the disk and return its size and SHA-256."""
    with path.open("rb+") as file:
        os.fsync(file.fileno())
    return FileEntry(path.stat().st_size, sha256(path))


class Workspace:
    """A directory `.NAME.partial-RANDOM` next to `out`, locked until it is closed or the process ends.

    The name is random because process ids repeat: in containers, every export may have the same id.
    """

    def __init__(self, out: Path) -> None:
        while True:
            self.directory = out.with_name(f".{out.name}{_MAKING}{secrets.token_hex(4)}")
            self.directory.mkdir()
            self._handle = _open(self.directory)
            if self._handle is None or (lock(self._handle) is not False and self.directory.exists()):
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
        locked = None if handle is None else lock(handle)
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
