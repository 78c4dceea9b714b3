"""`ondevice completion SHELL`: prints a script that lets a shell complete words, by asking this command as one types.

Asked, and not written down once: so the names of bundles are completed too, and a script stays right after an update.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable

from ondevice.bundle import MANIFEST, model_home
from ondevice.drafters import registry
from ondevice.errors import UsageError
from ondevice.machine import expanded

SCRIPTS = {
    "bash": """\
_ondevice() {
    local IFS=$'\\n'
    COMPREPLY=($(printf '%s\\n' "${COMP_WORDS[@]:1:COMP_CWORD}" | ondevice completion --words 2>/dev/null))
}
complete -o default -F _ondevice ondevice
""",
    "zsh": """\
#compdef ondevice
_ondevice() {
    local -a found
    found=(${(f)"$(printf '%s\\n' "${(@)words[2,CURRENT]}" | ondevice completion --words 2>/dev/null)"})
    if (( $#found )); then compadd -- $found; else _files; fi
}
if [[ $funcstack[1] == _ondevice ]]; then _ondevice "$@"; else compdef _ondevice ondevice; fi
""",
    "fish": """\
function __ondevice
    set -l words (commandline -opc) (commandline -ct)
    set -l found (printf '%s\\n' $words[2..] | ondevice completion --words 2>/dev/null)
    if set -q found[1]; printf '%s\\n' $found; else; __fish_complete_path (commandline -ct); end
end
complete -c ondevice -f -a '(__ondevice)'
""",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", metavar="SHELL", nargs="?", choices=list(SCRIPTS), help=", ".join(SCRIPTS))
    # what the scripts call: the words after `ondevice` on standard input, a line each
    parser.add_argument("--words", action="store_true", help=argparse.SUPPRESS)


def run(args: argparse.Namespace) -> int:
    if args.words:
        sys.stdout.writelines(f"{word}\n" for word in candidates(sys.stdin.read().split("\n")[:-1]))
        return 0
    if args.shell is None:
        raise UsageError(f"name a shell: {', '.join(SCRIPTS)}")
    print(SCRIPTS[args.shell], end="")
    return 0


def candidates(words: list[str]) -> list[str]:
    """What the last of the words after `ondevice` may become; nothing where any text or file may stand."""
    from ondevice.terminal.main import COMMANDS, command_parser

    *before, current = _joined(words) or [""]
    if not before:
        return _beginning(current, [*COMMANDS, "--help", "--version"])
    if before[0] not in COMMANDS:
        return []
    actions = command_parser(before[0])._actions  # argparse has no other way to ask
    options = {text: action for action in actions for text in action.option_strings}
    positionals = [action for action in actions if not action.option_strings]
    given = 0
    expected: argparse.Action | None = None
    for word in before[1:]:
        if expected is not None:
            expected = None  # its value
        elif word in options:
            expected = options[word] if options[word].nargs != 0 else None
        else:
            given += 1
    if expected is None and current.startswith("-"):
        return _beginning(current, options)
    if expected is None and positionals and (given < len(positionals) or positionals[-1].nargs == "+"):
        expected = positionals[min(given, len(positionals) - 1)]
    if expected is None:
        return []
    return _values(expected, before[0], current)


def _values(expected: argparse.Action, command: str, current: str) -> list[str]:
    """What may stand for an argument."""
    if expected.dest == "drafter" and command != "export":
        return [*_beginning(current, registry.names()), *_bundles(current)]
    if expected.dest == "names":
        return sorted(_beginning(current, _names()))
    return _bundles(current) if expected.dest == "bundle" else _beginning(current, map(str, expected.choices or ()))


def _joined(words: list[str]) -> list[str]:
    """Without the signs that bash splits `--engine=simd` at."""
    return [word for word in words[:-1] if word != "="] + [word.removeprefix("=") for word in words[-1:]]


def _beginning(current: str, texts: Iterable[str]) -> list[str]:
    return [text for text in texts if text.startswith(current)]


def _names() -> list[str]:
    return [path.parent.name for path in model_home().glob(f"*/{MANIFEST}")]


def _bundles(current: str) -> list[str]:
    """Names under the model home, and the bundles in the directory that was typed so far."""
    directory = current[: current.rfind("/") + 1]
    there = (f"{directory}{path.parent.name}" for path in expanded(directory or ".").glob(f"*/{MANIFEST}"))
    return sorted({*_beginning(current, _names()), *_beginning(current, there)})
