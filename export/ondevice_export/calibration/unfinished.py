"""A directory in which a calibrated export is made, and from which the same command goes on if it was ended.

    .NAME.calibration/     beside the bundle NAME
        state.json         the key of the export, and how many layers are complete
        int8/              the bundle that the text runs through
        target.onnx.data   the target's weights, with the matrices of those layers
        hidden-L.npy, ...  the text's states after layer L: see `LayerInputs`

A calibrated export takes minutes, half an hour for E2B's shape, where any other takes seconds.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from ondevice.errors import UsageError
from ondevice.files import lock, replace_json
from ondevice_export.checkpoint.source import Note

_STATE, _LOCK = "state.json", "lock"


class UnfinishedExport:
    """The directory of an export that is being made.

    Attributes:
        directory: its path.
        layers: number of layers whose matrices are complete in the data file; the text's states are those after them.
    """

    def __init__(self, directory: Path, key: str, layers: int) -> None:
        self.directory, self.layers = directory, layers
        self._key = key

    def save(self, layers: int) -> None:
        """Note that so many layers are complete. Their matrices and the text's states are on the disk already."""
        replace_json(self.directory / _STATE, {"key": self._key, "layers": layers})
        self.layers = layers


@contextmanager
def unfinished_export(out: Path, key: str, note: Note) -> Iterator[UnfinishedExport]:
    """Open the directory of the export to `out`, with what an earlier one with the same key has left.

    It is removed when the block ends. An interrupt leaves it, as a kill does; an error would come again.

    Args:
        out: the bundle's directory.
        key: is the same for exports of the same bytes.
        note: called with one-line messages for the user.

    Raises:
        UsageError: another process makes this export.
    """
    directory = _directory(out)
    with _locked(directory, out):
        layers = _layers(directory, key)
        if layers:
            note(f"continuing after layer {layers} of an interrupted export")
        else:
            _clear(directory)
        export, kept = UnfinishedExport(directory, key, layers), False
        try:
            yield export
        except BaseException as error:
            kept = export.layers > 0 and not isinstance(error, Exception)
            raise
        finally:
            if kept:
                note(f"the same command continues after layer {export.layers}; {directory} is kept for it")
            else:
                _clear(directory)


@contextmanager
def _locked(directory: Path, out: Path) -> Iterator[None]:
    """Make a directory and hold its lock; it is removed if nothing else is in it at the end."""
    while True:
        directory.mkdir(parents=True, exist_ok=True)
        handle = os.open(directory / _LOCK, os.O_RDWR | os.O_CREAT, 0o600)
        if lock(handle) is False:
            os.close(handle)
            raise UsageError(f"another process exports to {out} with --calibrate: wait for it, or choose another --out")
        if (directory / _LOCK).exists():
            break
        os.close(handle)  # another process removed it before it was locked
    try:
        yield
    finally:
        empty = directory.is_dir() and [path.name for path in directory.iterdir()] == [_LOCK]
        if empty and sys.platform != "win32":
            shutil.rmtree(directory, ignore_errors=True)
        os.close(handle)
        if empty and sys.platform == "win32":  # which keeps an open file
            shutil.rmtree(directory, ignore_errors=True)


def remove_unfinished(out: Path) -> None:
    """Remove what an export to `out` has left, unless a process is making it."""
    directory = _directory(out)
    if directory.is_dir():
        with suppress(UsageError, OSError), unfinished_export(out, "", lambda line: None):
            pass


def _directory(out: Path) -> Path:
    return out.with_name(f".{out.name}.calibration")


def _layers(directory: Path, key: str) -> int:
    """The layers that an export with this key has completed; 0 if there is none."""
    try:
        state: Any = json.loads((directory / _STATE).read_text("utf-8"))
        return int(state["layers"]) if state["key"] == key else 0
    except (OSError, ValueError, TypeError, KeyError):
        return 0


def _clear(directory: Path) -> None:
    """Remove everything but the lock; the state first, so that a process that is killed here begins anew."""
    with suppress(OSError):
        (directory / _STATE).unlink()
    for path in directory.iterdir():
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        elif path.name != _LOCK:
            with suppress(OSError):
                path.unlink()
