"""Command lines of benchmarks, how they end, and the lines that are printed below their tables."""

from __future__ import annotations

import argparse
import math
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
    parser.add_argument("--threads", type=whole(1), default=machine.default_threads(), metavar="N")


def whole(least: int, most: int | None = None) -> Callable[[str], int]:
    """The type of an option whose values are whole numbers from `least` to `most`, without an upper limit for None."""

    def read(word: str) -> int:
        number = int(word) if word.isdecimal() else least - 1
        if number < least or (most is not None and number > most):
            limits = f"of at least {least}" if most is None else f"from {least} to {most}"
            raise argparse.ArgumentTypeError(f"a whole number {limits}, not {word!r}")
        return number

    return read


def share(word: str) -> float:
    """The type of an option whose values are numbers from 0 to 1."""
    if not 0.0 <= (number := _number(word)) <= 1.0:
        raise argparse.ArgumentTypeError(f"a number from 0 to 1, not {word!r}")
    return number


def seconds(word: str) -> float:
    """The type of an option whose values are durations."""
    if not 0.0 < (number := _number(word)) < math.inf:
        raise argparse.ArgumentTypeError(f"a number of seconds above 0, not {word!r}")
    return number


def _number(word: str) -> float:
    try:
        return float(word)
    except ValueError:
        return math.nan


def machine_lines(name: str, threads: int) -> str:
    """Two lines: bundle, processor and threads; versions."""
    facts = {"versions": versions(PACKAGES)}
    return f"{name}, {machine.processor_name()}, {threads} threads\n{versions_line(facts)}"
