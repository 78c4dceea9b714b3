"""The file of a pack: written into the cache directory at the first start of a bundle, mapped at later ones.

`open_pack` maps a file whose checksums are right, or packs the weights and writes one; a small pack is made in memory,
and the file of one of medium size is read on Linux.
While it packs, another thread compares the bundle's files with their hashes (`HashCheck`). Before it writes, unused
packs are removed (`pack_cache`).
"""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as TooLong
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Literal, Self

import numpy as np
from numpy.typing import NDArray

from ondevice.engines.simd.pack_cache import mark_used, remove_unfinished, remove_unused
from ondevice.engines.simd.pack_layout import PAGE, PackLayout
from ondevice.engines.simd.tensor_files import TensorFiles
from ondevice.errors import OndeviceError
from ondevice.files import lock, make_cache_directory, nearest, replacing, trusted, write_obstacle
from ondevice.machine import ask_for_huge_pages, cache_directory, private_memory, total_bytes
from ondevice.preparation import Preparation
from ondevice.progress import Advance, counted

POLL_S = 0.1
"""Seconds between two progress reports."""


class _CancelledError(Exception):
    """The verification's result is not needed any more."""


class HashCheck:
    """A thread that compares a bundle's files with their sha256 while they are packed, until the block is left.

    It reads as fast as two threads pack: sha256 takes 0.85 s of a core per GB, reading included. A faster checksum
    would find damage too, but can be forged: packs are named by the hashes in the manifest, and a bundle that listed
    another one's hashes would leave its own weights under the other's name.
    """

    def __init__(self, files: TensorFiles) -> None:
        self._pool = ThreadPoolExecutor(1)
        self._lock = threading.Lock()
        self._unreported = 0
        self._cancelled = False
        self._result: Future[None] = self._pool.submit(files.verify, self._advance)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._cancelled = True
        self._pool.shutdown()

    def bytes_read(self) -> int:
        """Bytes that were read since the last call."""
        with self._lock:
            count, self._unreported = self._unreported, 0
        return count

    def wait(self, meanwhile: Callable[[], None]) -> None:
        """Wait until all is verified, calling `meanwhile` every POLL_S seconds.

        Raises:
            BundleCorruptError: a file is not what the manifest says.
        """
        while True:
            try:
                return self._result.result(POLL_S)
            except TooLong:
                if self._result.done():
                    raise
                meanwhile()

    def _advance(self, count: int) -> None:
        if self._cancelled:
            raise _CancelledError
        with self._lock:
            self._unreported += count


SMALL = 1 << 26
"""Largest pack that is not kept on disk, in bytes: it is made at every start, in 0.1 s."""

READ = 1 << 28
"""Largest pack in bytes that Linux reads into huge pages; a larger one is mapped, so that processes share its memory.

SmolLM2's (109 MB): forwards of 1 to 8 rows took 0.78 to 0.88 of the time, a start 0.45 s in place of 0.51, or 0.7 where
huge pages were rare. E2B's shape (1.3 GB) took 3 s to read where they were (Intel Xeon, virtual machine).
"""

HUGE_PAGE = 1 << 21
"""Bytes of a huge page on Linux with pages of 4 KiB.

A file that is written in such pieces, or read with that advice, lies in huge pages of the page cache where the file
system has them (ext4 since Linux 6.16), and so do mappings of it. At E2B's shape forwards of 1 to 8 rows then take 0.94
to 0.99 of the time (AMD Zen 4, Linux 6.18), and packing 0.2 s more per GB, or 1 to 2 where the system has to move other
pages for them.
"""

FLUSHED = 1 << 26
"""Bytes after which written pages are flushed: otherwise a memory card takes a minute more after progress shows 100
%."""

Status = Literal["packed", "missing", "damaged", "small", "unwritable"]
"""A missing or damaged pack is written at the next start; a small or unwritable one is made in memory at every
start."""

_log = logging.getLogger("ondevice")


