"""Checks of single numbers in a configuration, which may come from an untrusted bundle."""

from __future__ import annotations

import math
from typing import Any

MAX_SIZE = (1 << 31) - 1
"""Largest value of any count in a model."""


class InvalidFieldError(ValueError):
    """A field of a configuration has a value that no model can have."""


def check_number(name: str, value: Any, most: int = MAX_SIZE, least: int = 1) -> None:
    """Raise InvalidFieldError unless `value` is an integer from `least` to `most`; `name` is for the message."""
    number = isinstance(value, int) and not isinstance(value, bool)
    require(number and least <= value <= most, f"{name} is {value!r:.99}, not a whole number from {least} to {most}")


def check_positive(name: str, value: float, most: float, least: float = 0.0) -> None:
    """Raise InvalidFieldError unless `value` is over 0 and from `least` to `most`; `name` is for the message."""
    number = math.isfinite(value) and 0 < value <= most and value >= least
    require(number, f"{name} is {value!r:.99}, not a number from {least:g} to {most:g}")


def require(condition: bool, reason: str) -> None:
    """Raise InvalidFieldError with the message `reason` unless `condition` holds."""
    if not condition:
        raise InvalidFieldError(reason)
