"""The file of a session: tokens and their keys and values. A small machine can so keep a fixed system prompt.

    magic, version u32, size of the header u64, header (JSON), rows of every cache, sha256 of all that came before

The header names the bundle, engine and KV cache type of the rows. A file is untrusted input: everything in it is
checked before it is used.
"""

from __future__ import annotations

import dataclasses
import errno
import hashlib
import json
import os
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from ondevice.bundle_format.graph_io import AttentionKind
from ondevice.engines.kv_cache import HeldRows, KVCache
from ondevice.engines.states import HeldStates
from ondevice.errors import SessionFileError
from ondevice.files import replacing

MAGIC = b"ondevice session\n"
VERSION = 5
"""Version of the layout of this file and of the rows in it."""

_PREFIX = struct.Struct("<IQ")
_DIGEST = 32
_MAX_HEADER = 1 << 24
"""Largest accepted header, in bytes: two million tokens."""

_PIECE = 1 << 24
"""Bytes per read."""

_MIN_TOKEN = -(1 << 63)
"""The tokens of soft rows are negative; see `Rows`."""


@dataclass(frozen=True)
class SessionOrigin:
    """The settings on which a sequence's keys and values depend; a file fits only an engine with the same.

    content : hash of the bundle's graphs and weights
    engine, kv_cache : the engine's name, and the number format of its caches
    attention : the type of attention that computed the rows
    """

    content: str
    engine: str
    kv_cache: str
    attention: str = "exact"


def write(
    path: str | PathLike[str],
    origin: SessionOrigin,
    tokens: Sequence[int],
    held: Mapping[AttentionKind, HeldRows],
    states: HeldStates | None = None,
) -> None:
    """Write a session file; an interrupt leaves the old file, or none.

    Args:
        path: the file to create or replace.
        origin: the settings that the rows depend on.
        tokens: the committed tokens.
        held: their rows, by kind of attention.
        states: the states of layers with the gated delta rule, after some of the tokens; None without any.

    Raises:
        OSError: it cannot be written, or is something other than a file, such as a device, which must not be replaced.
    """
    path = Path(path)
    # Not in `replacing`: a pack is written in the place of whatever lies there in the cache, a pipe too.
    if path.exists() and not path.is_file():
        raise FileExistsError(errno.EEXIST, "there is something that is not a file", str(path))
    bases = {kind: rows.base for kind, rows in held.items()}
    read = {} if states is None else {"read": states.length}
    header = json.dumps({**dataclasses.asdict(origin), "bases": bases, **read, "tokens": list(tokens)}).encode()
    with replacing(path) as file:
        digest = hashlib.sha256()
        pieces: list[bytes | memoryview] = [MAGIC, _PREFIX.pack(VERSION, len(header)), header, *_pieces(held)]
        pieces += [] if states is None else map(_bytes, states.arrays.values())
        for piece in pieces:
            file.write(piece)
            digest.update(piece)
        file.write(digest.digest())
        file.flush()
        os.fsync(file.fileno())


def read(
    path: str | PathLike[str],
    origin: SessionOrigin,
    caches: Mapping[AttentionKind, KVCache],
    vocab_size: int,
    most: int,
    *,
    states: HeldStates | None = None,
) -> tuple[list[int], dict[AttentionKind, HeldRows]]:
    """Read a session file.

    Args:
        path: the file.
        origin: the settings that it must have been written with.
        caches: the caches of a new sequence, from which the size of the rows follows.
        vocab_size: every token id must be smaller.
        most: most tokens that the file may have.
        states: those of a new sequence, which become those of the file; None without any.

    Returns:
        The tokens, and the rows for `caches` to adopt, by kind of attention.

    Raises:
        OSError: the file cannot be read.
        SessionFileError: it is not a session file, is damaged, or was written with other settings.
    """
    if not Path(path).is_file() and Path(path).exists():
        raise SessionFileError(path, "it is not a file")
    with Path(path).open("rb") as file:
        reader = _Reader(file, os.fstat(file.fileno()).st_size)
        try:
            return _read(reader, origin, caches, vocab_size, most, states=states)
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise SessionFileError(path, f"it is damaged ({error})") from error
        except _OtherError as error:
            raise SessionFileError(path, str(error)) from error


