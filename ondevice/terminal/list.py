"""`ondevice list`: the bundles that can be called by name."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from ondevice.bundle import model_home
from ondevice.errors import one_line


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON object per bundle")


def run(args: argparse.Namespace) -> int:
    from ondevice.hub.place import unfinished_names
    from ondevice.installed import installed

    rows: list[dict[str, Any]] = []
    for each in installed():
        row: dict[str, Any] = {"name": each.name, "size": each.size, "fault": each.fault}
        if (manifest := each.manifest) is not None:
            row["family"], row["quantization"] = manifest.family, manifest.quantization.weights
            row["drafter"] = manifest.drafter is not None
        rows.append(row)
    if args.json:
        sys.stdout.writelines(f"{json.dumps(row)}\n" for row in rows)
    elif rows:
        _show(rows)
    else:
        print(f"no bundles in {model_home()}: `ondevice pull` or `ondevice export` makes one", file=sys.stderr)
    for name in unfinished_names():
        print(f"{one_line(name)} is not complete: the same `ondevice pull` goes on with it", file=sys.stderr)
    return 0


def _show(rows: list[dict[str, Any]]) -> None:
    table: list[tuple[str, ...]] = [("name", "size", "family", "weights", "drafter")]
    for row in rows:
        about: tuple[str, ...] = (row["fault"],)
        if row["fault"] is None:
            about = (row["family"], row["quantization"], "mtp" if row["drafter"] else "none")
        table.append((one_line(row["name"]), f"{row['size'] / 1e9:.2f} GB", *map(one_line, about)))
    widths = [max(len(line[column]) for line in table if len(line) == len(table[0])) for column in range(len(table[0]))]
    for line in table:
        print("  ".join(word.ljust(width) for word, width in zip(line, widths, strict=False)).rstrip())
