"""Prompts from the command line: one (an argument, standard input, a file, token ids), or a file of many.

At the end: pictures and sounds that go with a prompt, and lines that name nothing else.
"""

from __future__ import annotations

import argparse
import base64
import json
import os
import select
import shlex
import stat
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO
from urllib.parse import unquote, urlsplit

from ondevice.bundle import CHAT_TEMPLATE, is_bundle
from ondevice.cli.options import add_chat_arguments, add_count, add_image_tokens_argument
from ondevice.errors import ContextOverflowError, PromptError, UsageError, shown
from ondevice.machine import expanded
from ondevice.text.media_parts import MAX_BYTES, unreadable
from ondevice.text.prompt_file import load_prompts, read_stream, read_text

if TYPE_CHECKING:
    from ondevice.model import Model
    from ondevice.text.codec import Prompt

PATIENCE_S = 2.0
"""Seconds without data on a pipe after which a line explains what the command waits for."""

KINDS = {
    **dict.fromkeys((".png", ".jpg", ".jpeg", ".webp", ".gif"), "image"),
    **dict.fromkeys((".wav", ".mp3", ".flac", ".ogg", ".oga", ".opus", ".aif", ".aiff"), "audio"),
}
"""The kind of a dropped file, by its suffix."""


def add_prompt_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of one prompt."""
    parser.add_argument(
        "prompt",
        metavar="PROMPT",
        nargs="?",
        help="the text to continue, appended to piped input; - reads all of it from standard input",
    )
    group = parser.add_argument_group("prompt")
    group.add_argument("--file", type=Path, metavar="FILE", help="read the prompt from this file, unchanged")
    group.add_argument("--ids", metavar="2,5,7", help="token ids instead of text")
    group = parser.add_argument_group("chat", "Each of these options makes the prompt a user's message.")
    group.add_argument("--chat", action="store_true", help="apply the chat template, with no other option")
    add_chat_arguments(group)
    for name, what in (("image", "a picture"), ("audio", "a sound"), ("video", "a video")):
        group.add_argument(
            f"--{name}",
            dest="media",
            action="append",
            type=partial(_part, name),
            metavar="FILE",
            help=f"{what}, before the text; may be repeated",
        )
    add_image_tokens_argument(group)
    group.add_argument("--tools", type=Path, metavar="FILE", help="function declarations: a JSON list, as OpenAI's")


def read_prompt(args: argparse.Namespace) -> Prompt:
    """Read the prompt that the options of `add_prompt_arguments` describe.

    Raises:
        UsageError: no prompt, or more than one.
        PromptError: not UTF-8, or not token ids.
    """
    given = sum(source is not None for source in (args.prompt, args.file, args.ids))
    if not given and not is_bundle(args.bundle):
        raise UsageError(
            f"{shown(args.bundle)} is not a bundle, and there is no prompt: the bundle comes first, as in "
            f"`ondevice generate BUNDLE {shown(args.bundle)}`. `ondevice list` shows the bundles"
        )
    if given != 1:
        found = "no prompt" if not given else "more than one prompt"
        raise UsageError(f"{found}: give a text, - for standard input, --file FILE or --ids 2,5,7")
    chats = [name for name in ("chat", "system", "thinking", "tools") if getattr(args, name) not in (None, False)]
    media: list[dict[str, str]] = args.media or []
    chats += [part["type"] for part in media]
    if args.image_tokens is not None and "image" not in chats:
        raise UsageError("--image-tokens is for pictures: add --image FILE, or leave it out")
    if args.ids is not None:
        if chats:
            raise UsageError(f"--{chats[0]} is for text: leave it out, or give a text instead of --ids")
        return _parse_ids(args.ids)
    text = _read_prompt_text(args)
    if not chats:
        return text
    if not (text.strip() or media or args.system):
        raise PromptError("there is no message: give a text, or pipe one in")
    system = [{"role": "system", "content": args.system}] if args.system else []
    content = [*media, {"type": "text", "text": text}] if media else text
    return [*system, {"role": "user", "content": content}]


def _part(kind: str, path: str) -> dict[str, str]:
    """The content part of a file: `{"type": "image", "image": path}`."""
    return {"type": kind, kind: path}


def read_list(path: Path, what: str, kind: type = object) -> list[Any]:
    """Read a list of JSON values of a type; raises as `read_json`, and PromptError where it is not such a `what`."""
    found = read_json(path)
    if not isinstance(found, list) or not all(isinstance(each, kind) for each in found):
        raise PromptError(f"{path} is not a {what}")
    return found


def read_json(path: Path) -> Any:
    """Read a JSON file.

    Raises:
        PromptError: unreadable, not UTF-8, or not JSON.
    """
    text = read_text(path)
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise PromptError(f"{path} is not valid JSON: {error}") from error


def standard_input() -> BinaryIO:
    """Standard input as bytes; PromptError if it is closed (`<&-`)."""
    if sys.stdin is None:
        raise PromptError("standard input is closed: give the text another way")
    return sys.stdin.buffer


def _parse_ids(words: str) -> list[int]:
    """Parse token ids, separated by commas or spaces."""
    try:
        return [int(word) for word in words.replace(",", " ").split()]
    except ValueError as error:
        raise PromptError(f"--ids takes token ids such as 2,5,7, not {words!r}") from error


def _read_prompt_text(args: argparse.Namespace) -> str:
    if args.file is not None:
        return read_text(args.file)
    if args.prompt == "-":
        return read_stream(standard_input(), "standard input")
    piped = read_stream(standard_input(), "standard input").rstrip("\n") if _has_piped_input() else ""
    return f"{piped}\n\n{args.prompt}" if piped else str(args.prompt)


def _has_piped_input() -> bool:
    """Whether standard input is a pipe or a file. It is neither where a service or a shell's loop has closed it."""
    try:
        kind = os.fstat(sys.stdin.fileno()).st_mode
    except (AttributeError, OSError, ValueError):
        return False
    if stat.S_ISFIFO(kind) and os.name != "nt" and not select.select([sys.stdin], [], [], PATIENCE_S)[0]:
        print("ondevice: waiting for the end of standard input (use < /dev/null if it is empty)", file=sys.stderr)
    return stat.S_ISFIFO(kind) or stat.S_ISREG(kind)


