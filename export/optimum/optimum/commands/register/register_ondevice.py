"""Registers the command with `optimum-cli`, which loads every file of this namespace package (PEP 420).

The directory must not have an `__init__.py`.
"""

from __future__ import annotations

from optimum.commands.export.base import ExportCommand
from optimum.commands.export.ondevice import OndeviceExportCommand

REGISTER_COMMANDS = [(OndeviceExportCommand, ExportCommand)]
