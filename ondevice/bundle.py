"""Opens a bundle: finds its directory, checks the manifest and every file's place and size."""

from __future__ import annotations

import hashlib
import json
import os
import stat
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from ondevice.errors import BundleCorruptError, BundleNotFoundError
from ondevice.machine import expanded, home
from ondevice.manifest import Manifest
from ondevice.progress import Advance, Progress, counted, silent

MANIFEST = "bundle.json"
TOKENIZER, CHAT_TEMPLATE, GENERATION_CONFIG = "tokenizer.json", "chat_template.jinja", "generation_config.json"
RESPONSE_TEMPLATE = "response_template.json"
"""How to tell a reply's thoughts, calls and answer apart; transformers keeps it in `tokenizer_config.json`."""

PIECE = 1 << 20
"""Bytes that are hashed at a time."""

MOST_BYTES = 1 << 24
"""Of a manifest: real ones have some ten kilobytes."""


@dataclass(frozen=True)
class Bundle:
    """An opened bundle: its directory and its manifest."""

    path: Path
    manifest: Manifest

    @classmethod
    def open(cls, location: str | Path, *, verify_hashes: bool = False, on_hash: Progress = silent) -> Bundle:
        """Find a bundle and check its manifest, that every file lies inside it, and every size.

        Args:
            location: a directory, or a name under the model home.
            verify_hashes: read every file and compare its sha256 too, that of bundle.json included.
            on_hash: hears of the bytes that were read to that end.

        Raises:
            BundleNotFoundError: there is none.
            BundleCorruptError: a file is missing, of another size or content, or outside the directory.
            UnsupportedBundleError: a schema of another version.
        """
        path = _locate(location)
        bundle = cls(path, Manifest.from_json(_read_manifest(path / MANIFEST)))
        bundle._check_files()
        if verify_hashes:
            bundle._check_hashes(on_hash)
        return bundle

    @property
    def content(self) -> str:
        """Identifies graphs, weights and texts: the sha256 of all names and hashes that the manifest lists."""
        listed = sorted((name, entry.sha256) for name, entry in self.manifest.files.items())
        return hashlib.sha256(json.dumps(listed).encode()).hexdigest()

    def file(self, name: str) -> Path | None:
        """The path of a file that the manifest lists, else None."""
        return self.path / name if name in self.manifest.files else None

    def graph(self, name: str) -> Path:
        """The path of a graph that the manifest names and must list."""
        if name not in self.manifest.files:
            raise BundleCorruptError(f"bundle.json names the graph {name} and does not list it: export it again")
        return self.path / name

    def verify(self, name: str, advance: Advance) -> None:
        """Compare a file's sha256 with the manifest's; raises BundleCorruptError where they differ."""
        file = self.path / name
        if sha256(file, advance) != self.manifest.files[name].sha256:
            raise BundleCorruptError(f"{file} was altered (its sha256 differs): export the bundle again")

    def _check_files(self) -> None:
        check_names(self.path, self.manifest)
        for name, entry in self.manifest.files.items():
            file = self.path / name
            size = _size(file)
            if size is None:
                raise BundleCorruptError(f"{file} is missing: export the bundle again")
            if size != entry.size:
                raise BundleCorruptError(f"{file} has {size} bytes instead of {entry.size}: export the bundle again")

    def _check_hashes(self, progress: Progress) -> None:
        if self.manifest.altered:
            raise BundleCorruptError(f"{self.path / MANIFEST} was altered (its own sha256 differs): export it again")
        advance = counted(progress, sum(entry.size for entry in self.manifest.files.values()))
        for name in self.manifest.files:
            self.verify(name, advance)


def check_names(directory: Path, manifest: Manifest) -> None:
    """Raises BundleCorruptError where a manifest names a file that would not lie in the bundle's directory."""
    root = directory.resolve()
    for name in manifest.files:
        if not name.isprintable() or len(name) > 255:  # NUL, surrogates, line breaks
            raise BundleCorruptError(f"bundle.json names {name!r:.99}, which is no file name: do not use it")
        if PurePosixPath(name).is_absolute() or "\\" in name or not _lies_in(root, directory / name):
            raise BundleCorruptError(f"bundle.json names {name!r}, which is outside the bundle: do not use it")


def sha256(path: Path, advance: Advance = lambda count: None) -> str:
    """The sha256 of a file in hexadecimal; `advance` hears of every piece that was read."""
    digest, piece = hashlib.sha256(), bytearray(PIECE)
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(piece):
            digest.update(memoryview(piece)[:count])
            advance(count)
    return digest.hexdigest()


def _read_manifest(path: Path) -> str:
    try:
        if path.stat().st_size > MOST_BYTES:
            raise BundleCorruptError(f"{path} has more than {MOST_BYTES} bytes: export the bundle again")
        return path.read_text("utf-8")
    except UnicodeDecodeError as error:
        raise BundleCorruptError(f"{path} is not UTF-8 text: export the bundle again") from error
    except OSError as error:
        raise BundleCorruptError(f"{path} cannot be read ({error.strerror})") from error


def _size(file: Path) -> int | None:
    """Bytes of a regular file; None where there is none, or none that can be asked."""
    try:
        status = file.stat()
    except OSError:
        return None
    return status.st_size if stat.S_ISREG(status.st_mode) else None


def _lies_in(root: Path, file: Path) -> bool:
    try:
        return file.resolve().is_relative_to(root)
    except (OSError, RuntimeError):  # links that lead in a circle
        return False


def model_home() -> Path:
    """Where bundles are looked up by name: `$ONDEVICE_HOME`, else `~/.ondevice`."""
    if chosen := os.environ.get("ONDEVICE_HOME"):
        return expanded(chosen)
    return home() / ".ondevice"


def is_bundle(location: str) -> bool:
    """Whether there is a bundle of that path or name; nothing is read."""
    try:
        _locate(location)
    except BundleNotFoundError:
        return False
    return True


def _locate(location: str | Path) -> Path:
    path = expanded(location)
    if (path / MANIFEST).is_file():
        return path
    if path.exists():
        raise BundleNotFoundError(path, f"no {MANIFEST} in it" if path.is_dir() else "it is not a directory")
    by_name = model_home() / path
    if not path.is_absolute() and ".." not in path.parts and (by_name / MANIFEST).is_file():
        return by_name
    raise BundleNotFoundError(location, f"no such directory, and no such name under {model_home()}")
