"""`ondevice run`: the command to begin with. It gets a model that is missing, and chats, or answers one question."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from ondevice.bundle import EXPORTS, GGUF, MANIFEST, Bundle, exports_directory, is_bundle, model_home, name_of_export
from ondevice.cli import chat, generate
from ondevice.cli.bundles import confirmed
from ondevice.cli.main import FAILED, parse_args
from ondevice.cli.origins import is_made_of
from ondevice.cli.terminal.progress import byte_bar
from ondevice.cli.terminal.style import note
from ondevice.errors import UsageError, one_line
from ondevice.machine import expanded

ANSWER_OPTIONS = (
    *("media", "tools", "tool_choice", "json_schema", "json_object", "regex", "choice", "lark"),
    *("watch_drafts", "json", "json_lines", "top_logprobs", "compare"),
)
"""Options that only one answer has."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    length = f"in a chat {chat.REPLY_TOKENS}; one answer: until the context is full, with --ids 256"
    generate.add_arguments(parser, length)
    chat.add_plain_argument(parser)
    parser.add_argument(
        "--yes", action="store_true", help="get a missing model without a question, also where it replaces a bundle"
    )


def run(args: argparse.Namespace) -> int:
    if not is_bundle(args.bundle):
        found = _got(args.bundle, asks=not args.yes)
        if found is None:
            return FAILED
        args.bundle = str(found)
    args.chat |= args.ids is None
    is_asked = not (args.prompt is None and args.file is None and args.ids is None)
    if not is_asked and sys.stdin is not None and sys.stdin.isatty():
        _refuse_answer_options(args)
        return chat.run(args)
    if not is_asked:
        args.prompt = "-"
    return generate.run(args)


def _refuse_answer_options(args: argparse.Namespace) -> None:
    """UsageError if an option was given that a chat does not have."""
    for name in ANSWER_OPTIONS:
        if given := getattr(args, name):
            option = given[0]["type"] if name == "media" else name.replace("_", "-")
            raise UsageError(f"--{option} is for one answer: add a prompt, or leave it out for a chat")


def _got(source: str, *, asks: bool) -> Path | None:
    """The bundle of a checkpoint, a GGUF file or a repository of the hub; None if the question was declined.

    Args:
        source: a path, or OWNER/NAME.
        asks: whether to ask first.

    Raises:
        UsageError: it is nothing of these, or there is no terminal for the question.
        OndeviceError: it cannot be got.
    """
    path = expanded(source)
    is_file = path.is_file() and path.suffix.lower() == GGUF
    is_repository = not path.exists() and source.count("/") == 1 and all(source.split("/"))
    if not (is_file or (path / "config.json").is_file() or is_repository):
        raise UsageError(
            f"{source} is neither a bundle nor a checkpoint, a .gguf file or an OWNER/NAME of the Hugging Face hub: "
            "`ondevice list` shows the bundles"
        )
    name = path.name if is_repository else name_of_export(path if is_file else path.resolve(), is_file=is_file)
    for directory in dict.fromkeys((model_home(), Path(EXPORTS))):
        if _is_of(directory / name, source):
            return directory / name
    bundle = (model_home() if is_repository else exports_directory()) / name
    question = f"export {source} to {bundle}"
    if is_repository:
        question = f"no bundle at {source}; get OWNER/NAME {source} from the Hugging Face hub, to {bundle}"
    is_taken = (bundle / MANIFEST).is_file()
    question += f", replacing {_description(bundle, source)}" if is_taken else ""
    if not asks and is_taken:
        note(f"note: {question}")
    if asks and not confirmed(f"{question}?"):
        return None
    from ondevice.hub import is_published

    if is_repository and is_published(source):
        _run("pull", source, *(["--replace"] if is_taken else []))
    else:
        _run("export", source, "--out", str(bundle))
    return bundle


def _is_of(directory: Path, source: str) -> bool:
    """Whether a directory is a bundle that was made of a source."""
    if not (directory / MANIFEST).is_file():
        return False
    with byte_bar(f"comparing {one_line(source)}") as bar:
        return is_made_of(Bundle.open(directory), source, bar.show)


def _description(directory: Path, source: str) -> str:
    """A bundle that is about to be replaced, with the name of its source, and the command that would run it."""
    named = Bundle.open(directory).manifest.sources.get("target")
    origin = "an unknown source" if named is None else one_line(named.id)
    if origin == expanded(source).name:
        origin = f"another or an older {origin}"
    return f"the bundle of {origin} there (`ondevice run {directory}` runs that one)"


def _run(*words: str) -> None:
    """Run another command."""
    args = parse_args(words)
    args.run(args)
