"""Remembers what the bundles of this machine were made of: a checkpoint, a GGUF file or a repository of the hub.

`bundle.json` names the source and never its path, so two checkpoints of one name look the same there, and so does one
that was changed. `ondevice export` and `ondevice pull` therefore leave a record in the cache directory, and `ondevice
run` asks for it before it takes a bundle that it finds under the name of a source. Where the record is missing, the
sha256 of a GGUF file and the id of a repository are compared with `bundle.json`.
"""

from __future__ import annotations

import hashlib
from contextlib import suppress
from pathlib import Path

from ondevice.bundle import Bundle, sha256
from ondevice.files import make_cache_directory
from ondevice.machine import cache_directory, expanded
from ondevice.progress import Progress, counted, silent


def note_origin(bundle: Bundle, source: str) -> None:
    """Remember that a bundle was made of a source, as it is now, where the cache directory can be written."""
    with suppress(OSError):
        record = _record(bundle, source)
        make_cache_directory(record.parent)
        record.touch()


def is_made_of(bundle: Bundle, source: str, on_hash: Progress = silent) -> bool:
    """Whether a bundle was made of a source, as it is now; False where this cannot be told.

    Args:
        bundle: a bundle that has the source's name.
        source: a checkpoint's directory, a GGUF file, or OWNER/NAME.
        on_hash: called with the bytes of a GGUF file that were hashed so far, and with all of them. That happens once
            per file (5 GB take 3 to 15 s): the result is remembered.
    """
    if _record(bundle, source).exists():
        return True
    named, path = bundle.manifest.sources.get("target"), expanded(source)
    if named is None or path.is_dir():
        return False
    if not path.exists():
        return named.id == source
    if named.file != path.name or named.sha256 != sha256(path, counted(on_hash, path.stat().st_size)):
        return False
    note_origin(bundle, source)
    return True


def _record(bundle: Bundle, source: str) -> Path:
    """An empty file. Its name is a hash of the bundle's content and of the source: the name of a repository, or the
    path of local files with their sizes and dates.
    """
    path = expanded(source)
    key: list[object] = [bundle.content, str(path.resolve()) if path.exists() else source]
    if path.exists():
        files = [path] if path.is_file() else sorted(filter(Path.is_file, path.iterdir()))
        key += [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    return cache_directory() / "origins" / f"{hashlib.sha256(repr(key).encode()).hexdigest()[:32]}.origin"
