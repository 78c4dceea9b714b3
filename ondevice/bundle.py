"""Opens bundles, lists and deletes those under the model home.

A bundle is a directory with `bundle.json` (the manifest), ONNX graphs, weights and the files of the tokenizer. `Bundle`
finds the directory and checks the manifest, and that every listed file lies in the directory and has the listed size.
Start with `Bundle.open`. Bundles under the model home (`model_home`) are also found by name.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
import shutil
import stat
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from ondevice.bundle_format.manifest import Manifest
from ondevice.errors import BundleCorruptError, BundleError, BundleNotFoundError, UnsupportedBundleError, reason
from ondevice.files import make_cache_directory
from ondevice.machine import cache_directory, expanded, home
from ondevice.progress import Advance, Progress, counted, silent

MANIFEST = "bundle.json"
TOKENIZER, CHAT_TEMPLATE, GENERATION_CONFIG = "tokenizer.json", "chat_template.jinja", "generation_config.json"
RESPONSE_TEMPLATE = "response_template.json"
"""How a reply is divided into thoughts, tool calls and answer; transformers keeps this in `tokenizer_config.json`."""

SKIPPED_LAYERS = "skipped-layers.json"
"""The result of `ondevice tune`, which the manifest does not list."""

PIECE = 1 << 20
"""Bytes that `sha256` reads at a time."""

MAX_BYTES = 1 << 24
"""Largest manifest that is read, in bytes. Real ones have up to some hundred kilobytes, mostly tensor tables."""

_REMOVED = ".removed-"
"""Part of the name to which `delete` renames a directory."""


@dataclass(frozen=True)
class Bundle:
    """An opened bundle: its directory and its manifest."""

    path: Path
    manifest: Manifest

    @classmethod
    def open(cls, location: str | Path, *, verify_hashes: bool = False, on_hash: Progress = silent) -> Bundle:
        """Find a bundle, check its manifest, and check that every file lies in the directory and has the listed size.

        Args:
            location: a directory, or a name under the model home.
            verify_hashes: also read every file, bundle.json included, and compare its sha256.
            on_hash: called with the bytes hashed so far and the bytes in total.

        Raises:
            BundleNotFoundError: there is no bundle at `location`.
            BundleCorruptError: the manifest is invalid, or a file is missing, outside the directory, or has another
                size or content than the manifest says.
            UnsupportedBundleError: the manifest has another schema version.
        """
        path = _locate(location)
        text = _read_manifest(path / MANIFEST)
        try:
            bundle = cls(path, Manifest.from_json(text))
            check_names(path, bundle.manifest)
        except (BundleCorruptError, UnsupportedBundleError) as error:
            raise type(error)(f"{path}: {error}") from error
        bundle._check_sizes()
        if verify_hashes:
            bundle._check_hashes(on_hash)
        return bundle

    @property
    def content(self) -> str:
        """An identifier of the bundle's content: the sha256 of the names and hashes of all files in the manifest."""
        listed = sorted((name, entry.sha256) for name, entry in self.manifest.files.items())
        return hashlib.sha256(json.dumps(listed).encode()).hexdigest()

    @property
    def used_at(self) -> float | None:
        """Unix time of the last load of a bundle with this content on this machine; None if none is known."""
        try:
            return self._stamp.stat().st_mtime
        except OSError:
            return None

    def mark_used(self) -> None:
        """Note that the bundle is loaded now, where the cache directory can be written."""
        with suppress(OSError):
            make_cache_directory(self._stamp.parent)
            self._stamp.touch()

    @property
    def _stamp(self) -> Path:
        """A file whose date is that of the last load."""
        return cache_directory() / "used" / f"{self.content[:32]}.used"

    def file(self, name: str) -> Path | None:
        """The path of a file; None if the manifest does not list it."""
        return self.path / name if name in self.manifest.files else None

    def graph(self, name: str) -> Path:
        """The path of a graph file.

        Raises:
            BundleCorruptError: the manifest does not list the file.
        """
        if name not in self.manifest.files:
            raise BundleCorruptError(f"bundle.json names the graph {name} and does not list it: export it again")
        return self.path / name

    def verify(self, name: str, advance: Advance) -> None:
        """Compare a file's sha256 with the one in the manifest.

        Args:
            name: a file that the manifest lists.
            advance: called with the number of bytes of every piece that was read.

        Raises:
            BundleCorruptError: the hashes differ.
        """
        file = self.path / name
        if sha256(file, advance) != self.manifest.files[name].sha256:
            raise BundleCorruptError(f"{file} was altered (its sha256 differs): export the bundle again")

    def _check_sizes(self) -> None:
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
    """Check that every file that a manifest lists would lie in the bundle's directory, links followed.

    Raises:
        BundleCorruptError: a name is not a valid file name, or leads out of the directory.
    """
    root = directory.resolve()
    for name in manifest.files:
        if not name.isprintable() or len(name) > 255:  # NUL, surrogates, line breaks
            raise BundleCorruptError(f"bundle.json names {name!r:.99}, which is not a file name: do not use it")
        if PurePosixPath(name).is_absolute() or "\\" in name or not _lies_in(root, directory / name):
            raise BundleCorruptError(f"bundle.json names {name!r}, which is outside the bundle: do not use it")


