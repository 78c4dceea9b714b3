"""Keeps encoded media, so that the same picture in another conversation is not encoded again, nor decoded in a later
turn of its own.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable

from ondevice.arrays import Float32Array

MAX_KNOWN = 4096
"""Pieces whose digests are remembered, in about 1.5 MB."""

POLL_S = 0.02
"""Seconds between two questions whether a generation that waits for its turn was cancelled."""

Cancelled = Callable[[], bool]
"""Whether the generation that asks was cancelled."""


class EncodedMedia:
    """Soft rows by digest, of all generations of a model. The rows that were not used for longest are dropped first.

    Safe to use from several threads. What is not kept is encoded by one thread at a time: towers use all cores.
    """

    def __init__(self, most_bytes: int) -> None:
        """
        Args:
            most_bytes: bytes of rows to keep; larger ones are encoded whenever they are needed.
        """
        self._most = most_bytes
        self._bytes = 0
        self._rows: OrderedDict[bytes, Float32Array] = OrderedDict()
        self._lock, self._turn = threading.Lock(), threading.Lock()

    def rows(
        self, digest: bytes, encode: Callable[[Cancelled], Float32Array | None], cancelled: Cancelled
    ) -> Float32Array | None:
        """The soft rows of some content, float32[tokens, H], not to be written to; None after a cancellation.

        Args:
            digest: identifies the content and its number of tokens.
            encode: computes the rows, or returns None after a cancellation.
            cancelled: see `Cancelled`.
        """
        found = self._kept(digest)
        if found is not None:
            return found
        while not self._turn.acquire(timeout=POLL_S):
            if cancelled():
                return None
        try:
            found = self._kept(digest)  # another generation may have encoded it in the meantime
            if found is None:
                found = encode(cancelled)
                if found is not None:
                    self._keep(digest, found)
            return found
        finally:
            self._turn.release()

    def forget(self) -> None:
        """Drop all rows."""
        with self._lock:
            self._rows.clear()
            self._bytes = 0

    def _kept(self, digest: bytes) -> Float32Array | None:
        with self._lock:
            found = self._rows.get(digest)
            if found is not None:
                self._rows.move_to_end(digest)
            return found

    def _keep(self, digest: bytes, rows: Float32Array) -> None:
        with self._lock:
            self._rows[digest] = rows
            self._bytes += rows.nbytes
            while self._bytes > self._most:
                self._bytes -= self._rows.popitem(last=False)[1].nbytes


class KnownPieces:
    """Digest and number of soft tokens of each piece by its file, so that a file is decoded for its first prompt only:
    every turn of a chat has the pictures of all earlier ones, and a photo of 12 million pixels takes 0.3 s. The pieces
    that were not used for longest are forgotten first. Safe to use from several threads.
    """

    def __init__(self) -> None:
        self._pieces: OrderedDict[tuple[bytes, int], tuple[bytes, int]] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, identity: bytes | None, index: int) -> tuple[bytes, int] | None:
        """Digest and number of tokens of a piece; None if it is not known. Without an identity none is."""
        if identity is None:
            return None
        with self._lock:
            found = self._pieces.get((identity, index))
            if found is not None:
                self._pieces.move_to_end((identity, index))
            return found

    def keep(self, identity: bytes | None, index: int, found: tuple[bytes, int]) -> None:
        """Remember a piece, if there is an identity."""
        if identity is None:
            return
        with self._lock:
            self._pieces[identity, index] = found
            while len(self._pieces) > MAX_KNOWN:
                self._pieces.popitem(last=False)

    def forget(self) -> None:
        """Drop all pieces."""
        with self._lock:
            self._pieces.clear()
