"""Texts of tool calls as models write them: JSON with marked strings and bare keys, or a list of calls as in Python.

Models write anything, so both readers take a time in proportion to the text, compute nothing, and refuse what is nested
too deep. `ast.literal_eval` was rejected: it takes hundreds of bytes for each character, and refuses line breaks in
strings, JSON's words among Python's, and names with dashes, all of which models write.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

Item = TypeVar("Item")

MOST = sys.float_info.max

MAX_DEPTH = 100
"""Lists and mappings in each other, as Python writes them."""

HALF = re.compile(r"(?i)(?P<whole>\\\\|\\ud[89ab][\da-f]{2}\\ud[c-f][\da-f]{2})|\\ud[89a-f][\da-f]{2}", re.ASCII)
"""Half a surrogate pair as JSON writes it, which is not text that could be sent; and what looks like it: an escaped
backslash, or a whole pair."""

SPACE = re.compile(r"\s*")
NAME = re.compile(r"([\w.-]+)\s*\(")
KEY = re.compile(r"([^=,()'\"{}]+)=")
NUMBER = re.compile(r"(?ai)[+-]?(?=\.?\d)[\d_]*+(?P<fraction>(?:\.[\d_]*+)?(?:e[+-]?\d++)?)")
WORD = re.compile("[A-Za-z]+")
WORDS = {"True": True, "False": False, "None": None, "true": True, "false": False, "null": None}


def _string(mark: str, name: str) -> str:
    """A pattern of Python's strings between these quotes, or three of them, with line breaks too. A quote after which
    nothing follows that may follow a string is part of it: templates write texts between quotes as they are, `'It's'`.

    Without possessive repeats, which Python before 3.11.5 does not match in groups.
    """
    behind = r"\s*[,:)\]}]|\s+['\"]"
    return (
        rf"{mark * 3}(?P<{name}_3>(?:[^\\{mark}]|\\.|{mark}(?!{mark * 2}))*){mark * 3}"
        rf"|{mark}(?!{mark * 2})(?P<{name}>(?:[^\\{mark}]|\\.|{mark}(?!{behind}))*){mark}(?={behind})"
    )


STRING = re.compile(f"(?s){_string(chr(39), 'single')}|{_string(chr(34), 'double')}")
ESCAPE = re.compile(
    r"(?s)\\(?:x(?P<two>[\da-fA-F]{2})|u(?P<four>[\da-fA-F]{4})|U00(?P<six>(?:0[\da-fA-F]|10)[\da-fA-F]{4})"
    r"|(?P<octal>[0-7]{1,3})|(?P<other>.))"
)
ESCAPED = {
    "a": "\a", "b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t", "v": "\v", "\n": "",
    "\\": "\\", "'": "'", '"': '"', "/": "/",
}  # fmt: skip


def json_value(text: str, marks: Sequence[tuple[str, str]] = (), *, bare_keys: bool = False) -> Any:
    """The value of a JSON text, read by rewriting marked strings and bare keys as JSON has them.

    Args:
        marks: pairs of texts around strings in which nothing is escaped.
        bare_keys: whether keys may be words without quotes.

    Raises:
        ValueError: it is malformed.
    """
    pairs = [(re.escape(opening), re.escape(closing)) for opening, closing in marks]
    strings = [f"{opening}(?P<string{n}>.*?){closing}" for n, (opening, closing) in enumerate(pairs)]
    # a string without an end is searched for once, not again at each opening after it
    openings = "|".join(['"', *(opening for opening, _ in pairs)])
    apart = rf'[^"\[\]{{}},:{re.escape("".join(mark for pair in marks for mark in pair))}]'
    key = [rf"(?<=[{{,])(?P<key>{apart}+)(?=:)"] if bare_keys else []
    pattern = "|".join(
        [*strings, r'"(?:\\.|[^"\\])*"', f"(?P<endless>(?:{openings}).*)", *key, r"(?P<space>\s+)", r"\w+"]
    )

    def written(found: re.Match[str]) -> str:
        if found["space"]:
            return " "  # JSON knows fewer kinds of white space
        groups = {name: value for name, value in found.groupdict().items() if value is not None}
        if "endless" in groups:
            raise ValueError("a string without an end")
        if "key" in groups:
            return json.dumps(groups["key"].strip())
        return json.dumps(next(iter(groups.values()))) if groups else found[0]

    text = HALF.sub(lambda found: found["whole"] or r"\ufffd", re.sub(pattern, written, text, flags=re.DOTALL))
    try:
        return json.loads(text, parse_constant=_no_number, parse_float=_finite)
    except RecursionError as error:
        raise ValueError("too many lists in each other") from error


def python_calls(text: str) -> list[Any]:
    """The calls of a list such as `[get_weather(city='Bern', days=2), clock()]`, or a single one without a list, each
    as `{"name": ..., "arguments": {...}}`. What is not a call is a value: models also write such objects themselves.

    Raises:
        ValueError: it is malformed.
    """
    return _Python(text).calls()


def python_value(text: str) -> Any:
    """The value of a text of JSON, or of one as in Python.

    Raises:
        ValueError: it is malformed.
    """
    try:
        return json_value(text)
    except ValueError:
        return _Python(text).value()


class _Python:
    """Reads a text from its beginning to its end, once."""

    def __init__(self, text: str) -> None:
        self._text, self._at = text, 0

    def calls(self) -> list[Any]:
        made = self._items("]", self._call) if self._takes("[") else [self._call()]
        return self._all(made)

    def value(self) -> Any:
        return self._all(self._value(MAX_DEPTH))

    def _all(self, made: Item) -> Item:
        """The value, made of the whole text."""
        if self._text[self._at :].strip():
            raise ValueError("text behind the calls")
        return made

    def _call(self) -> Any:
        if (name := self._match(NAME)) is None:
            return self._value(MAX_DEPTH)
        return {"name": name[1], "arguments": dict(self._items(")", self._argument))}

    def _argument(self) -> tuple[str, Any]:
        if (key := self._match(KEY)) is None:
            raise ValueError("an argument without a name")
        return key[1].strip(), self._value(MAX_DEPTH)

    def _value(self, depth: int) -> Any:
        """A value, tuples as lists.

        Args:
            depth: how many lists and mappings may be in each other.
        """
        if not depth:
            raise ValueError("too many lists in each other")
        if (found := self._match(STRING)) is not None:
            return _unescaped(found[found.lastgroup or 0])
        if (found := self._match(NUMBER)) is not None:
            return _finite(found[0]) if found["fraction"] else int(found[0])
        if (found := self._match(WORD)) is not None and found[0] in WORDS:
            return WORDS[found[0]]
        if found is None and self._takes("["):
            return self._items("]", lambda: self._value(depth - 1))
        if found is None and self._takes("("):
            return self._bracketed(depth - 1)
        if found is None and self._takes("{"):
            return dict(self._items("}", lambda: self._pair(depth - 1)))
        raise ValueError("no value")

    def _bracketed(self, depth: int) -> Any:
        """A tuple, or a single value without a comma after it."""
        if self._takes(")"):
            return []
        first = self._value(depth)
        if self._takes(")"):
            return first
        if not self._takes(","):
            raise ValueError("neither a comma nor )")
        return [first, *self._items(")", lambda: self._value(depth))]

    def _pair(self, depth: int) -> tuple[str, Any]:
        key = self._value(depth)
        if not isinstance(key, str) or not self._takes(":"):
            raise ValueError("a mapping without a key")
        return key, self._value(depth)

    def _items(self, closing: str, item: Callable[[], Item]) -> list[Item]:
        """Items between commas, up to a closing bracket."""
        made: list[Item] = []
        goes_on = True
        while not self._takes(closing):
            if not goes_on:
                raise ValueError(f"neither a comma nor {closing}")
            made.append(item())
            goes_on = self._takes(",")
        return made

    def _match(self, pattern: re.Pattern[str]) -> re.Match[str] | None:
        self._takes("")
        found = pattern.match(self._text, self._at)
        self._at = self._at if found is None else found.end()
        return found

    def _takes(self, text: str) -> bool:
        """Take white space, and this text if it follows."""
        space = SPACE.match(self._text, self._at)
        self._at = self._at if space is None else space.end()
        follows = self._text.startswith(text, self._at)
        self._at += len(text) * follows
        return follows


def _unescaped(text: str) -> str:
    """A string's text without the escapes of Python and JSON. Half a surrogate pair is U+FFFD."""
    text = ESCAPE.sub(_character, text)
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _character(found: re.Match[str]) -> str:
    if found["other"]:
        return ESCAPED.get(found["other"], found[0])
    if found["octal"]:
        return chr(int(found["octal"], 8))
    return chr(int(found["two"] or found["four"] or found["six"], 16))


def _finite(text: str) -> float:
    """The number in a text of JSON. One beyond the largest is that: JSON has no word for infinity."""
    return max(-MOST, min(float(text), MOST))


def _no_number(text: str) -> float:
    raise ValueError(f"{text} is not JSON")
