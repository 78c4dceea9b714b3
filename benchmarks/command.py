"""Command lines of benchmarks, and the lines that are printed below their tables."""

from __future__ import annotations

import argparse

from ondevice import machine
from ondevice.cli.bench.tables import PACKAGES, versions, versions_line


def command_line(doc: str | None) -> argparse.ArgumentParser:
    """A parser whose help is a module's docstring."""
    return argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)


def add_threads(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--threads", type=int, default=machine.default_threads(), metavar="N")


def machine_lines(name: str, threads: int) -> str:
    """Two lines: bundle, processor and threads; versions."""
    facts = {"versions": versions(PACKAGES)}
    return f"{name}, {machine.processor_name()}, {threads} threads\n{versions_line(facts)}"
