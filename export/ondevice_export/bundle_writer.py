"""Writes a bundle directory beside its place and renames it, so that it appears complete or not at all."""

from __future__ import annotations

import dataclasses
import os
import shutil
from pathlib import Path
from types import TracebackType
from typing import Self

from ondevice.bundle import MANIFEST, sha256
from ondevice.errors import UsageError
from ondevice.manifest import FileEntry, Manifest
from ondevice_export.workspace import Workspace, clean, retired_name


class BundleWriter:
    """Collects files in a hidden sibling of `out`; `commit` renames it into place, anything else removes it.

    An export that is killed leaves the sibling behind; the next one beside it removes it.
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
        """Where the files are collected."""
        assert self._workspace is not None, "within the context only"
        return self._workspace.directory

    def commit(self, manifest: Manifest) -> None:
        """Seal the files with `bundle.json` and put the directory in place of an older bundle."""
        files = {path.name: _seal(path) for path in sorted(self.directory.iterdir())}
        path = self.directory / MANIFEST
        path.write_text(dataclasses.replace(manifest, files=files).to_json(), encoding="utf-8")
        _seal(path)
        check_replaceable(self.out)
        retired = retired_name(self.directory)
        replaces = self.out.exists()
        if replaces:
            self.out.rename(retired)
        try:
            self.directory.rename(self.out)
        except BaseException:
            if replaces:
                retired.rename(self.out)
            raise
        shutil.rmtree(retired, ignore_errors=True)


def check_replaceable(out: Path) -> None:
    """Check that `out` is free, an empty directory or a bundle, which alone are replaced.

    Raises:
        UsageError: `out` is something else.
    """
    if not out.exists() and not out.is_symlink():
        return
    if not out.is_dir():
        raise UsageError(f"{out} exists and is no directory: choose another --out")
    if any(out.iterdir()) and not (out / MANIFEST).is_file():
        raise UsageError(f"{out} is neither a bundle nor empty, it will not be overwritten: choose another --out")


def _seal(path: Path) -> FileEntry:
    """Flush a file to the disk and take its digest."""
    with path.open("rb+") as file:
        os.fsync(file.fileno())
    return FileEntry(path.stat().st_size, sha256(path))
