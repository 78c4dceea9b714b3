"""JSON as models write it: keys without quotes, strings between marks of their own."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

SPACE = re.compile(r"\s*")
WORD = re.compile(r"\w+")


class Dialect(NamedTuple):
    """
    unquoted_keys : a key may be a bare word
    string_marks : pairs of marks around strings, in which nothing is escaped
    """

    unquoted_keys: bool = False
    string_marks: Sequence[tuple[str, str]] = ()


def parse(text: str, dialect: Dialect) -> Any:
    """The value that a text is.

    Raises:
        ValueError: it is none.
    """
    reader = _Reader(text, dialect)
    try:
        value = reader.value()
    except RecursionError as error:
        raise ValueError("too many lists in each other") from error
    if not reader.at_end():
        raise ValueError("text after the value")
    return value


class _Reader:
    def __init__(self, text: str, dialect: Dialect) -> None:
        self._text, self._dialect, self._at = text, dialect, 0
        self._decoder = json.JSONDecoder()

    def at_end(self) -> bool:
        self._skip()
        return self._at == len(self._text)

    def value(self) -> Any:
        if self._next("{"):
            return dict(self._items("}", self._pair))
        if self._next("["):
            return list(self._items("]", self.value))
        marked = self._marked()
        if marked is not None:
            return marked
        value, self._at = self._decoder.raw_decode(self._text, self._at)
        return value

    def _items(self, end: str, item: Any) -> list[Any]:
        items: list[Any] = []
        if self._next(end):
            return items
        while True:
            items.append(item())
            if self._next(end):
                return items
            self._expect(",")

    def _pair(self) -> tuple[str, Any]:
        key = self._marked()
        if key is None:
            word = WORD.match(self._text, self._at) if self._dialect.unquoted_keys else None
            if word is None:
                key, self._at = self._decoder.raw_decode(self._text, self._at)
            else:
                key, self._at = word[0], word.end()
        if not isinstance(key, str):
            raise ValueError(f"{key!r} is no key")
        self._expect(":")
        return key, self.value()

    def _marked(self) -> str | None:
        """A string between marks, if one begins here."""
        self._skip()
        for opening, closing in self._dialect.string_marks:
            if self._text.startswith(opening, self._at):
                start = self._at + len(opening)
                end = self._text.find(closing, start)
                if end < 0:
                    raise ValueError("a string without an end")
                self._at = end + len(closing)
                return self._text[start:end]
        return None

    def _expect(self, character: str) -> None:
        if not self._next(character):
            raise ValueError(f"no {character!r} at {self._at}")

    def _next(self, character: str) -> bool:
        self._skip()
        if not self._text.startswith(character, self._at):
            return False
        self._at += 1
        return True

    def _skip(self) -> None:
        found = SPACE.match(self._text, self._at)
        assert found is not None, "it matches nothing too"
        self._at = found.end()
