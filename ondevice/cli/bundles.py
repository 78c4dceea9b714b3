"""Commands on the bundles of this machine: `ondevice pull`, `list`, `remove` and `prepare`.

`list` and `remove` see the bundles in the model home, `$ONDEVICE_HOME` or `~/.ondevice`, by name, and others by path.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from time import perf_counter, time
from typing import Any

from ondevice.bundle import EXPORTS, MANIFEST, SKIPPED_LAYERS, Bundle, model_home
from ondevice.cli.main import FAILED
from ondevice.cli.options import add_bundle_argument, add_count, preparing
from ondevice.cli.origins import note_origin
from ondevice.cli.terminal.progress import byte_bar, ending_by_exception
from ondevice.cli.terminal.style import age, columns, size
from ondevice.errors import BundleNotFoundError, UsageError, one_line
from ondevice.machine import expanded


def add_arguments_pull(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("repository", metavar="OWNER/NAME", help="repository of a bundle on the Hugging Face hub")
    parser.add_argument("--revision", default="main", help="branch, tag or commit (default: main)")
    parser.add_argument("--name", help="name of the bundle under $ONDEVICE_HOME (default: NAME)")
    parser.add_argument("--replace", action="store_true", help="replace another bundle of that name")


def run_pull(args: argparse.Namespace) -> int:
    """Download a bundle from the Hugging Face hub, or the missing rest of one."""
    from ondevice.hub import pull

    with ending_by_exception(), byte_bar("fetching") as bar:
        try:
            out = pull(
                args.repository, revision=args.revision, name=args.name, replace=args.replace, on_progress=bar.show
            )
        except KeyboardInterrupt:
            bar.say("ondevice: interrupted: run the same command again to resume")
            raise
    note_origin(Bundle.open(out), args.repository)
    print(out)
    print(f"ondevice chat {out.name}", file=sys.stderr)
    return 0


def add_arguments_list(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON object per bundle")


def run_list(args: argparse.Namespace) -> int:
    """Print a table, or JSON lines, of the bundles in the model home and those that were exported here, by the names
    that commands take; incomplete downloads are named on stderr.
    """
    from ondevice.bundle import installed
    from ondevice.hub import unfinished_names

    rows: list[dict[str, Any]] = []
    here = [] if Path(EXPORTS).resolve() == model_home().resolve() else installed(Path(EXPORTS))
    for each in [*installed(), *here]:
        name = each.name if each.path.parent == model_home() else str(each.path)
        row: dict[str, Any] = {"name": name, "size": each.size, "fault": each.fault}
        if each.bundle is not None:
            manifest = each.bundle.manifest
            row["family"], row["quantization"] = manifest.family, manifest.weights
            row["drafter"], row["used_at"] = manifest.drafter is not None, each.bundle.used_at
        rows.append(row)
    if args.json:
        sys.stdout.writelines(f"{json.dumps(row)}\n" for row in rows)
    elif rows:
        print("\n".join(_table(rows, columns())))
    else:
        where = f"no bundles in {model_home()} and ./{EXPORTS}"
        print(f"{where}: get one with `ondevice run`, `ondevice pull` or `ondevice export`", file=sys.stderr)
    for name in unfinished_names():
        print(f"{one_line(name)} is incomplete: run the same `ondevice pull` again to resume it", file=sys.stderr)
    return 0


TITLES = ("name", "size", "weights", "last use", "drafter", "family")
"""Columns of the table; the last ones are left out where the terminal is too narrow."""


def _table(rows: list[dict[str, Any]], width: int) -> list[str]:
    """Aligned columns, as many as fit; the row of a bundle that cannot be opened ends with the reason."""
    table: list[tuple[str, ...]] = [TITLES]
    for row in rows:
        begin = one_line(row["name"]), size(row["size"])
        if row["fault"] is not None:
            table.append((*begin, one_line(row["fault"])))
            continue
        used = "never" if row["used_at"] is None else age(time() - row["used_at"])
        table.append((*begin, row["quantization"], used, "mtp" if row["drafter"] else "none", row["family"]))
    count = len(TITLES)
    widths = [max(len(line[each]) for line in table if each < 2 or len(line) == count) for each in range(count)]
    while count > 2 and sum(widths[:count]) + 2 * (count - 1) > width:
        count -= 1
    return [
        "  ".join(word.ljust(width) for word, width in zip(line[:count], widths, strict=False)).rstrip()
        for line in table
    ]


def add_arguments_remove(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "names", metavar="NAME", nargs="+", help="name or path of a bundle, as `ondevice list` shows it"
    )
    parser.add_argument("--yes", action="store_true", help="do not ask for confirmation")


def run_remove(args: argparse.Namespace) -> int:
    """Delete bundles and incomplete downloads, after a confirmation; nothing where one name is unknown."""
    from ondevice.bundle import delete

    found = [path for name in args.names for path in _directories(name)]
    count = sum(each.stat().st_size for path in found for each in path.rglob("*") if each.is_file())
    if not args.yes and not confirmed(f"remove {', '.join(map(str, found))} ({size(count)})?"):
        print("nothing was removed", file=sys.stderr)
        return FAILED
    for path in found:
        delete(path)
    return 0


def _directories(name: str) -> list[Path]:
    """The directories of a bundle and of its incomplete download, by its name under the model home. A word with a slash
    is a path, of the bundle alone.

    Raises:
        BundleNotFoundError: none exists.
    """
    from ondevice.hub import Destination

    if {os.sep, os.altsep} & set(name):
        return [_directory(name)]
    destination = Destination(name)
    complete = (destination.path / MANIFEST).is_file() or destination.path.is_symlink()
    found = [destination.path] if complete else []
    found += [destination.unfinished] if destination.unfinished.is_dir() else []
    if not found:
        obstacle = f"no such name under {model_home()}"
        if (Path(name) / MANIFEST).is_file():
            obstacle += f"; the directory here is `ondevice remove ./{name}`"
        raise BundleNotFoundError(name, obstacle)
    return found


def _directory(name: str) -> Path:
    """The directory of a bundle by its path. It may hold no other files: a mistyped path must not delete a project.

    Raises:
        BundleNotFoundError: there is no bundle.
        UsageError: there are other files.
    """
    path = expanded(name)
    if not (path / MANIFEST).is_file():
        missing = "it is a file" if path.is_file() else "no such directory"
        raise BundleNotFoundError(name, f"no {MANIFEST} in it" if path.is_dir() else missing)
    try:
        listed = {*json.loads((path / MANIFEST).read_text("utf-8"))["files"]}
    except (ValueError, LookupError, TypeError, RecursionError):
        listed = set()
    others = sorted(each.name for each in path.iterdir() if each.name not in {MANIFEST, SKIPPED_LAYERS, *listed})
    if others:
        raise UsageError(f"{name} has files that its {MANIFEST} does not list ({others[0]}): remove it with your shell")
    return path if path.is_symlink() else path.resolve()


def confirmed(question: str) -> bool:
    """Whether the user agrees; UsageError without a terminal."""
    if not (sys.stdin and sys.stdin.isatty() and sys.stderr.isatty()):
        raise UsageError(f"{question} There is no terminal to ask in: add --yes")
    print(f"{question} [y/N] ", end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip().lower() in ("y", "yes")


def add_arguments_prepare(parser: argparse.ArgumentParser) -> None:
    add_bundle_argument(parser)
    parser.add_argument(
        "--engine", choices=["auto", "simd", "ort"], default="auto", help="engine to prepare for (default: auto)"
    )
    add_count(parser, "--threads", text="number of threads to use (default: the physical cores)")


def run_prepare(args: argparse.Namespace) -> int:
    """Compile kernels and pack weights now, so that the first reply does not have to wait for it.

    Returns:
        The exit code: `FAILED` if the result could not be kept, so that every start does the same again.
    """
    import ondevice
    from ondevice.cli.info import not_kept

    started = perf_counter()
    with preparing() as on_prepare:
        ondevice.prepare(args.bundle, engine=args.engine, threads=args.threads, on_prepare=on_prepare)
    if (obstacle := not_kept(Bundle.open(args.bundle), args.engine)) is not None:
        print(f"{args.bundle}: not kept: {obstacle}: set ONDEVICE_CACHE to another directory", file=sys.stderr)
        return FAILED
    print(f"{args.bundle}: ready on this machine, in {perf_counter() - started:.1f} s", file=sys.stderr)
    return 0
