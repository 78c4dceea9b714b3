"""Where a part of a reply begins or ends: a literal or a pattern, found in text that is still coming in."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

MOST_HELD = 256
"""Characters: what is longer is no delimiter."""

MOST_REPETITIONS = 3
"""In a pattern, which comes with a checkpoint: matching takes the length of what is held to this power."""


class Place(NamedTuple):
    """Where a delimiter lies, and the named groups of its pattern."""

    start: int
    end: int
    groups: dict[str, str]


class Delimiter:
    """A regular expression, matched as Python's `re` does, that also tells what may still become a match.

    Python's `re` has no partial matches. A second expression is made that matches every beginning of the first: of
    `ab*c`, those are nothing, `a`, and `a` with any number of `b`.
    """

    def __init__(self, pattern: str) -> None:
        """
        Args:
            pattern: of characters, classes, groups, alternatives and repetitions, none within another; see `literals`.

        Raises:
            ValueError: it has anything else, too many repetitions, or can match nothing at all.
        """
        try:
            self._whole = re.compile(pattern, re.DOTALL)
        except (re.error, RecursionError, OverflowError) as error:
            raise ValueError(f"the pattern {pattern!r:.99} is none: {error}") from error
        piece = _Reader(pattern).read()
        if piece.repetitions > MOST_REPETITIONS:
            raise ValueError(f"the pattern {pattern!r:.99} has more than {MOST_REPETITIONS} repetitions")
        self._begun = re.compile(f"(?:{piece.begun})\\Z", re.DOTALL)
        if self._whole.fullmatch(""):
            raise ValueError(f"the pattern {pattern!r:.99} matches nothing at all")

    def find(self, text: str, start: int) -> Place | None:
        """The first match from `start` on."""
        found = self._whole.search(text, start)
        return None if found is None else Place(*found.span(), {k: v for k, v in found.groupdict().items() if v})

    def held(self, text: str, start: int) -> int:
        """From where on text has to wait: it may be, or may still change, a match; the end of the text if none."""
        found = self._begun.search(text, max(start, len(text) - MOST_HELD))
        return len(text) if found is None else found.start()


def literals(texts: Iterable[str]) -> str:
    """The pattern of any of these, the longest first."""
    return "|".join(re.escape(text) for text in sorted(texts, key=len, reverse=True))


@dataclass(frozen=True)
class _Piece:
    """A piece of a pattern.

    whole, begun : the expressions that match it, and all that it begins with but for itself
    """

    whole: str
    begun: str = ""
    repetitions: int = 0


class _Reader:
    """Reads a pattern by descent."""

    def __init__(self, pattern: str) -> None:
        self._pattern, self._at = pattern, 0

    def read(self) -> _Piece:
        piece = self._alternatives()
        if self._at < len(self._pattern):
            raise self._unsupported()
        return piece

    def _alternatives(self) -> _Piece:
        pieces = [self._sequence()]
        while self._next("|"):
            pieces.append(self._sequence())
        if len(pieces) == 1:
            return pieces[0]
        whole, begun = ("|".join(part) for part in zip(*((p.whole, p.begun) for p in pieces), strict=True))
        return _Piece(f"(?:{whole})", f"(?:{begun})", sum(piece.repetitions for piece in pieces))

    def _sequence(self) -> _Piece:
        pieces = []
        while self._at < len(self._pattern) and self._pattern[self._at] not in "|)":
            pieces.append(self._repeated())
        begun = ""
        for piece in reversed(pieces):
            begun = f"(?:{piece.whole}{begun}|{piece.begun})" if begun or piece is not pieces[-1] else piece.begun
        return _Piece("".join(piece.whole for piece in pieces), begun, sum(piece.repetitions for piece in pieces))

    def _repeated(self) -> _Piece:
        piece = self._atom()
        found = re.compile(r"([*+?]|\{\d*,?\d*\})(\??)").match(self._pattern, self._at)
        if found is None:
            return piece
        if piece.repetitions:  # it could take for ever
            raise self._unsupported()
        self._at = found.end()
        if self._pattern[self._at : self._at + 1] in ("+", "*"):
            raise self._unsupported()
        return _Piece(f"{piece.whole}{found[0]}", f"{piece.whole}*{piece.begun}", 1)

    def _atom(self) -> _Piece:
        if self._next("("):
            if self._next("?") and not self._next(":") and self._match(r"P<\w+>") is None:
                raise self._unsupported()
            piece = self._alternatives()
            if not self._next(")"):
                raise self._unsupported()
            return _Piece(f"(?:{piece.whole})", piece.begun, piece.repetitions)
        atom = self._match(r"\\[^\dAbBZzGNuUx]|\[\^?\]?(?:\\.|[^\]\\])*\]|[^\\$^()*+?{|]")
        if atom is None:
            raise self._unsupported()
        return _Piece(atom)

    def _next(self, character: str) -> bool:
        if not self._pattern.startswith(character, self._at):
            return False
        self._at += 1
        return True

    def _match(self, pattern: str) -> str | None:
        found = re.compile(pattern, re.DOTALL).match(self._pattern, self._at)
        if found is None:
            return None
        self._at = found.end()
        return found[0]

    def _unsupported(self) -> ValueError:
        return ValueError(f"the pattern {self._pattern!r:.99} has something that is not understood at {self._at}")
