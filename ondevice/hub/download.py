"""One file from the hub, in as many connections as that takes."""

from __future__ import annotations

import hashlib
import os
import re
import time
from http.client import HTTPException, HTTPResponse
from pathlib import Path

from ondevice.errors import HubError, reason
from ondevice.hub.remote import BrokenConnectionError, Remote
from ondevice.manifest import FileEntry
from ondevice.progress import Advance

PIECE = 1 << 20
MOST_FAILURES = 6
"""Connections in a row that bring nothing."""

PAUSE_S = 0.5
"""After the first of them; twice as long after every further one."""


class Download:
    """A file that grows until it has all of its bytes, and is believed when their hash is right."""

    def __init__(self, remote: Remote, name: str, entry: FileEntry, path: Path, advance: Advance) -> None:
        """
        Args:
            path: where it grows; what an earlier run has left there counts.
            advance: hears of bytes that are there, and of those that are lost again, below 0.
        """
        self._remote = remote
        self._name = name
        self._entry = entry
        self._path = path
        self._advance = advance
        self._digest = hashlib.sha256()
        self._length = 0

    def run(self) -> None:
        """
        Raises:
            HubError: the hub cannot be reached, or has another file; what is there stays for the next run, unless it is
                wrong.
        """
        self._recall()
        recalled = self._length
        self._fetch()
        if not self._is_right() and recalled:  # perhaps what lay there was wrong
            self._restart()
            self._fetch()
        if not self._is_right():
            self._path.unlink()
            raise HubError(f"{self._name} of {self._remote.repository} is damaged or was altered: its sha256 is wrong")
        with self._path.open("rb+") as file:
            os.fsync(file.fileno())

    def _is_right(self) -> bool:
        return self._digest.hexdigest() == self._entry.sha256

    def _recall(self) -> None:
        """Take what is there already into the hash."""
        self._path.touch()
        if self._path.stat().st_size > self._entry.size:
            os.truncate(self._path, 0)
        with self._path.open("rb") as file:
            while piece := file.read(PIECE):
                self._count(piece)

    def _fetch(self) -> None:
        failures = 0
        while self._length < self._entry.size:
            before = self._length
            try:
                with self._remote.open(self._name, self._length) as response:
                    self._receive(response)
                problem = "the connection was closed"
            except (BrokenConnectionError, OSError, HTTPException) as error:
                if isinstance(error, OSError) and error.filename is not None:
                    raise  # of the disk
                problem = reason(error)
            if self._length >= self._entry.size:
                return
            failures = 1 if self._length > before else failures + 1
            if failures == MOST_FAILURES:
                raise HubError(
                    f"{self._name} could not be fetched whole: {problem}. The same command goes on from here"
                )
            time.sleep(PAUSE_S * 2 ** (failures - 1))

    def _receive(self, response: HTTPResponse) -> None:
        first, total = _range(response)
        if total not in (None, self._entry.size):
            raise HubError(
                f"{self._name} of {self._remote.repository} has {total} bytes, and bundle.json says {self._entry.size}"
            )
        if first == 0:
            self._restart()  # a server that knows no ranges begins again
        elif first != self._length:
            raise BrokenConnectionError(f"it sent bytes from {first} on, not {self._length}")
        with self._path.open("ab") as file:
            while piece := response.read(PIECE):
                if self._length + len(piece) > self._entry.size:
                    raise HubError(f"{self._name} of {self._remote.repository} is longer than bundle.json says")
                file.write(piece)
                self._count(piece)

    def _restart(self) -> None:
        if self._length:
            os.truncate(self._path, 0)
            self._advance(-self._length)
            self._digest, self._length = hashlib.sha256(), 0

    def _count(self, piece: bytes) -> None:
        self._digest.update(piece)
        self._length += len(piece)
        self._advance(len(piece))


def _range(response: HTTPResponse) -> tuple[int, int | None]:
    """Where an answer begins in its file, and the file's length where it is told."""
    if response.status == 206:
        found = re.fullmatch(r"bytes (\d+)-\d+/(\d+|\*)", response.headers.get("Content-Range", ""))
        if found is None:
            raise BrokenConnectionError("it does not say which bytes it sends")
        return int(found[1]), None if found[2] == "*" else int(found[2])
    length = response.headers.get("Content-Length", "")
    return 0, int(length) if length.isdecimal() else None
