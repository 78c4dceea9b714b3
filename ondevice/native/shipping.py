"""Builds the shared libraries of a platform, for its wheel:

    python -m ondevice.native.shipping [--platform linux-aarch64] [--set avx2 ...] [--out DIR]

Every set is compiled by `builder` in a process of its own, two at a time, and linked by `zig cc` (`pip install
ziglang`), which links for every platform from any other. The same sources, numba and zig give the same bytes. The
libraries lie in `libraries/PLATFORM` here, where this checkout uses them; `ONDEVICE_PLATFORM=PLATFORM python -m build`
puts them into a wheel (`hatch_build.py`).
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from ondevice.native import library
from ondevice.native.sets import PLATFORMS, native_platform

PROCESSES = 2


def ship(name: str, platform: str, out: Path) -> Path:
    """Build and link the library of a set, in a directory of the platform's name below `out`; returns its path."""
    file = out / platform / f"{name}{PLATFORMS[platform].suffix}"
    environment = {**os.environ, "PYTHONHASHSEED": "0"}
    with tempfile.TemporaryDirectory() as work:
        made, linked = Path(work, f"{name}.o"), Path(work, file.name)
        build = [sys.executable, "-m", "ondevice.native.builder", "--object", "--set", name]
        build += ["--platform", platform]
        subprocess.run([*build, "--out", str(made)], env=environment, stdout=subprocess.DEVNULL, check=True)
        about = PLATFORMS[platform]
        link = [sys.executable, "-m", "ziglang", "cc", "-target", about.linked_as, "-shared", "-s", "-O2"]
        libraries = [f"-l{each}" for each in about.libraries]
        subprocess.run([*link, "-o", linked.name, made.name, *libraries], cwd=work, check=True)
        library.write(file, linked.read_bytes(), name, platform)
    return file


def main(arguments: Sequence[str] | None = None) -> None:
    """Build the libraries of the sets, and print the path and size of each."""
    parser = argparse.ArgumentParser(prog="python -m ondevice.native.shipping", description="Build kernel libraries.")
    parser.add_argument("--platform", default=native_platform(), choices=PLATFORMS, help="default: %(default)s")
    parser.add_argument("--set", action="append", metavar="NAME", help="instruction set (default: all of the platform)")
    parser.add_argument("--out", type=Path, default=library.SHIPPED, metavar="DIR", help="default: %(default)s")
    args = parser.parse_args(arguments)
    sets = PLATFORMS[args.platform].sets
    if unknown := set(args.set or ()) - set(sets):
        parser.error(f"{args.platform} has the sets {', '.join(sets)}, not {', '.join(sorted(unknown))}")
    with ThreadPoolExecutor(PROCESSES) as pool:
        for file in pool.map(lambda name: ship(name, args.platform, args.out), args.set or sets):
            print(f"{file}: {file.stat().st_size:,} bytes")  # noqa: T201


if __name__ == "__main__":
    main()
