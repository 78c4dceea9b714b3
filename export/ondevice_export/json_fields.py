"""Checked access to the JSON files of a checkpoint."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ondevice.errors import CheckpointError


class Fields:
    """Typed access to one JSON object; says which file and field is wrong."""

    def __init__(self, data: Mapping[str, Any], origin: str) -> None:
        self.data = data
        self.origin = origin

    def integer(self, name: str, default: int, minimum: int = 1) -> int:
        value = self.data.get(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
            raise CheckpointError(f"{self.origin}: {name} is {value!r}, expected a whole number from {minimum}")
        return value

    def number(self, name: str, default: float) -> float:
        value = self.data.get(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value <= 0:
            raise CheckpointError(f"{self.origin}: {name} is {value!r}, expected a positive number")
        return float(value)

    def flag(self, name: str, default: bool = False) -> bool:
        value = self.data.get(name, default)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise CheckpointError(f"{self.origin}: {name} is {value!r}, expected true or false")
        return value

    def mapping(self, name: str, default: Mapping[str, Any]) -> Fields:
        value = self.data.get(name)
        value = default if value is None else value
        if not isinstance(value, Mapping):
            raise CheckpointError(f"{self.origin}: {name} is {value!r}, expected an object")
        return Fields(value, f"{self.origin}: {name}")


def read_json(path: Path) -> dict[str, Any]:
    """Parse a JSON object.

    Raises:
        CheckpointError: the file is missing or is no JSON object.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} is missing: a checkpoint has a config.json and *.safetensors files") from error
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(data, dict):
        raise CheckpointError(f"{path} holds no JSON object")
    return data
