"""The prompt of a command line: an argument, standard input, a file or token ids."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from ondevice.errors import PromptError, UsageError
from ondevice.text.prompt_file import decode, read_text

if TYPE_CHECKING:
    from ondevice.text.prompt import Prompt


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("prompt", metavar="PROMPT", nargs="?", help="the text to continue; - reads standard input")
    group = parser.add_argument_group("prompt")
    group.add_argument("--file", type=Path, metavar="FILE", help="read the prompt from a file, as it is")
    group.add_argument("--ids", metavar="2,5,7", help="token ids instead of text")
    group.add_argument("--chat", action="store_true", help="the prompt is a user's message, not a text to continue")


def read_prompt(args: argparse.Namespace) -> Prompt:
    """Read it from the one place that was given.

    Raises:
        UsageError: no prompt, or more than one.
        PromptError: not UTF-8, or not token ids.
    """
    given = sum(source is not None for source in (args.prompt, args.file, args.ids))
    if given != 1:
        found = "no prompt" if not given else "more than one prompt"
        raise UsageError(f"{found}: give a text, - for standard input, --file FILE or --ids 2,5,7")
    if args.ids is not None:
        if args.chat:
            raise UsageError("--chat is for text: leave it out, or give a text instead of --ids")
        return parse_ids(args.ids)
    text = _text(args)
    return [{"role": "user", "content": text}] if args.chat else text


def parse_ids(words: str) -> list[int]:
    """Token ids between commas or spaces."""
    try:
        return [int(word) for word in words.replace(",", " ").split()]
    except ValueError as error:
        raise PromptError(f"--ids takes token ids such as 2,5,7, not {words!r}") from error


def _text(args: argparse.Namespace) -> str:
    if args.file is not None:
        return read_text(args.file)
    if args.prompt == "-":
        return decode(standard_input().read(), "standard input")
    return str(args.prompt)


def standard_input() -> BinaryIO:
    """Raises PromptError where it is closed (`<&-`)."""
    if sys.stdin is None:
        raise PromptError("standard input is closed: give the text another way")
    return sys.stdin.buffer
