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


class BundleWriter:
    """Collects files in a hidden sibling of `out`; `commit` renames it into place, anything else removes it."""

    def __init__(self, out: Path) -> None:
        self.out = out
        self.directory = out.with_name(f".{out.name}.partial-{os.getpid()}")
        self._retired = out.with_name(f".{out.name}.old-{os.getpid()}")

    def __enter__(self) -> Self:
        check_replaceable(self.out)
        self.out.parent.mkdir(parents=True, exist_ok=True)
        self.directory.mkdir()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        shutil.rmtree(self.directory, ignore_errors=True)  # gone already where it was committed

    def commit(self, manifest: Manifest) -> None:
        """Seal the files with `bundle.json` and put the directory in place of an older bundle."""
        files = {path.name: _seal(path) for path in sorted(self.directory.iterdir())}
        path = self.directory / MANIFEST
        path.write_text(dataclasses.replace(manifest, files=files).to_json(), encoding="utf-8")
        _seal(path)
        check_replaceable(self.out)
        replaces = self.out.exists()
        if replaces:
            self.out.rename(self._retired)
        try:
            self.directory.rename(self.out)
        except BaseException:
            if replaces:
                self._retired.rename(self.out)
            raise
        shutil.rmtree(self._retired, ignore_errors=True)


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
