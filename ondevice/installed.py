"""Bundles under the model home, which are called by name."""

from __future__ import annotations

import secrets
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ondevice.bundle import MANIFEST, Bundle, model_home
from ondevice.errors import BundleError
from ondevice.manifest import Manifest

_REMOVED = ".removed-"


@dataclass(frozen=True)
class Installed:
    """
    path : of the directory, which may be a link
    manifest : None where it cannot be used
    fault : why it cannot, else None
    """

    name: str
    path: Path
    manifest: Manifest | None
    fault: str | None = None

    @property
    def size(self) -> int:
        """Bytes on the disk."""
        return sum(each.stat().st_size for each in self.path.rglob("*") if each.is_file())


def installed() -> Iterator[Installed]:
    """All of them, by name."""
    for path in sorted(each.parent for each in model_home().glob(f"*/{MANIFEST}")):
        if path.name.startswith("."):
            continue  # one that is being made
        try:
            yield Installed(path.name, path, Bundle.open(path).manifest)
        except BundleError as error:
            yield Installed(path.name, path, None, str(error))


def delete(directory: Path) -> None:
    """Remove a directory, or a link to one and nothing behind it. Renamed first: it is never there by half.

    What is left of one that was killed meanwhile goes too.
    """
    if directory.is_symlink():
        directory.unlink()
        return
    directory.rename(directory.with_name(f".{directory.name}{_REMOVED}{secrets.token_hex(4)}"))
    for left in directory.parent.glob(f".*{_REMOVED}*"):
        shutil.rmtree(left, ignore_errors=True)