def sha256(path: Path, advance: Advance = lambda count: None) -> str:
    """The sha256 of a file in hexadecimal. `advance` is called with the number of bytes of every piece read."""
    digest, piece = hashlib.sha256(), bytearray(PIECE)
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(piece):
            digest.update(memoryview(piece)[:count])
            advance(count)
    return digest.hexdigest()


def model_home() -> Path:
    """The directory in which bundles are found by name: `$ONDEVICE_HOME`, else `~/.ondevice`."""
    if chosen := os.environ.get("ONDEVICE_HOME"):
        return expanded(chosen)
    return home() / ".ondevice"


EXPORTS = "bundles"
"""The directory in which `ondevice export` makes bundles, unless $ONDEVICE_HOME is set."""


def exports_directory() -> Path:
    """The parent directory of bundles that are exported without a place of their own."""
    return model_home() if os.environ.get("ONDEVICE_HOME") else Path(EXPORTS)


GGUF = ".gguf"
GGUF_PART = re.compile(r"(?P<name>.*)-\d{5}-of-(?P<count>\d{5})\.gguf")
"""The name of one of the files that a large GGUF model was split into, such as `model-00001-of-00003.gguf`."""


def name_of_export(path: Path, *, is_file: bool) -> str:
    """The name of the bundle that `ondevice export` makes of a GGUF file or of a checkpoint's directory.

    A directory `target` has its parent's name: a pair lies in directories `target` and `drafter`.
    """
    if is_file:
        part = GGUF_PART.fullmatch(path.name)
        return part["name"] if part else path.stem
    return path.parent.name if path.name == "target" else path.name


def is_bundle(location: str) -> bool:
    """Whether a path or name leads to a directory with a `bundle.json`; the file itself is not read."""
    try:
        _locate(location)
    except BundleNotFoundError:
        return False
    return True


@dataclass(frozen=True)
class Installed:
    """A bundle under the model home.

    name : name of its directory
    path : its directory, which may be a symbolic link
    bundle : None if it cannot be used
    fault : why it cannot be used, else None
    """

    name: str
    path: Path
    bundle: Bundle | None
    fault: str | None = None

    @property
    def size(self) -> int:
        """Bytes of all files in the directory, listed in the manifest or not."""
        return sum(each.stat().st_size for each in self.path.rglob("*") if each.is_file())


def bundles_in(directory: Path) -> list[Path]:
    """Directories of bundles in a directory, sorted by name, without those that are still being written."""
    return sorted(path.parent for path in directory.glob(f"*/{MANIFEST}") if not path.parent.name.startswith("."))


def installed(directory: Path | None = None) -> Iterator[Installed]:
    """All bundles in a directory, by default the model home, sorted by name."""
    for path in bundles_in(directory or model_home()):
        try:
            yield Installed(path.name, path, Bundle.open(path))
        except BundleError as error:
            yield Installed(path.name, path, None, str(error))


def delete(directory: Path) -> None:
    """Remove a directory with all its files. Of a symbolic link only the link is removed.

    The directory is renamed first, so a half-deleted bundle is never found under its name. Directories that an earlier,
    interrupted call left behind are removed too.
    """
    if directory.is_symlink():
        directory.unlink()
        return
    directory.rename(directory.with_name(f".{directory.name}{_REMOVED}{secrets.token_hex(4)}"))
    for left in directory.parent.glob(f".*{_REMOVED}*"):
        shutil.rmtree(left, ignore_errors=True)


def _locate(location: str | Path) -> Path:
    """The directory of a bundle, by its path or by its name under the model home.

    Raises:
        BundleNotFoundError: there is no such bundle.
    """
    path = expanded(location)
    by_name = model_home() / path
    try:
        if (path / MANIFEST).is_file():
            return path
        if path.exists():
            obstacle = f"no {MANIFEST} in it" if path.is_dir() else "it is not a directory"
        elif not path.is_absolute() and ".." not in path.parts and (by_name / MANIFEST).is_file():
            return by_name
        else:
            obstacle = f"no such directory, and no such name under {model_home()}"
    except OSError as error:  # for instance a name that is too long
        raise BundleNotFoundError(location, reason(error)) from error
    raise BundleNotFoundError(location, obstacle)


def _read_manifest(path: Path) -> str:
    try:
        if path.stat().st_size > MAX_BYTES:
            raise BundleCorruptError(f"{path} has more than {MAX_BYTES} bytes: export the bundle again")
        return path.read_text("utf-8")
    except UnicodeDecodeError as error:
        raise BundleCorruptError(f"{path} is not UTF-8 text: export the bundle again") from error
    except OSError as error:
        raise BundleCorruptError(f"{path} cannot be read ({error.strerror})") from error


def _size(file: Path) -> int | None:
    """Size of a regular file in bytes; None if there is no such file, or its status cannot be read."""
    try:
        status = file.stat()
    except OSError:
        return None
    return status.st_size if stat.S_ISREG(status.st_mode) else None


def _lies_in(root: Path, file: Path) -> bool:
    try:
        return file.resolve().is_relative_to(root)
    except (OSError, RuntimeError):  # symbolic links that form a loop
        return False
