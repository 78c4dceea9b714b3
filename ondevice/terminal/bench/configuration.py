"""One way of decoding that a benchmark measures."""

from __future__ import annotations

from argparse import ArgumentTypeError
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from ondevice.drafters import registry
from ondevice.terminal.options import drafter

if TYPE_CHECKING:
    from ondevice.options import GenerationKeywords, ScheduleName

ENGINES = ("simd", "ort")
SCHEDULES = ("heuristic", "auto")


@dataclass(frozen=True)
class Configuration:
    """A drafter with a draft length: a number, or the name of a schedule that chooses it."""

    drafter: str
    length: str

    def options(self) -> GenerationKeywords:
        """Keywords of `Model.stream`."""
        if self == PLAIN:
            return {"drafter": registry.NONE}
        if self.length in SCHEDULES:
            return {"drafter": self.drafter, "num_assistant_tokens_schedule": cast("ScheduleName", self.length)}
        length = int(self.length)
        return {
            "drafter": self.drafter,
            "num_assistant_tokens_schedule": "constant",
            "num_assistant_tokens": length,
        }


PLAIN = Configuration(registry.NONE, "0")


def combine(drafters: Iterable[str], lengths: Iterable[str]) -> list[Configuration]:
    """Plain decoding, then every drafter with every length."""
    lengths = list(lengths)
    return [PLAIN, *(Configuration(drafter, length) for drafter in drafters for length in lengths)]


def parse_drafters(words: str) -> list[str]:
    chosen = _split(words)
    return [drafter(word) for word in chosen if word != registry.NONE]  # plain decoding is always measured


def parse_lengths(words: str) -> list[str]:
    chosen = _split(words)
    for word in chosen:
        if word not in SCHEDULES and not (word.isdecimal() and int(word) > 0):
            raise ArgumentTypeError(f"{word!r} is neither a number from 1 on nor one of {', '.join(SCHEDULES)}")
    return chosen


def parse_engines(words: str) -> list[str]:
    chosen = _split(words)
    for word in chosen:
        if word not in ENGINES:
            raise ArgumentTypeError(f"{word!r} is none of {', '.join(ENGINES)}")
    return chosen


def parse_threads(words: str) -> list[int]:
    chosen = _split(words)
    for word in chosen:
        if not (word.isdecimal() and int(word) > 0):
            raise ArgumentTypeError(f"{word!r} is not a number from 1 on")
    return [int(word) for word in chosen]


def _split(words: str) -> list[str]:
    chosen = list(dict.fromkeys(word.strip() for word in words.split(",") if word.strip()))
    if not chosen:
        raise ArgumentTypeError("the list is empty")
    return chosen
