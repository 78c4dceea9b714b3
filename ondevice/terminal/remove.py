"""`ondevice remove`: delete bundles that are called by name."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from ondevice.bundle import MANIFEST, model_home
from ondevice.errors import BundleNotFoundError, UsageError
from ondevice.terminal.exit_codes import UNANSWERED


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("names", metavar="NAME", nargs="+", help="under $ONDEVICE_HOME, as `ondevice list` shows it")
    parser.add_argument("--yes", action="store_true", help="do not ask")


def run(args: argparse.Namespace) -> int:
    from ondevice.installed import delete

    found = [path for name in args.names for path in _directories(name)]
    size = sum(each.stat().st_size for path in found for each in path.rglob("*") if each.is_file())
    if not args.yes and not _agrees(f"remove {', '.join(map(str, found))} ({size / 1e9:.2f} GB)?"):
        print("nothing was removed", file=sys.stderr)
        return UNANSWERED
    for path in found:
        delete(path)
    return 0


def _directories(name: str) -> list[Path]:
    """Of a bundle, and of what was fetched of it: a name and never a path, whatever lies elsewhere is not ours."""
    from ondevice.hub.place import Place

    place = Place(name)
    found = [place.out] if (place.out / MANIFEST).is_file() or place.out.is_symlink() else []
    found += [place.unfinished] if place.unfinished.is_dir() else []
    if not found:
        raise BundleNotFoundError(name, f"no such name under {model_home()}")
    return found


def _agrees(question: str) -> bool:
    if not (sys.stdin and sys.stdin.isatty() and sys.stderr.isatty()):
        raise UsageError("there is nobody to ask: --yes removes without")
    print(f"{question} [y/N] ", end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip().lower() in ("y", "yes")
