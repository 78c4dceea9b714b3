"""The pack of a bundle: written into the cache directory at the first start, mapped at later ones."""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from ondevice.engines.simd.graph.sources import Sources
from ondevice.engines.simd.pack.cache import hold, mark_used, remove_unused
from ondevice.engines.simd.pack.layout import PAGE, PackLayout
from ondevice.engines.simd.pack.verification import Verification
from ondevice.errors import OndeviceError
from ondevice.machine import cache_directory
from ondevice.preparation import Preparation
from ondevice.progress import Advance, counted

SMALL = 1 << 26
"""Bytes up to which a pack is made anew at every start, in a tenth of a second, and not kept on disk."""

FLUSHED = 1 << 26
"""Bytes after which the disk is waited for: else a memory card would take a minute more when all seems done."""

Status = Literal["packed", "missing", "damaged", "small", "unwritable"]
"""A missing or damaged pack is written at the next start; a small or unwritable one is made in memory at each."""

_log = logging.getLogger("ondevice")


@dataclass(frozen=True, eq=False)
class PackState:
    """The pack of a bundle on this machine, or where it would be.

    size : bytes
    path : of the file; None where the pack is too small to be kept
    pack : uint8[size], the file mapped, where its size and first page are right
    """

    size: int
    path: Path | None
    pack: NDArray[np.uint8] | None = None

    @property
    def status(self) -> Status:
        if self.path is None:
            return "small"
        if self.pack is not None:
            return "packed"
        if self.obstacle is not None:
            return "unwritable"
        return "damaged" if self.path.exists() else "missing"

    @property
    def obstacle(self) -> str | None:
        """Why the file does not exist and cannot be written; None where it can, or exists."""
        return None if self.path is None or self.pack is not None else _obstacle(self.path, self.size)


def find_pack(layout: PackLayout, content: str) -> PackState:
    """Look for the pack of a bundle, without reading more than its first page.

    Args:
        layout: all matrices.
        content: a hash of the bundle's graphs and weights.
    """
    if layout.size <= SMALL:
        return PackState(layout.size, None)
    name = hashlib.sha256(content.encode() + layout.digest()).hexdigest()[:40]
    path = cache_directory() / f"{name}.pack"
    return PackState(layout.size, path, _mapped(path, layout))


def open_pack(
    layout: PackLayout, sources: Sources, threads: int, preparation: Preparation | None = None
) -> NDArray[np.uint8]:
    """The pack of a bundle: from the cache directory where its checksums are right, else made now and left there.

    Args:
        layout: all matrices.
        sources: what they were read from.
        threads: to pack with.
        preparation: hears of the bytes that are read and packed, where that takes seconds.

    Raises:
        BundleCorruptError: the sources are not what the manifest says, and would leave a pack under another's name.
    """
    preparation = preparation or Preparation()
    state = find_pack(layout, sources.content())
    path = state.path
    if path is None:
        return _in_memory(layout, threads)
    if state.pack is not None:
        if layout.intact(state.pack, threads, preparation.check):
            mark_used(path)
            return state.pack
        state = PackState(state.size, path)
    remove_unused()  # first of all: it may make the room that there was not
    size = layout.size / 1e9
    if obstacle := state.obstacle:
        preparation.announce(f"packing {size:.1f} GB of weights at every start, because {obstacle}")
        return _in_memory(layout, threads, counted(preparation.pack, layout.size))
    preparation.announce(f"packing {size:.1f} GB of weights once, into {path}")
    advance = counted(preparation.pack, sources.size + layout.size)
    try:
        with Verification(sources) as verification:
            _write_file(path, layout, threads, lambda count: advance(count + verification.news()), verification)
    except OSError as error:  # a full disk: the engine works all the same
        if isinstance(error, OndeviceError):
            raise
        _log.warning("%s could not be written (%s): the weights stay in memory", path, error.strerror)
        return _in_memory(layout, threads, advance)
    advance(sources.size + layout.size)
    found = _mapped(path, layout)
    return _in_memory(layout, threads) if found is None else found


def _in_memory(layout: PackLayout, threads: int, advance: Advance = lambda count: None) -> NDArray[np.uint8]:
    room = np.zeros(layout.size + PAGE, np.uint8)
    pack = room[-room.ctypes.data % PAGE :][: layout.size]
    layout.write(pack, threads, advance)
    return pack


def _mapped(path: Path, layout: PackLayout) -> NDArray[np.uint8] | None:
    try:
        if not path.is_file():  # to open a named pipe would wait for its other end
            return None
        pack = np.memmap(path, np.uint8, "r")
    except (OSError, ValueError):
        return None
    return pack if layout.fits(pack) else None


def was_truncated(pack: NDArray[np.uint8]) -> bool:
    """Whether the file of a mapped pack has become shorter: to read what it lost would end the process (SIGBUS)."""
    mapping = getattr(pack, "_mmap", None)
    return mapping is not None and mapping.size() < len(pack)


def _obstacle(path: Path, size: int) -> str | None:
    """Why no file of `size` bytes can be written to `path`, whose directory need not exist yet; None where it can."""
    directory = path.parent
    try:
        if path.is_dir():
            return f"{path} is a directory"
        there = next((path for path in (directory, *directory.parents) if path.exists()), directory)
        if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
            return f"{directory} cannot be written"
        free = shutil.disk_usage(there).free
    except OSError as error:
        return f"{directory} cannot be written ({error.strerror})"
    return None if free > size else f"{directory} has room for {free / 1e9:.1f} GB only"


def _write_file(path: Path, layout: PackLayout, threads: int, advance: Advance, verification: Verification) -> None:
    """Write a pack under another name and rename it: of two processes at once each leaves a whole one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=path.stem, suffix=".part", dir=path.parent)
    try:
        with os.fdopen(handle, "r+b") as file:
            hold(handle)
            os.truncate(handle, layout.size)
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(handle, 0, layout.size)
            pack = np.memmap(file, np.uint8, "r+")
            layout.write(pack, threads, _flushing(pack, advance), pack.flush)
            pack.flush()
            del pack
            os.fsync(handle)
            if os.name == "posix":  # a pack that is cut short while it is mapped ends the process
                os.fchmod(handle, 0o400)
        verification.wait(lambda: advance(0))
        Path(name).replace(path)
    except BaseException:
        with suppress(OSError):
            Path(name).unlink()
        raise


def _flushing(pack: np.memmap[Any, Any], advance: Advance) -> Advance:
    """`advance` that also waits for the disk, now and then."""
    waiting = 0

    def flushed(count: int) -> None:
        nonlocal waiting
        waiting += count
        if waiting > FLUSHED:
            pack.flush()
            waiting = 0
        advance(count)

    return flushed
