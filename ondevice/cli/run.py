"""`ondevice run`: the command to begin with. It gets a model that is missing, and chats, or answers one question."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from ondevice.bundle import is_bundle, model_home
from ondevice.cli import chat, generate
from ondevice.cli.bundles import EXPORTS, confirmed
from ondevice.cli.main import FAILED, parse_args
from ondevice.errors import UsageError
from ondevice.machine import expanded


def add_arguments(parser: argparse.ArgumentParser) -> None:
    generate.add_arguments(parser)
    chat.add_plain_argument(parser)
    parser.add_argument("--yes", action="store_true", help="get a missing model without a question")


def run(args: argparse.Namespace) -> int:
    if not is_bundle(args.bundle):
        found = _got(args.bundle, asks=not args.yes)
        if found is None:
            return FAILED
        args.bundle = str(found)
    args.chat = True
    is_asked = not (args.prompt is None and args.file is None and args.ids is None)
    if not is_asked and sys.stdin is not None and sys.stdin.isatty():
        return chat.run(args)
    if not is_asked:
        args.prompt = "-"
    return generate.run(args)


def _got(name: str, *, asks: bool) -> Path | None:
    """The bundle of a checkpoint, a GGUF file or a repository of the hub; None if the question was declined.

    Args:
        name: a path, or OWNER/NAME.
        asks: whether to ask first.

    Raises:
        UsageError: it is nothing of these, or there is no terminal for the question.
        OndeviceError: it cannot be got.
    """
    path = expanded(name)
    is_checkpoint = path.suffix == ".gguf" or (path / "config.json").is_file()
    is_repository = not path.exists() and name.count("/") == 1 and all(name.split("/"))
    if not (path.exists() and is_checkpoint) and not is_repository:
        raise UsageError(
            f"{name} is no bundle, no checkpoint, no .gguf file and no OWNER/NAME of the Hugging Face hub: "
            "`ondevice list` shows the bundles"
        )
    bundle = model_home() / path.name if is_repository else Path(EXPORTS) / path.stem
    if is_bundle(str(bundle)):
        return bundle
    if asks and not confirmed(f"{'get' if is_repository else 'export'} {name}, to {bundle}?"):
        return None
    from ondevice.hub import is_published

    if is_repository and is_published(name):
        _run("pull", name)
    else:
        _run("export", name, "--out", str(bundle))
    return bundle


def _run(*words: str) -> None:
    """Run another command."""
    args = parse_args(words)
    args.run(args)
