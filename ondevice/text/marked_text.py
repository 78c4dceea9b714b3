"""Text that knows which of its characters are untrusted, whatever a chat template makes of it.

A template trims, splits, joins and compares what users wrote, so marks inside the text would change what it does.
`MarkedText` is a `str` like any other, equal to the same text without marks, and its methods return marked text. Those
that are not overridden here return plain text, which counts as trusted: `template_sandbox` lets a template call only
the methods of `METHODS`, and a test calls each of them with marked text.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, chain, islice, pairwise
from operator import index
from typing import SupportsIndex

METHODS = frozenset({
    "capitalize", "casefold", "count", "endswith", "find", "format", "index", "isalnum", "isalpha", "isascii",
    "isdecimal", "isdigit", "islower", "isnumeric", "isspace", "istitle", "isupper", "join", "lower", "lstrip",
    "partition", "removeprefix", "removesuffix", "replace", "rpartition", "rsplit", "rstrip", "split", "splitlines",
    "startswith", "strip", "swapcase", "title", "upper",
})  # fmt: skip
"""Methods of strings that a template may call; `join`, `replace` and `format` as the functions of the sandbox."""


class MarkedText(str):
    """A text with untrusted parts.

    bounds : positions where untrusted parts begin and end, by turns, ascending
    """

    __slots__ = ("bounds",)
    bounds: tuple[int, ...]

    def __new__(cls, text: str, bounds: Iterable[int] | None = None) -> MarkedText:
        """
        Args:
            text: the characters.
            bounds: see above; None: all of the text is untrusted.
        """
        made = super().__new__(cls, text)
        made.bounds = ((0, len(text)) if text else ()) if bounds is None else tuple(bounds)
        return made

    def parts(self) -> Iterator[tuple[str, bool]]:
        """The text in plain parts, each with whether it is untrusted."""
        plain = str.__str__(self)
        places = [0, *self.bounds, len(plain)]
        for number, (start, stop) in enumerate(pairwise(places)):
            if start < stop:
                yield plain[start:stop], number % 2 == 1

    def touches(self, start: int, stop: int) -> bool:
        """Whether one of the characters from `start` to `stop` is untrusted."""
        before = bisect_right(self.bounds, start)
        return before % 2 == 1 or bisect_left(self.bounds, stop) > before

    def covers(self, start: int, stop: int) -> bool:
        """Whether all characters from `start` to `stop` are untrusted."""
        before = bisect_right(self.bounds, start)
        return before % 2 == 1 and bisect_left(self.bounds, stop) == before

    def cut(self, start: int, stop: int) -> str:
        """The characters from `start` to `stop`."""
        if start >= stop:
            return ""
        first, last = bisect_right(self.bounds, start), bisect_left(self.bounds, stop)
        inner = [start] * (first % 2) + list(self.bounds[first:last]) + [stop] * (last % 2)
        return _marked(str.__getitem__(self, slice(start, stop)), [bound - start for bound in inner])

    # Methods of `str`, with marks.

    def __str__(self) -> str:
        return self

    def __getitem__(self, key: SupportsIndex | slice) -> str:
        text = super().__getitem__(key)
        if not isinstance(key, slice):
            place = index(key) % len(self)
            return self.cut(place, place + 1)
        start, stop, step = key.indices(len(self))
        return self.cut(start, stop) if step == 1 else _whole(text, self)

    def __iter__(self) -> Iterator[str]:
        return (self.cut(place, place + 1) for place in range(len(self)))

    def __add__(self, other: str) -> str:
        return concatenated((self, other)) if isinstance(other, str) else NotImplemented

    def __radd__(self, other: str) -> str:
        return concatenated((other, self)) if isinstance(other, str) else NotImplemented

    def __mul__(self, times: SupportsIndex) -> str:
        return concatenated([self] * times)

    __rmul__ = __mul__

    def strip(self, chars: str | None = None, /) -> str:
        return self.cut(len(self) - len(super().lstrip(chars)), len(super().rstrip(chars)))

    def lstrip(self, chars: str | None = None, /) -> str:
        return self.cut(len(self) - len(super().lstrip(chars)), len(self))

    def rstrip(self, chars: str | None = None, /) -> str:
        return self.cut(0, len(super().rstrip(chars)))

    def removeprefix(self, prefix: str, /) -> str:
        return self.cut(len(self) - len(super().removeprefix(prefix)), len(self))

    def removesuffix(self, suffix: str, /) -> str:
        return self.cut(0, len(super().removesuffix(suffix)))

    def replace(self, old: str, new: str, count: SupportsIndex = -1, /) -> str:
        return replaced(self, old, new, count)

    def join(self, items: Iterable[str], /) -> str:
        return joined(self, items)

    def split(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[str]:
        return self._placed(super().split(sep, maxsplit), sep)

    def rsplit(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[str]:
        return self._placed(super().rsplit(sep, maxsplit), sep)

    def splitlines(self, keepends: bool = False) -> list[str]:
        ends = accumulate(map(len, super().splitlines(True)))
        lengths = map(len, super().splitlines(keepends))
        starts = chain([0], ends)
        return [self.cut(start, start + length) for start, length in zip(starts, lengths, strict=False)]

    def partition(self, sep: str, /) -> tuple[str, str, str]:
        before, middle, _ = super().partition(sep)
        return self._in_three(len(before), len(middle))

    def rpartition(self, sep: str, /) -> tuple[str, str, str]:
        before, middle, _ = super().rpartition(sep)
        return self._in_three(len(before), len(middle))

    def capitalize(self) -> str:
        return recased(self, super().capitalize())

    def casefold(self) -> str:
        return recased(self, super().casefold())

    def lower(self) -> str:
        return recased(self, super().lower())

    def swapcase(self) -> str:
        return recased(self, super().swapcase())

    def title(self) -> str:
        return recased(self, super().title())

    def upper(self) -> str:
        return recased(self, super().upper())

    def _placed(self, pieces: list[str], sep: str | None) -> list[str]:
        """The pieces of a split with their marks."""
        made, place = [], 0
        for piece in pieces:
            place = self.find(piece, place) if sep is None else place
            made.append(self.cut(place, place + len(piece)))
            place += len(piece) + len(sep or "")
        return made

    def _in_three(self, first: int, second: int) -> tuple[str, str, str]:
        return self.cut(0, first), self.cut(first, first + second), self.cut(first + second, len(self))


def concatenated(pieces: Iterable[str]) -> str:
    """The texts one after another."""
    texts, bounds, length = list(pieces), list[int](), 0
    for text in texts:
        if isinstance(text, MarkedText) and text.bounds:
            joins = bool(bounds) and bounds[-1] == length + text.bounds[0]
            bounds[len(bounds) - joins :] = [length + bound for bound in text.bounds[joins:]]
        length += len(text)
    return _marked("".join(texts), bounds)


def joined(separator: str, items: Iterable[str]) -> str:
    """The texts with a separator between any two."""
    return concatenated(islice(chain.from_iterable((separator, item) for item in items), 1, None))


def replaced(text: str, old: str, new: str, count: SupportsIndex = -1) -> str:
    """`text.replace(old, new, count)`"""
    plain = str.replace(text, old, new, count)
    if not isinstance(text, MarkedText) and not isinstance(new, MarkedText):
        return plain
    return joined(new, text.split(old, count)) if old else _whole(plain, text, new)


def recased(text: str, made: str) -> str:
    """Text with other letters than the one that it was made of: with its marks, if each letter became one."""
    bounds = text.bounds if isinstance(text, MarkedText) else ()
    return _marked(made, bounds) if len(made) == len(text) else _whole(made, text)


def _marked(text: str, bounds: Sequence[int]) -> str:
    return MarkedText(text, bounds) if bounds else str.__str__(text)


def _whole(made: str, *sources: str) -> str:
    """A text whose characters cannot be told apart: untrusted if any of the texts that it was made of is."""
    untrusted = any(isinstance(source, MarkedText) and source.bounds for source in sources)
    return MarkedText(made) if untrusted else str.__str__(made)