class _OtherError(Exception):
    """An undamaged file that was written with other settings."""


class _Reader:
    """Reads a file of known size and computes the sha256 of all bytes read."""

    def __init__(self, file: BinaryIO, size: int) -> None:
        self._file = file
        self._left = size
        self._digest = hashlib.sha256()

    def take(self, size: int) -> bytes:
        if size > self._left:
            raise ValueError("it ends too early")
        data = self._file.read(size)
        if len(data) != size:
            raise ValueError("it ends too early")
        self._left -= size
        self._digest.update(data)
        return data

    def fill(self, room: memoryview) -> None:
        """Fill a buffer from the file."""
        for start in range(0, len(room), _PIECE):
            part = room[start : start + _PIECE]
            part[:] = self.take(len(part))

    def finish(self) -> None:
        """Check that exactly the sha256 of all bytes read is left in the file."""
        expected = self._digest.digest()
        if self._left != _DIGEST or self._file.read(_DIGEST) != expected:
            raise ValueError("its sha256 differs")


def _read(
    reader: _Reader,
    origin: SessionOrigin,
    caches: Mapping[AttentionKind, KVCache],
    vocab_size: int,
    most: int,
    *,
    states: HeldStates | None,
) -> tuple[list[int], dict[AttentionKind, HeldRows]]:
    if reader.take(len(MAGIC)) != MAGIC:
        raise ValueError("it does not begin like one")
    version, size = _PREFIX.unpack(reader.take(_PREFIX.size))
    if version != VERSION:
        raise _OtherError(f"it has version {version}, this ondevice reads {VERSION}")
    if size > _MAX_HEADER:
        raise ValueError("its header is too large")
    header = json.loads(reader.take(size))
    _check_origin(SessionOrigin(*(str(header[field.name]) for field in dataclasses.fields(SessionOrigin))), origin)
    tokens = [_number(token, vocab_size, _MIN_TOKEN) for token in header["tokens"]]
    if not 0 < len(tokens) <= most:
        raise _OtherError(f"it has {len(tokens)} tokens, and here a sequence has 1 to {most}")
    bases = {kind: _number(header["bases"][kind], len(tokens) + 1) for kind in caches}
    length = len(tokens) if states is None else _number(header["read"], len(tokens) + 1)
    held = {kind: cache.blank(bases[kind], len(tokens), length) for kind, cache in caches.items()}
    for rows in held.values():
        for array in rows.rows.values():
            for part in array:
                reader.fill(_bytes(part))
    if states is not None:
        states.length = length
        for array in states.arrays.values():
            reader.fill(_bytes(array))
    reader.finish()
    return tokens, held


def _check_origin(found: SessionOrigin, expected: SessionOrigin) -> None:
    if found.content != expected.content:
        raise _OtherError("it belongs to another bundle")
    if (found.engine, found.kv_cache) != (expected.engine, expected.kv_cache):
        raise _OtherError(
            f"it is of the {found.engine} engine with a {found.kv_cache} KV cache, "
            f"and this is {expected.engine} with {expected.kv_cache}"
        )
    if found.attention != expected.attention:
        raise _OtherError(f"its attention was {found.attention}, and here it is {expected.attention}")


def _number(value: Any, beyond: int, least: int = 0) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value < beyond:
        raise ValueError(f"{value!r} is not within {least}..{beyond - 1}")
    return value


def _pieces(held: Mapping[AttentionKind, HeldRows]) -> list[memoryview]:
    """The bytes of every layer's keys, then of its values. In held rows, views of a cache, each is contiguous."""
    return [_bytes(part) for rows in held.values() for array in rows.rows.values() for part in array]


def _bytes(rows: NDArray[Any]) -> memoryview:
    return rows.reshape(-1).view(np.uint8).data
