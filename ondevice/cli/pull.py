"""`ondevice pull`: download a bundle from the Hugging Face hub."""

from __future__ import annotations

import argparse
import sys

from ondevice.cli.progress import byte_bar, ending_by_exception


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("repository", metavar="OWNER/NAME", help="repository of a bundle on the Hugging Face hub")
    parser.add_argument("--revision", default="main", help="branch, tag or commit (default: main)")
    parser.add_argument("--name", help="name of the bundle under $ONDEVICE_HOME (default: NAME)")
    parser.add_argument("--replace", action="store_true", help="replace another bundle of that name")


def run(args: argparse.Namespace) -> int:
    from ondevice.hub import pull

    with ending_by_exception(), byte_bar("fetching") as bar:
        try:
            out = pull(
                args.repository, revision=args.revision, name=args.name, replace=args.replace, on_progress=bar.show
            )
        except KeyboardInterrupt:
            bar.say("ondevice: interrupted: run the same command again to resume")
            raise
    print(out)
    print(f"ondevice chat {out.name}", file=sys.stderr)
    return 0
