"""`ondevice export`: the command itself belongs to `ondevice_export`, which needs more packages than the runtime."""

from __future__ import annotations

import argparse
from importlib import import_module
from types import ModuleType

from ondevice.errors import MissingDependencyError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    _command().add_arguments(parser)


def run(args: argparse.Namespace) -> int:
    return int(_command().run(args) or 0)


def _command() -> ModuleType:
    try:
        return import_module("ondevice_export.command")
    except ModuleNotFoundError as error:
        raise MissingDependencyError(error.name or "ondevice_export", "export") from error
