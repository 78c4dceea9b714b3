"""`optimum-cli export ondevice`: optimum finds this file in its namespace package (PEP 420, no `__init__.py`)."""

from __future__ import annotations

import sys
from argparse import ArgumentParser

from optimum.commands.base import BaseOptimumCLICommand, CommandInfo
from optimum.commands.export.base import ExportCommand

from ondevice.errors import OndeviceError
from ondevice_export.command import add_arguments, run


class OndeviceExportCommand(BaseOptimumCLICommand):
    COMMAND = CommandInfo(
        name="ondevice", help="Export a Gemma 4 checkpoint and its MTP drafter to an ondevice bundle."
    )

    @staticmethod
    def parse_args(parser: ArgumentParser) -> None:
        add_arguments(parser)

    def run(self) -> None:
        try:
            code = run(self.args)
        except OndeviceError as error:
            sys.stderr.write(f"ondevice: {error}\n")
            code = 2
        sys.exit(code)


REGISTER_COMMANDS = [(OndeviceExportCommand, ExportCommand)]
