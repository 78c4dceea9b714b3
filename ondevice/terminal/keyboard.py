"""Keys that are typed while a reply is written."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def unseen_keys() -> Iterator[None]:
    """Within the block, what is typed does not appear in the text that comes; it waits for the next line to be read.

    Ctrl-C works as ever.
    """
    try:
        import termios
    except ImportError:  # Windows shows keys only when they are read
        yield
        return
    if not sys.stdin.isatty():
        yield
        return
    try:
        keyboard = sys.stdin.fileno()
        before = termios.tcgetattr(keyboard)
    except (OSError, ValueError, termios.error):  # stands in for a terminal, and is none
        yield
        return
    silent = [*before[:3], before[3] & ~termios.ECHO, *before[4:]]
    termios.tcsetattr(keyboard, termios.TCSADRAIN, silent)
    try:
        yield
    finally:
        termios.tcsetattr(keyboard, termios.TCSADRAIN, before)
