"""The prompt of a command line: an argument, standard input, a file or token ids."""

from __future__ import annotations

import argparse
import json
import os
import select
import stat
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from ondevice.errors import PromptError, UsageError
from ondevice.terminal.options import add_chat_arguments
from ondevice.text.prompt_file import decode, read_text

if TYPE_CHECKING:
    from ondevice.text.prompt import Prompt

PATIENCE_S = 2.0
"""With a pipe into which nobody writes."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "prompt", metavar="PROMPT", nargs="?", help="the text to continue, behind what is piped; - for that"
    )
    group = parser.add_argument_group("prompt")
    group.add_argument("--file", type=Path, metavar="FILE", help="read the prompt from a file, as it is")
    group.add_argument("--ids", metavar="2,5,7", help="token ids instead of text")
    group = parser.add_argument_group("chat", "Each of these makes the prompt a user's message.")
    group.add_argument("--chat", action="store_true", help="and nothing else")
    add_chat_arguments(group)
    group.add_argument("--tools", type=Path, metavar="FILE", help="functions to call: a JSON list, as OpenAI has it")


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
    chats = [name for name in ("chat", "system", "thinking", "tools") if getattr(args, name)]
    if args.ids is not None:
        if chats:
            raise UsageError(f"--{chats[0]} is for text: leave it out, or give a text instead of --ids")
        return parse_ids(args.ids)
    text = _text(args)
    if not chats:
        return text
    system = [{"role": "system", "content": args.system}] if args.system else []
    return [*system, {"role": "user", "content": text}]


def read_tools(path: Path) -> list[Any]:
    """Declarations of functions from a file.

    Raises:
        PromptError: it is no JSON list.
    """
    try:
        tools = json.loads(read_text(path))
    except (ValueError, RecursionError) as error:
        raise PromptError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(tools, list):
        raise PromptError(f"{path} holds no list of functions")
    return tools


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
    before = decode(standard_input().read(), "standard input").rstrip("\n") if _is_piped() else ""
    return f"{before}\n\n{args.prompt}" if before else str(args.prompt)


def _is_piped() -> bool:
    """Whether standard input is a pipe or a file; it is neither where a service or a shell's loop has closed it."""
    try:
        kind = os.fstat(sys.stdin.fileno()).st_mode
    except (AttributeError, OSError, ValueError):
        return False
    if stat.S_ISFIFO(kind) and os.name != "nt" and not select.select([sys.stdin], [], [], PATIENCE_S)[0]:
        print("ondevice: waiting for standard input to end (< /dev/null where there is none)", file=sys.stderr)
    return stat.S_ISFIFO(kind) or stat.S_ISREG(kind)


def standard_input() -> BinaryIO:
    """Raises PromptError where it is closed (`<&-`)."""
    if sys.stdin is None:
        raise PromptError("standard input is closed: give the text another way")
    return sys.stdin.buffer
