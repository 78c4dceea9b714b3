"""A sequence on disk: its tokens and their keys and values, for a fixed system prompt on a small machine.

    magic, version u32, size of the header u64, header (JSON), rows of every cache, sha256 of all that came before

The header says which bundle, engine and KV cache the rows belong to. Everything is checked before a number is used: a
file is data from outside.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import struct
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from ondevice.contract import AttentionKind
from ondevice.engines.kv_cache import HeldRows, KVCache
from ondevice.errors import SessionFileError

MAGIC = b"ondevice session\n"
VERSION = 2
"""Of the layout of this file and of the rows in it."""

_PREFIX = struct.Struct("<IQ")
_DIGEST = 32
_MOST_HEADER = 1 << 24
"""Bytes: two million tokens."""

_PIECE = 1 << 24
"""Bytes read at a time."""


@dataclass(frozen=True)
class Origin:
    """What the rows of a file depend on.

    content : identifies the bundle's graphs and weights
    engine, kv_cache : whose rows, and of which type
    attention : by which they were computed
    """

    content: str
    engine: str
    kv_cache: str
    attention: str = "exact"


def write(
    path: str | PathLike[str], origin: Origin, tokens: Sequence[int], held: Mapping[AttentionKind, HeldRows]
) -> None:
    """Write a file under another name and rename it: an interrupt leaves the old one, or none.

    Raises:
        OSError: it cannot be written.
    """
    path = Path(path)
    bases = {kind: rows.base for kind, rows in held.items()}
    header = json.dumps({**dataclasses.asdict(origin), "bases": bases, "tokens": list(tokens)}).encode()
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".part", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            digest = hashlib.sha256()
            pieces: list[bytes | memoryview] = [MAGIC, _PREFIX.pack(VERSION, len(header)), header, *_pieces(held)]
            for piece in pieces:
                file.write(piece)
                digest.update(piece)
            file.write(digest.digest())
            file.flush()
            os.fsync(file.fileno())
        Path(name).replace(path)
    except BaseException:
        with suppress(OSError):
            Path(name).unlink()
        raise


def read(
    path: str | PathLike[str], origin: Origin, caches: Mapping[AttentionKind, KVCache], vocab_size: int, most: int
) -> tuple[list[int], dict[AttentionKind, HeldRows]]:
    """The tokens of a file and the rows that `caches` may adopt.

    Args:
        path: of the file.
        origin: what it must belong to.
        caches: those of a new sequence, which say how large rows are.
        vocab_size: above every token id.
        most: tokens at most.

    Raises:
        OSError: the file cannot be read.
        SessionFileError: it is no such file, damaged, or belongs to something else.
    """
    if not Path(path).is_file() and Path(path).exists():
        raise SessionFileError(path, "it is not a file")
    with Path(path).open("rb") as file:
        reader = _Reader(file, os.fstat(file.fileno()).st_size)
        try:
            return _read(reader, origin, caches, vocab_size, most)
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise SessionFileError(path, f"it is damaged ({error})") from error
        except _OtherError as error:
            raise SessionFileError(path, str(error)) from error


class _OtherError(Exception):
    """A whole file that belongs to something else."""


class _Reader:
    """Reads a file of known size and keeps the digest of what was read."""

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
        """Read as many bytes as there is room for."""
        for start in range(0, len(room), _PIECE):
            part = room[start : start + _PIECE]
            part[:] = self.take(len(part))

    def finish(self) -> None:
        """The digest, and nothing behind it."""
        expected = self._digest.digest()
        if self._left != _DIGEST or self._file.read(_DIGEST) != expected:
            raise ValueError("its sha256 differs")


def _read(
    reader: _Reader, origin: Origin, caches: Mapping[AttentionKind, KVCache], vocab_size: int, most: int
) -> tuple[list[int], dict[AttentionKind, HeldRows]]:
    if reader.take(len(MAGIC)) != MAGIC:
        raise ValueError("it does not begin like one")
    version, size = _PREFIX.unpack(reader.take(_PREFIX.size))
    if version != VERSION:
        raise _OtherError(f"it has version {version}, this ondevice reads {VERSION}")
    if size > _MOST_HEADER:
        raise ValueError("its header is too large")
    header = json.loads(reader.take(size))
    _check_origin(Origin(*(str(header[field.name]) for field in dataclasses.fields(Origin))), origin)
    tokens = [_number(token, vocab_size) for token in header["tokens"]]
    if not 0 < len(tokens) <= most:
        raise _OtherError(f"it has {len(tokens)} tokens, and here a sequence has 1 to {most}")
    bases = {kind: _number(header["bases"][kind], len(tokens) + 1) for kind in caches}
    held = {kind: cache.blank(bases[kind], len(tokens)) for kind, cache in caches.items()}
    for rows in held.values():
        for array in rows.rows.values():
            for part in array:
                reader.fill(_bytes(part))
    reader.finish()
    return tokens, held


def _check_origin(found: Origin, expected: Origin) -> None:
    if found.content != expected.content:
        raise _OtherError("it belongs to another bundle")
    if (found.engine, found.kv_cache) != (expected.engine, expected.kv_cache):
        raise _OtherError(
            f"it is of the {found.engine} engine with a {found.kv_cache} KV cache, "
            f"and this is {expected.engine} with {expected.kv_cache}"
        )
    if found.attention != expected.attention:
        raise _OtherError(f"its attention was {found.attention}, and here it is {expected.attention}")


def _number(value: Any, beyond: int) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < beyond:
        raise ValueError(f"{value!r} is not within 0..{beyond - 1}")
    return value


def _pieces(held: Mapping[AttentionKind, HeldRows]) -> list[memoryview]:
    """Keys, then values, of every layer; `held` rows are views of a cache, contiguous for either."""
    return [_bytes(part) for rows in held.values() for array in rows.rows.values() for part in array]


def _bytes(rows: NDArray[Any]) -> memoryview:
    return rows.reshape(-1).view(np.uint8).data
