"""`ondevice prepare`: compile kernels and pack weights for this machine, before anybody waits for it."""

from __future__ import annotations

import argparse
import sys
from time import perf_counter

from ondevice.terminal.loading import preparing


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("bundle", metavar="BUNDLE", help="a bundle's directory, or its name under $ONDEVICE_HOME")
    parser.add_argument("--engine", choices=["auto", "simd", "ort"], default="auto", help="what will run the graphs")
    parser.add_argument("--threads", type=int, metavar="N", help="to work with (default: the physical cores)")


def run(args: argparse.Namespace) -> int:
    import ondevice

    started = perf_counter()
    with preparing() as on_prepare:
        ondevice.prepare(args.bundle, engine=args.engine, threads=args.threads, on_prepare=on_prepare)
    print(f"{args.bundle}: ready on this machine, in {perf_counter() - started:.1f} s", file=sys.stderr)
    return 0
