"""Writes a bundle into a temporary sibling directory and renames it, so that it appears complete or not at all."""

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
from ondevice.tensor_table import TensorTable
from ondevice_export.workspace import Workspace, clean, retired_name


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
    """Check that an export may write to `out`: it is missing, an empty directory, or an older bundle.

    Raises:
        UsageError: `out` is a file, or a directory that is neither empty nor a bundle.
    """
    if not out.exists() and not out.is_symlink():
        return
    if not out.is_dir():
        raise UsageError(f"{out} exists and is no directory: choose another --out")
    if any(out.iterdir()) and not (out / MANIFEST).is_file():
        raise UsageError(f"{out} is neither a bundle nor empty, it will not be overwritten: choose another --out")


def _seal(path: Path) -> FileEntry:
    """Flush a file to the disk and return its size and SHA-256."""
    with path.open("rb+") as file:
        os.fsync(file.fileno())
    return FileEntry(path.stat().st_size, sha256(path))
