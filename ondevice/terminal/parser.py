"""argparse with this project's manners."""

from __future__ import annotations

import argparse
from typing import NoReturn

from ondevice.errors import UsageError


class Parser(argparse.ArgumentParser):
    """Help begins with examples, and a mistake is one line that names the help."""

    def __init__(self, prog: str, *, description: str | None = None, examples: str = "") -> None:
        super().__init__(prog, description=description, allow_abbrev=False)
        self.examples = examples.strip("\n")

    def format_help(self) -> str:
        return f"examples:\n{self.examples}\n\n{super().format_help()}"

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}. Try `{self.prog} --help`")
