"""`ondevice info`: this machine, or a bundle."""

from __future__ import annotations

import argparse
import json
import shutil
import sys

from ondevice.bundle import Bundle
from ondevice.errors import UsageError
from ondevice.terminal.info.bundle_facts import about
from ondevice.terminal.info.machine_facts import this_machine
from ondevice.terminal.info.text import lines
from ondevice.terminal.progress_bar import byte_bar


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("bundle", metavar="BUNDLE", nargs="?", help="a bundle's directory, or its name")
    parser.add_argument("--verify-hashes", action="store_true", help="read every file and compare its sha256")
    parser.add_argument("--json", action="store_true", help="print one JSON object, in bytes and seconds")


def run(args: argparse.Namespace) -> int:
    if args.bundle is None:
        if args.verify_hashes:
            raise UsageError("--verify-hashes checks a bundle: name one")
        facts = this_machine()
    else:
        with byte_bar("verifying") as bar:
            bundle = Bundle.open(args.bundle, verify_hashes=args.verify_hashes, on_hash=bar.show)
        facts = about(bundle)
        if args.verify_hashes:
            facts["hashes"] = "every file is as exported"
    if args.json:
        print(json.dumps(facts))
    else:
        # piped, a fact is a line
        print("\n".join(lines(facts, shutil.get_terminal_size((sys.maxsize, 0)).columns)))
    return 0
