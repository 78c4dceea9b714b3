"""Tells `optimum-cli` of the command. It looks for files here, in its namespace package (PEP 420, no `__init__.py`)."""

from __future__ import annotations

from optimum.commands.export.base import ExportCommand
from optimum.commands.export.ondevice import OndeviceExportCommand

REGISTER_COMMANDS = [(OndeviceExportCommand, ExportCommand)]
