"""`ondevice pull`: fetch a ready bundle from the hub."""

from __future__ import annotations

import argparse
import sys

from ondevice.terminal.interrupt import ending_by_exception
from ondevice.terminal.progress_bar import byte_bar


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("repository", metavar="OWNER/NAME", help="a repository on the Hugging Face hub, with a bundle")
    parser.add_argument("--revision", default="main", help="branch, tag or commit (default: main)")
    parser.add_argument("--name", help="what to call it under $ONDEVICE_HOME (default: NAME)")
    parser.add_argument("--replace", action="store_true", help="another bundle of that name")


def run(args: argparse.Namespace) -> int:
    from ondevice.hub.pull import pull

    with ending_by_exception(), byte_bar("fetching") as bar:
        try:
            out = pull(
                args.repository, revision=args.revision, name=args.name, replace=args.replace, on_progress=bar.show
            )
        except KeyboardInterrupt:
            bar.say("ondevice: interrupted: the same command goes on from here")
            raise
    print(out)
    print(f"ondevice chat {out.name}", file=sys.stderr)
    return 0
