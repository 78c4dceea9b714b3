"""Prompts from UTF-8 files: one text, or a prompt set in one of the usual formats."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from ondevice.errors import PromptError

if TYPE_CHECKING:
    from ondevice.text.codec import Prompt

BUILT_IN: tuple[Prompt, ...] = (
    'def fibonacci(n):\n    """Return the first n Fibonacci numbers."""',
    "class Stack:\n    def __init__(self):\n        self.items = []\n\n    def push(self, item):",
    'import os\n\ndef find_files(root, suffix):\n    """Yield paths under root that end with suffix."""',
    "The three states of water are",
    "To make a cup of tea, first",
    "import unittest\n\n\nclass TestParser(unittest.TestCase):\n    def test_empty(self):",
)


MAX_TEXT_BYTES = 64 << 20
"""Most bytes of a text: ten times the longest context. A device such as /dev/zero has no end."""


def read_text(path: Path) -> str:
    """Text of a UTF-8 file, unchanged except for a byte order mark.

    Raises:
        PromptError: the file cannot be read, is not UTF-8, or has more than MAX_TEXT_BYTES.
    """
    try:
        with path.open("rb") as file:
            return read_stream(file, str(path))
    except OSError as error:
        raise PromptError(f"cannot read {path}: {error.strerror}") from error


def read_stream(file: BinaryIO, name: str) -> str:
    """The UTF-8 text that a file or a pipe has left.

    Args:
        name: what errors call it.

    Raises:
        PromptError: it is not UTF-8, or has more than MAX_TEXT_BYTES.
    """
    content = file.read(MAX_TEXT_BYTES + 1)
    if len(content) > MAX_TEXT_BYTES:
        raise PromptError(f"{name} is longer than {MAX_TEXT_BYTES >> 20} MB")
    return decode(content, name)


def read_lines(file: BinaryIO, name: str) -> Iterator[bytes]:
    """The lines of a file or a pipe.

    Raises:
        PromptError: a line has more than MAX_TEXT_BYTES.
    """
    number = 0
    while line := file.readline(MAX_TEXT_BYTES + 1):
        number += 1
        if len(line) > MAX_TEXT_BYTES:
            raise PromptError(f"{name} line {number} is longer than {MAX_TEXT_BYTES >> 20} MB")
        yield line


def decode(content: bytes, name: str) -> str:
    """The text of UTF-8 bytes, without a byte order mark.

    Raises:
        PromptError: they are not UTF-8; the message begins with `name`.
    """
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise PromptError(f"{name} is not UTF-8 text (byte {error.start}): convert it first") from error


def load_prompts(path: Path | None, limit: int | None, *, as_chat: bool) -> list[Prompt]:
    """Prompts of a file, or the built-in ones.

    A file whose first line is a JSON object holds one per line: `{"prompt": ...}` as in HumanEval, without the line
    breaks at its end, or `{"turns": [...]}` as in Spec-Bench, of which only the first turn is used. In any other file
    each line is a prompt.

    Args:
        limit: number of prompts to take; None: all.
        as_chat: whether a turn becomes a user's message instead of a plain text.

    Raises:
        PromptError: the file is unreadable, not UTF-8 or empty, or has a malformed line, which the error names.
    """
    prompts = list(BUILT_IN) if path is None else _read(path, as_chat)
    return prompts if limit is None else prompts[:limit]


def _read(path: Path, as_chat: bool) -> list[Prompt]:
    lines = [(number, line) for number, line in enumerate(read_text(path).split("\n"), 1) if line.strip()]
    if not lines:
        raise PromptError(f"{path} holds no prompts: write one per line")
    if lines[0][1].lstrip().startswith("{"):
        return [_parse(line, f"{path} line {number}", as_chat) for number, line in lines]
    return [line.rstrip("\r") for _, line in lines]


def _parse(line: str, place: str, as_chat: bool) -> Prompt:
    try:
        entry: Any = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise PromptError(f"{place} is not valid JSON: {error}") from error
    if isinstance(entry, dict):
        if isinstance(prompt := entry.get("prompt"), str) and prompt.strip():
            # Many tokenizers merge a line break with the indentation after it: a lone one says that none follows.
            return prompt.rstrip("\n")
        turns = entry.get("turns")
        if isinstance(turns, list) and turns and isinstance(turns[0], str) and turns[0]:
            return [{"role": "user", "content": turns[0]}] if as_chat else turns[0]
    raise PromptError(f'{place} is no prompt: it needs {{"prompt": "..."}} or {{"turns": ["..."]}}')
