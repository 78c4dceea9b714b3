"""`optimum-cli export ondevice -m MODEL OUT`."""

from __future__ import annotations

import sys
from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import NoReturn

from optimum.commands.base import BaseOptimumCLICommand, CommandInfo

from ondevice.errors import OndeviceError
from ondevice_export.command import add_options, run


def add_arguments(parser: ArgumentParser) -> None:
    """Add `--model` and the output directory, named as in optimum's other exporters, and ondevice's own options."""
    parser.add_argument(
        "-m", "--model", required=True, dest="source", metavar="MODEL", help="a checkpoint: a hub id or a directory"
    )
    parser.add_argument("out", type=Path, metavar="OUTPUT", help="the bundle's directory")
    add_options(parser)


def export(args: Namespace) -> NoReturn:
    """Export and end the process; a user error prints one line and gives exit code 2."""
    try:
        code = run(args)
    except (OndeviceError, OSError) as error:
        sys.stderr.write(f"ondevice: {error}\n")
        code = 2
    sys.exit(code)


class OndeviceExportCommand(BaseOptimumCLICommand):  # type: ignore[misc]  # optimum is untyped
    COMMAND = CommandInfo(
        name="ondevice", help="Export a Gemma 4 checkpoint and its MTP drafter to an ondevice bundle."
    )

    @staticmethod
    def parse_args(parser: ArgumentParser) -> None:
        add_arguments(parser)

    def run(self) -> NoReturn:
        export(self.args)