@dataclass(frozen=True, eq=False)
class PackState:
    """The pack of a bundle on this machine, existing or not.

    size : its size in bytes
    path : the path of its file; None if it is too small to be kept
    pack : uint8[size], the mapped file; None if there is none with the right size and first page, or if another user
        may have written it
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
        """Why the file cannot be written; None if it can, or exists already."""
        return None if self.path is None or self.pack is not None else _obstacle(self.path, self.size)


def find_pack(layout: PackLayout, content: str) -> PackState:
    """Look for the pack of a bundle. No more than its first page is read.

    Args:
        layout: the layout, with all matrices.
        content: a hash of the weights; see `TensorFiles.content`.
    """
    if layout.size <= SMALL:
        return PackState(layout.size, None)
    name = hashlib.sha256(content.encode() + layout.digest()).hexdigest()[:40]
    path = cache_directory() / f"{name}.pack"
    return PackState(layout.size, path, _mapped(path, layout))


def open_pack(
    layout: PackLayout, files: TensorFiles, threads: int, preparation: Preparation | None = None
) -> NDArray[np.uint8]:
    """The pack of a bundle: mapped from the cache directory if its checksums are right, else made now and left there.

    Args:
        layout: the layout, with all matrices.
        files: the files that the matrices were read from.
        threads: number of threads that pack.
        preparation: reports the bytes that are read and packed.

    Raises:
        BundleCorruptError: the files are not what the manifest says. Their weights must not be left in a pack that is
            named by the manifest's hashes.
    """
    preparation = preparation or Preparation()
    state = find_pack(layout, files.content())
    path = state.path
    if path is None:
        return pack_in_memory(layout, threads)
    if state.pack is not None:
        pack = _read(path, state.pack)
        if layout.intact(pack, threads, preparation.check):
            mark_used(path)
            remove_unfinished()
            return pack
        state = PackState(state.size, path)
    remove_unused()  # first, because it may make room for the new pack
    size = layout.size / 1e9
    if obstacle := state.obstacle:
        preparation.announce(f"packing {size:.1f} GB of weights at every start, because {obstacle}")
        return pack_in_memory(layout, threads, counted(preparation.pack, layout.size))
    preparation.announce(f"packing {size:.1f} GB of weights once, into {path}")
    advance = counted(preparation.pack, files.size + layout.size)
    try:
        with HashCheck(files) as verification:
            _write_file(path, layout, threads, lambda count: advance(count + verification.bytes_read()), verification)
    except OSError as error:  # a full disk, for instance: the engine works without the file
        if isinstance(error, OndeviceError):
            raise
        _log.warning("%s could not be written (%s): the weights stay in memory", path, error.strerror)
        return pack_in_memory(layout, threads, advance)
    advance(files.size + layout.size)
    found = _mapped(path, layout)
    return pack_in_memory(layout, threads) if found is None else _read(path, found)


def pack_in_memory(layout: PackLayout, threads: int, advance: Advance = lambda count: None) -> NDArray[np.uint8]:
    """A pack that is kept nowhere; arguments as in `PackLayout.write_tiles`."""
    room = np.zeros(layout.size + PAGE, np.uint8)
    pack = room[-room.ctypes.data % PAGE :][: layout.size]
    layout.write(pack, threads, advance)
    return pack


def _mapped(path: Path, layout: PackLayout) -> NDArray[np.uint8] | None:
    try:
        # Opening a named pipe would block. A missing file comes first: it is not a reason for the warning of `trusted`.
        if not path.is_file() or not trusted(path):
            return None
        pack = np.memmap(path, np.uint8, "r")
    except (OSError, ValueError):
        return None
    return pack if layout.fits(pack) else None


def _read(path: Path, pack: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """A copy of the mapped file in huge pages; on other systems than Linux, and if it is large, the mapped file."""
    if sys.platform != "linux" or len(pack) > READ:
        # Not for a pack of which only the parts in use may be in memory: they would be read in larger ones.
        if 2 * len(pack) <= total_bytes(Path("/")):
            ask_for_huge_pages(pack._mmap)  # type: ignore[attr-defined]
        return pack
    with suppress(OSError), path.open("rb", buffering=0) as file:  # no room for a copy is not a reason to fail, either
        copy, done = np.frombuffer(private_memory(len(pack)), np.uint8), 0
        while count := file.readinto(copy[done:].data):
            done += count
        if done == len(pack):
            return copy
    return pack


def was_truncated(pack: NDArray[np.uint8]) -> bool:
    """Whether the file of a mapped pack has become shorter: reading missing pages would end the process (SIGBUS)."""
    mapping = getattr(pack, "_mmap", None)
    return mapping is not None and mapping.size() < len(pack)


def _obstacle(path: Path, size: int) -> str | None:
    """Why a file of `size` bytes cannot be written to `path`, whose directory need not exist yet; None if it can."""
    directory = path.parent
    if reason := write_obstacle(directory):
        return reason
    try:
        if path.is_dir():
            return f"{path} is a directory"
        free = shutil.disk_usage(nearest(directory)).free
    except OSError as error:
        return f"{directory} cannot be written to ({error.strerror})"
    return None if free > size else f"{directory} has room for {free / 1e9:.1f} GB only"


def _write_file(path: Path, layout: PackLayout, threads: int, advance: Advance, verification: HashCheck) -> None:
    """Write a pack, so that two processes at once each leave a complete one. Locked, it does not count as abandoned.

    The first page, without which the file counts as damaged, is written when all others are on the disk.
    """
    make_cache_directory(path.parent)
    # Read-only, because truncating a pack ends the processes that have it mapped.
    with replacing(path, prefix=path.stem, read_only=True) as file, _Flushes(file, layout.size) as flushes:
        handle = file.fileno()
        lock(handle)
        os.truncate(handle, layout.size)

        def written(count: int) -> None:
            flushes.add(count)
            advance(count)

        layout.write_tiles(flushes.put, threads, written)
        flushes.flush()
        page = layout.first_page(np.memmap(file, np.uint8, "r"), threads)
        flushes.put(0, page)
        flushes.flush()
        verification.wait(lambda: advance(0))


class _Flushes:
    """Writes to a file from several threads, and has another one flush it to the disk every FLUSHED bytes.

    A file that will be mapped is written so that Linux keeps it in huge pages. The page cache has large pages for large
    writes only, and threads write SHARE bytes at a time. So the first bytes of each HUGE_PAGE come after zeros for all
    of it, in one write.
    """

    def __init__(self, file: BinaryIO, size: int) -> None:
        self._file = file
        self._room = size if sys.platform == "linux" and size > READ else 0
        self._lock = threading.Lock()
        self._pool = ThreadPoolExecutor(1)
        self._flush: Future[None] | None = None
        self._zeros, self._begun = bytes(HUGE_PAGE), set[int]()
        self._waiting = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._pool.shutdown()

    def put(self, offset: int, data: NDArray[np.uint8]) -> None:
        """Write bytes at an offset."""
        with self._lock:
            for start in range(offset // HUGE_PAGE * HUGE_PAGE, min(offset + len(data), self._room), HUGE_PAGE):
                if start not in self._begun:
                    self._begun.add(start)
                    self._file.seek(start)
                    self._file.write(self._zeros[: self._room - start])
            self._file.seek(offset)
            self._file.write(data.data)

    def add(self, count: int) -> None:
        """Count written bytes. Waits for the last flush before it begins the next one."""
        self._waiting += count
        if self._waiting > FLUSHED:
            self._begin()

    def flush(self) -> None:
        """Wait until everything written is on the disk."""
        self._begin()
        if self._flush is not None:
            self._flush.result()

    def _begin(self) -> None:
        if self._flush is not None:
            self._flush.result()
        with self._lock:
            self._file.flush()
        self._waiting = 0
        self._flush = self._pool.submit(os.fsync, self._file.fileno())
