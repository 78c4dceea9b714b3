"""What the rendering of a chat template may still use, and what values weigh against it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from time import monotonic
from typing import Any

from jinja2 import TemplateRuntimeError

MOST_SECONDS = 10.0
"""For a rendering. Gemma 4's own template takes 0.0003 s per message."""

MOST_CHARACTERS = 1 << 27
"""Made in a rendering, intermediate results included. A context of 262,144 tokens has about 1.3 million."""

ITEM = 16
"""Characters that an item of a new list counts as."""

HELD = 64
"""Characters that a value counts as where a list is measured with all that it holds: that takes as long."""

MOST_BITS = 1 << 14
"""Of a whole number: Python itself prints none that is longer."""

SEQUENCES: tuple[Any, ...] = (list, tuple, set, frozenset, type({}.keys()), type({}.values()), type({}.items()))

NUMBER = re.compile(r"\d+")


class TemplateLimitError(TemplateRuntimeError):
    """A template that runs too long, or makes too much."""


class TooMuchError(TemplateLimitError):
    def __init__(self) -> None:
        super().__init__(f"it makes more than {MOST_CHARACTERS >> 20} million characters")


@dataclass
class Allowance:
    """What a rendering may still use."""

    characters: int = field(default_factory=lambda: MOST_CHARACTERS)
    deadline: float = field(default_factory=lambda: monotonic() + MOST_SECONDS)

    def spend(self, characters: int) -> None:
        """Count what was made, or what will be, and look at the clock.

        Raises:
            TemplateLimitError: it was too much.
        """
        self.characters -= characters
        if self.characters < 0:
            raise TooMuchError
        if monotonic() > self.deadline:
            raise TemplateLimitError(f"it runs for more than {MOST_SECONDS:.0f} s")


def weight(value: Any, most: int) -> int:
    """Characters of a value and of all that it holds; what it holds twice counts twice.

    Raises:
        TemplateLimitError: there are more than `most`.
    """
    total, left = 0, [value]
    while left:
        held = left.pop()
        total += HELD
        if isinstance(held, str):
            total += len(held)
        elif isinstance(held, SEQUENCES):
            left += held
        elif isinstance(held, int):
            total += held.bit_length()
        elif isinstance(held, Mapping):
            left += held.items()
        if total > most:
            raise TooMuchError
    return total


def check_bits(bits: int) -> None:
    if bits > MOST_BITS:
        raise TemplateLimitError("it computes with a number that is too long")


def numbers(form: str) -> int:
    """The sum of all numbers in a format, of which no field is wider."""
    return sum(int(digits) if len(digits) < 10 else 10 * MOST_CHARACTERS for digits in NUMBER.findall(form))


def repeated(value: Any, times: Any) -> int:
    """Characters of `value * times`, where that repeats something."""
    if not isinstance(times, int) or not isinstance(value, str | bytes | list | tuple):
        return 0
    return max(times, 0) * (len(value) if isinstance(value, str | bytes) else weight(value, MOST_CHARACTERS))
