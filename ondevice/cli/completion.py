"""`ondevice completion SHELL`: print a script that lets a shell complete commands, options and names of bundles.

The script runs `ondevice` with the typed line in its environment, as argcomplete's protocol has it, and `main` then
calls `complete`. So names of bundles are completed too, and a script stays right after an update.
"""

from __future__ import annotations

import argparse
import os
from typing import Any

from ondevice.bundle import MANIFEST, model_home
from ondevice.errors import MissingDependencyError, UsageError
from ondevice.generate.drafters import registry
from ondevice.machine import expanded

SHELLS = ("bash", "zsh", "fish", "powershell")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", metavar="SHELL", nargs="?", choices=SHELLS, help=", ".join(SHELLS))


def run(args: argparse.Namespace) -> int:
    if args.shell is None:
        raise UsageError(f"name a shell: {', '.join(SHELLS)}")
    try:
        from argcomplete.shell_integration import shellcode
    except ImportError as error:
        raise MissingDependencyError("argcomplete", what="`ondevice completion`") from error
    print(shellcode(["ondevice"], shell=args.shell))
    return 0


def typed_command() -> str:
    """First word after `ondevice` on the line that a shell asks to complete; "" while it is still being typed."""
    from argcomplete.lexers import split_line

    words = split_line(os.environ["COMP_LINE"], int(os.environ["COMP_POINT"]))[3]
    return words[1] if len(words) > 1 else ""


def complete(parser: argparse.ArgumentParser, **io: Any) -> None:
    """Write the candidates for the last word of a line that `parser` reads, and end the process.

    `io` are `output_stream` and `exit_method` of argcomplete.
    """
    from argcomplete import autocomplete

    words_before = len(parser.prog.split())  # `ondevice` and the command, which its own parser does not read
    os.environ["_ARGCOMPLETE"] = str(words_before)
    completer: Any = _values  # argcomplete's type asks for a subclass, its code for a callable
    autocomplete(parser, always_complete_options=words_before == 1, default_completer=completer, **io)


def _values(prefix: str, action: argparse.Action, parser: argparse.ArgumentParser, **_: Any) -> list[str]:
    """Candidates for an argument without fixed choices; where there are none, the shell completes names of files."""
    names = [path.parent.name for path in model_home().glob(f"*/{MANIFEST}")]
    directory = prefix[: prefix.rfind("/") + 1]
    paths = [f"{directory}{path.parent.name}" for path in expanded(directory or ".").glob(f"*/{MANIFEST}")]
    if action.dest == "drafter" and not parser.prog.endswith(" export"):
        return [*registry.names(), *sorted({*names, *paths})]
    if action.dest == "bundle":
        return sorted({*names, *paths})
    return sorted(names) if action.dest == "names" else []
