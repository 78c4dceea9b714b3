"""Command lines of benchmarks, how they end, and the lines that are printed below their tables."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from typing import NoReturn

from ondevice import machine
from ondevice.cli.bench.tables import PACKAGES, versions, versions_line
from ondevice.errors import OndeviceError, one_line, system_error

INTERRUPTED = 130
"""The exit code after Ctrl-C."""


def command_line(doc: str | None) -> argparse.ArgumentParser:
    """A parser whose help is a module's docstring."""
    return argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)


def run_command(main: Callable[[], int | None]) -> NoReturn:
    """Run a benchmark's `main` as a command: a mistake and Ctrl-C end it with one line, without a traceback.

    Raises:
        SystemExit: always.
    """
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(INTERRUPTED)
    except OndeviceError as error:
        sys.exit(one_line(str(error)))
    except ModuleNotFoundError as error:
        sys.exit(f"this needs the package {error.name}: pip install {error.name}")
    except OSError as error:
        sys.exit(system_error(error))


def add_threads(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--threads", type=int, default=machine.default_threads(), metavar="N")


def machine_lines(name: str, threads: int) -> str:
    """Two lines: bundle, processor and threads; versions."""
    facts = {"versions": versions(PACKAGES)}
    return f"{name}, {machine.processor_name()}, {threads} threads\n{versions_line(facts)}"
