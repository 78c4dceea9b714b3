"""How the command line looks: colours, the width of the terminal, aligned text, sizes and ages.

What goes to a pipe or a file is neither coloured nor wrapped.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import TextIO

ESCAPE_CODE = re.compile(r"\x1b\[[0-9;]*m")

RESET = "\x1b[0m"

MAX_COLUMNS = 10_000
"""Width without a terminal: lines are not wrapped."""

MIN_COLUMNS = 20
"""Width of the right column of `aligned` at least, however narrow the terminal is."""

KEPT_SPACE = "\0"
"""Stands for a space at which lines are not broken."""


class Style(StrEnum):
    """Escape codes that begin a style. Colours are of the terminal's own 16, which fit its background."""

    DIM = "\x1b[2m"
    PROMPT = "\x1b[1;36m"
    """A prompt that waits for a line: cyan and bold."""
    ACCEPTED = "\x1b[32m"
    """Drafted tokens that were accepted: green."""
    CORRECTED = "\x1b[1;35m"
    """The target's tokens in the place of wrong drafts: magenta and bold, which does not depend on telling red from
    green."""


def is_terminal(stream: TextIO) -> bool:
    """Whether a stream is a terminal that understands escape codes."""
    if os.environ.get("TERM") == "dumb" or not stream.isatty():
        return False
    return os.name != "nt" or "WT_SESSION" in os.environ  # the old console of Windows prints the escape codes


def has_colours(stream: TextIO) -> bool:
    """Whether text on a stream may be styled: on a terminal, unless `NO_COLOR` is set and not empty (no-color.org)."""
    return is_terminal(stream) and not os.environ.get("NO_COLOR")


def styled(text: str, style: Style | None, stream: TextIO) -> str:
    """The text in a style, or unchanged without one and where the stream has no colours."""
    return f"{style}{text}{RESET}" if text and style and has_colours(stream) else text


def aligned(rows: Mapping[str, Sequence[str]], width: int) -> list[str]:
    """Lines with labels on the left and wrapped paragraphs on the right.

    Args:
        rows: paragraphs by label; a label without paragraphs has no line. `kept` marks words that stay on one line.
        width: columns of the terminal; the right column has at least `MIN_COLUMNS`.
    """
    indent = max(map(len, rows), default=0) + 2
    right = max(width - indent, MIN_COLUMNS)
    return [
        f"{'' if index else label:{indent}}{line}".replace(KEPT_SPACE, " ")
        for label, paragraphs in rows.items()
        for index, line in enumerate(line for each in paragraphs for line in wrapped(each, right).split("\n"))
    ]


def wrapped(text: str, width: int) -> str:
    """A text with line breaks between words, so that no line is wider unless a word is; escape codes have no width."""
    lines, used = [""], 0
    for word in text.split(" "):
        length = len(ESCAPE_CODE.sub("", word))
        if used and used + 1 + length > width:
            lines.append(word)
            used = length
        else:
            lines[-1] += f" {word}" if used else word
            used += length + bool(used)
    return "\n".join(lines)


def note(text: str) -> None:
    """Print a sentence on stderr, broken between words where the terminal is narrower; nothing if it is empty."""
    if text:
        print(wrapped(text, columns()), file=sys.stderr)


def kept(text: str) -> str:
    """The text for `aligned`, which breaks no line at its spaces."""
    return text.replace(" ", KEPT_SPACE)


def columns() -> int:
    """Width of the terminal on standard output, or `$COLUMNS`; `MAX_COLUMNS` without either."""
    return shutil.get_terminal_size((MAX_COLUMNS, 0)).columns


def size(count: int) -> str:
    """A number of bytes in B, kB, MB or GB, 1000-based as in file managers and on hubs."""
    shown = float(count)
    for unit in ("B", "kB", "MB"):
        if shown < 1000:
            return f"{shown:.0f} {unit}" if unit == "B" else f"{shown:.1f} {unit}"
        shown /= 1000
    return f"{shown:.2f} GB"


def age(seconds: float) -> str:
    """How long ago something was, in the largest fitting unit, as `3 days ago`."""
    for unit, length in (("day", 86400), ("hour", 3600), ("minute", 60)):
        if (count := int(seconds / length)) > 0:
            return f"{count} {unit}{'s' if count > 1 else ''} ago"
    return "just now"
