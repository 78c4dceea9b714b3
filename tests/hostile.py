"""Hostile numbers, and files with right sizes and hashes that hold them: bundles and session files."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ondevice.bundle import MANIFEST
from ondevice.bundle_format.manifest import Manifest
from ondevice.bundle_format.tensor_table import Tensor
from ondevice.engines.session_file import MAGIC

Floats = NDArray[np.float32]

NUMBERS = {
    "nan": np.nan,
    "inf": np.inf,
    "-inf": -np.inf,
    "3e38": 3e38,
    "-3e38": -3e38,
    "denormal": 1e-45,
    "zero": 0.0,
    "equal": 0.25,
}
"""Numbers that break comparisons, conversions and sums, by name; and numbers that are all equal."""
INTEGERS = (-(2**63), -1, 0, 1, 6143, 6144, 2**31, 2**62)
"""Token ids, most of them outside the reference pair's vocabulary of 6,144."""
MIXTURES = ("nan among numbers", "all kinds")


def filled(kind: str, shape: int | tuple[int, ...], seed: int = 0) -> Floats:
    """float32 of a shape, filled with hostile numbers of a kind: one of NUMBERS, or of MIXTURES, which are random."""
    if kind in NUMBERS:
        return np.full(shape, NUMBERS[kind], np.float32)
    rng = np.random.default_rng(seed)
    ordinary = rng.standard_normal(shape).astype(np.float32)
    if kind == MIXTURES[0]:
        return np.where(rng.random(shape) < 0.1, np.float32(np.nan), ordinary)
    hostile = np.array([*NUMBERS.values(), 65504.0, 1e30, -1e-30], np.float32)
    return np.where(rng.random(shape) < 0.5, rng.choice(hostile, shape), ordinary)


KINDS = (*NUMBERS, *MIXTURES)


# Bundles.

Change = Callable[[Tensor, NDArray[np.uint8]], None]
"""Changes the bytes of a tensor, or of its scales and minimums, in place."""


def numbers(kind: str, share: float = 1.0, seed: int = 0) -> Change:
    """A change that writes hostile numbers to a share of a tensor's float32, or of its scales and minimums."""

    def change(tensor: Tensor, data: NDArray[np.uint8]) -> None:
        factors = [each for each in (tensor.scales, tensor.minimums) if each is not None]
        ranges = [(each.offset, each.bytes, each.dtype) for each in factors] or [
            (tensor.offset, tensor.bytes, "float32")
        ]
        for number, (offset, size, dtype) in enumerate(ranges):
            part = data[offset : offset + size].view(np.dtype(dtype))
            with np.errstate(over="ignore"):
                written = filled(kind, part.shape, seed).astype(dtype)
            chosen = np.random.default_rng(seed + number).random(part.shape) < share
            part[chosen] = written[chosen]

    return change


def token_ids(share: float = 1.0, seed: int = 0) -> Change:
    """A change that writes integers outside a vocabulary, and some inside, to a share of a tensor's int64."""

    def change(tensor: Tensor, data: NDArray[np.uint8]) -> None:
        rng = np.random.default_rng(seed)
        part = data[tensor.offset : tensor.offset + tensor.bytes].view(np.int64)
        chosen = rng.random(part.shape) < share
        part[chosen] = rng.choice(np.array(INTEGERS), int(chosen.sum()))

    return change


def hostile_bundle(source: Path, target: Path, changes: Mapping[str, Change]) -> Path:
    """Write a copy of a bundle with changed tensors, right sizes and right hashes; unchanged files are hard links.

    Args:
        source: the bundle.
        target: the directory of the copy; replaced if it exists.
        changes: name of a tensor, or of several that end so -> its change, in every graph.

    Returns:
        `target`.
    """
    manifest = Manifest.from_json((source / MANIFEST).read_text())
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir(parents=True)
    changed: dict[str, NDArray[np.uint8]] = {}
    for table in manifest.tensors.values():
        for name, tensor in table.tensors.items():
            for end, change in changes.items():
                if name.endswith(end):
                    if table.file not in changed:
                        changed[table.file] = np.fromfile(source / table.file, np.uint8)
                    change(tensor, changed[table.file])
    files: dict[str, bytes] = {name: data.tobytes() for name, data in changed.items()}
    for path in source.iterdir():
        if path.name not in files and path.name != MANIFEST:
            os.link(path, target / path.name)
    for name, content in files.items():
        (target / name).write_bytes(content)
    (target / MANIFEST).write_bytes(with_hashes((source / MANIFEST).read_bytes(), files))
    return target


def with_hashes(manifest: bytes, files: Mapping[str, bytes]) -> bytes:
    """The content of bundle.json with the sizes and hashes of these files.

    Raises:
        OndeviceError: the result is no valid bundle.json, as with an empty file.
    """
    data: dict[str, Any] = json.loads(manifest)
    for name, content in files.items():
        data["files"][name] = {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    return Manifest.from_json(json.dumps(data)).to_json().encode()


# Session files.


def hostile_session(path: Path, change: Callable[[NDArray[np.uint8]], None]) -> None:
    """Change the rows of a session file in place; its sha256 is then right again.

    change : is given the bytes of all rows
    """
    content = np.fromfile(path, np.uint8)
    body = content[:-32]
    change(body[_rows_begin(content.tobytes()) :])
    content[-32:] = np.frombuffer(hashlib.sha256(body.tobytes()).digest(), np.uint8)
    content.tofile(path)


def _rows_begin(content: bytes) -> int:
    """The offset of the first row: see `session_file`."""
    prefix = struct.Struct("<IQ")
    _, header = prefix.unpack_from(content, len(MAGIC))
    return len(MAGIC) + prefix.size + int(header)


def patterns(kind: str, dtype: str, seed: int = 0) -> Callable[[NDArray[np.uint8]], None]:
    """A change of rows: numbers of a kind as `dtype`, or random bytes for the kind "random"."""

    def change(rows: NDArray[np.uint8]) -> None:
        if kind == "random":
            rows[:] = np.random.default_rng(seed).integers(0, 256, len(rows))
            return
        size = np.dtype(dtype).itemsize
        with np.errstate(over="ignore"):
            part = rows[: len(rows) // size * size]
            part[:] = filled(kind, len(part) // size, seed).astype(dtype).view(np.uint8)

    return change
