"""Dim text, where a terminal shows it and nobody minds."""

from __future__ import annotations

import os
from typing import TextIO

DIM, PLAIN = "\x1b[2m", "\x1b[0m"


def dim(text: str, stream: TextIO) -> str:
    """The text for this stream: dim on a terminal, unless `NO_COLOR` is set (no-color.org)."""
    return f"{DIM}{text}{PLAIN}" if text and _has_colours(stream) else text


def _has_colours(stream: TextIO) -> bool:
    if os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb" or not stream.isatty():
        return False
    return os.name != "nt" or "WT_SESSION" in os.environ  # an old console of Windows writes the codes themselves
