"""What a person types into a chat, or what is piped into it, as messages."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path

from ondevice.bundle import model_home
from ondevice.errors import UsageError
from ondevice.terminal.prompt_input import standard_input
from ondevice.text.prompt_file import decode

MARK = '"""'
"""Before and after a message of several lines."""

MOST_HISTORY = 1000
"""Lines."""


def messages(lines: Iterator[str]) -> Iterator[str]:
    """Lines, those between two marks as one."""
    for line in lines:
        message = line.strip()
        if message.startswith(MARK):
            message = message.removeprefix(MARK)
            while not message.endswith(MARK) and (more := next(lines, None)) is not None:
                message += f"\n{more.rstrip()}"
            message = message.removesuffix(MARK).strip("\n")
        yield message


def typed() -> Iterator[str]:
    """Lines from a person, until Ctrl-D. Those of earlier chats can be gone back to."""
    with _history(model_home() / "chat_history"):
        while True:
            try:
                yield input("> ")
            except KeyboardInterrupt:
                print("\n(Ctrl-D leaves)", file=sys.stderr)
            except EOFError:
                print()
                return
            except UnicodeDecodeError as error:
                raise UsageError("this terminal does not send UTF-8: set its encoding to UTF-8") from error


def piped() -> Iterator[str]:
    """One message per line."""
    for line in standard_input():
        yield decode(line, "standard input")


@contextlib.contextmanager
def _history(path: Path) -> Iterator[None]:
    """Keys for editing, and lines that stay for the next chat, where Python has readline: Windows' console has keys of
    its own.
    """
    try:
        import readline  # importing it gives input() its keys
    except ImportError:
        yield
        return
    readline.parse_and_bind("set enable-bracketed-paste on")  # pasted lines are one message
    with contextlib.suppress(OSError):
        readline.read_history_file(path)
    try:
        yield
    finally:
        readline.set_history_length(MOST_HISTORY)
        with contextlib.suppress(OSError):  # a home that cannot be written to: then nothing stays
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch(mode=0o600)
            readline.write_history_file(path)
