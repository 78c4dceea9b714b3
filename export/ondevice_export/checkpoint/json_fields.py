"""Checked access to the JSON files of a checkpoint."""

from __future__ import annotations

import errno
import json
import stat
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ondevice.errors import CheckpointError, reason

MOST = (1 << 31) - 1
"""Upper limit of any count in a configuration."""

MAX_BYTES = 1 << 26
"""Upper limit of a JSON file's size in bytes; the largest files of real checkpoints have some megabytes."""


class JsonFields:
    """Typed access to one JSON object; errors name the file and the field. A field without a default has to exist."""

    def __init__(self, data: Mapping[str, Any], origin: str) -> None:
        self.data = data
        self.origin = origin

    def integer(self, name: str, default: int | None = None, minimum: int = 1, maximum: int = MOST) -> int:
        value = self.data.get(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or not minimum <= value <= maximum:
            raise CheckpointError(
                f"{self.origin}: {self._said(name, value)}, expected a whole number from {minimum} to {maximum}"
            )
        return value

    def number(self, name: str, default: float | None = None, maximum: float = sys.float_info.max) -> float:
        value = self.data.get(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= maximum:
            upper = f" up to {maximum:g}" if maximum < sys.float_info.max else ""
            raise CheckpointError(f"{self.origin}: {self._said(name, value)}, expected a positive number{upper}")
        return float(value)

    def _said(self, name: str, value: Any) -> str:
        return f"{name} is {value!r:.99}" if name in self.data else f"{name} is missing"

    def flag(self, name: str, default: bool = False) -> bool:
        value = self.data.get(name, default)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise CheckpointError(f"{self.origin}: {name} is {value!r:.99}, expected true or false")
        return value

    def text(self, name: str, default: str) -> str:
        value = self.data.get(name, default)
        if not isinstance(value, str):
            raise CheckpointError(f"{self.origin}: {self._said(name, value)}, expected a text")
        return value

    def mapping(self, name: str, default: Mapping[str, Any]) -> JsonFields:
        value = self.data.get(name)
        value = default if value is None else value
        if not isinstance(value, Mapping):
            raise CheckpointError(f"{self.origin}: {name} is {value!r:.99}, expected an object")
        return JsonFields(value, f"{self.origin}: {name}")


def read_json(path: Path) -> dict[str, Any]:
    """Parse a file that holds a JSON object.

    Raises:
        CheckpointError: the file is missing, too large, no valid JSON, or no JSON object.
    """
    try:
        check_regular(path)
        if path.stat().st_size > MAX_BYTES:
            raise ValueError(f"it has more than {MAX_BYTES >> 20} MB")
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} is missing: a checkpoint has a config.json and *.safetensors files") from error
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read as JSON: {reason(error)}") from error
    if not isinstance(data, dict):
        raise CheckpointError(f"{path} holds no JSON object")
    return data


def check_regular(path: Path) -> None:
    """Raise OSError unless a path is a regular file; reading a named pipe could block for ever."""
    if not stat.S_ISREG(path.stat().st_mode):
        raise OSError(errno.EINVAL, "not a regular file")