def add_prompt_set_arguments(group: argparse._ArgumentGroup) -> None:
    """Declare the options of a set of prompts, for commands that run all of them."""
    group.add_argument(
        "--prompts",
        type=Path,
        metavar="FILE",
        help="HumanEval or Spec-Bench JSON lines, or one prompt per line (default: some built-in prompts)",
    )
    add_count(group, "--limit", text="use only the first N prompts")


def check_counts(args: argparse.Namespace) -> None:
    """Check that no count leaves nothing to do, before a model is loaded; else UsageError."""
    for name in ("limit", "max_new_tokens", "repetitions"):
        count = getattr(args, name, None)
        if count is not None and count < 1:
            raise UsageError(f"--{name.replace('_', '-')} must be a whole number from 1 on, not {count}")


def fitting_prompts(model: Model, args: argparse.Namespace) -> list[Prompt]:
    """The prompts that leave room for a reply in the context. How many do not fit is printed on stderr.

    Raises:
        PromptError: none fits, or the file cannot be read.
    """
    prompts = []
    wanted = load_prompts(args.prompts, args.limit, as_chat=CHAT_TEMPLATE in model.manifest.files)
    for prompt in wanted:
        try:
            model.encode(prompt)
        except ContextOverflowError:
            continue
        prompts.append(prompt)
    if not prompts:
        raise PromptError(
            f"no prompt fits into the context of {model.context_length} tokens: name shorter ones with --prompts"
        )
    if len(prompts) < len(wanted):
        print(f"skipped {len(wanted) - len(prompts)} of {len(wanted)} prompts: too long", file=sys.stderr)
    return prompts


def content_part(kind: str, path: Path) -> dict[str, Any]:
    """The content part of an `image` or `audio` file, in OpenAI's form; raises as `read_file`."""
    data, suffix = base64.b64encode(read_file(path)).decode(), path.suffix.lower().removeprefix(".")
    if kind == "audio":
        return {"type": "input_audio", "input_audio": {"data": data, "format": suffix or "wav"}}
    media_type = "jpeg" if suffix == "jpg" else suffix or "png"
    return {"type": "image_url", "image_url": {"url": f"data:image/{media_type};base64,{data}"}}


def read_file(path: Path) -> bytes:
    """The bytes of a picture or a sound.

    Raises:
        PromptError: the file cannot be read, or is too large; a device or a pipe, which may never end.
    """
    try:
        kind, content = path.stat().st_mode, b""
        ends = stat.S_ISREG(kind) or stat.S_ISDIR(kind)  # opening a directory fails
        if ends:
            with path.open("rb") as file:
                content = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise PromptError(f"cannot read {unreadable(path, error.strerror)}") from error
    except ValueError as error:  # a NUL in the path
        raise PromptError(f"cannot read {str(path)!r}: {error}") from error
    if not ends:
        raise PromptError(f"cannot read {path}: it is a device or a pipe, not a file")
    if len(content) > MAX_BYTES:
        raise PromptError(f"{path} has more than {MAX_BYTES >> 20} MB")
    return content


def dropped_files(line: str) -> list[Path]:
    """The pictures and sounds that a line names, and nothing else: as terminals type files that are dropped on them."""
    found = named_files(line)
    return found if all(path.suffix.lower() in KINDS for path in found) else []


def named_files(text: str) -> list[Path]:
    """Existing files that a text consists of; none if it has other words.

    Terminals quote spaces, escape them, leave them as they are, or write `file:` URIs.
    """
    try:
        words = shlex.split(text)
    except ValueError:  # an apostrophe
        words = []
    for candidates in ([text], [text.strip("\"'")], words):
        if found := _existing(candidates):
            return found
    return []


def _existing(names: Sequence[str]) -> list[Path]:
    """The files of these names; none if one of them does not exist."""
    found = []
    for name in names:
        try:
            address = urlsplit(name)
            path = Path(unquote(address.path)) if address.scheme == "file" else expanded(name)
            if not path.is_file():
                return []
        except (OSError, ValueError, UsageError):  # too long for a name, a NUL, brackets, no such user
            return []
        found.append(path)
    return found
