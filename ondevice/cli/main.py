"""`ondevice COMMAND`: the table of commands, parsing, exit codes, and one line on stderr for every mistake.

Only the module of the command that is named gets imported, so `ondevice --help` needs neither numpy nor numba. Command
modules import this one, for exit codes and `Parser`; this one imports no command module statically.
"""

from __future__ import annotations

import argparse
import io
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

from ondevice import __version__
from ondevice.errors import MissingDependencyError, OndeviceError, UsageError, near, one_line, shown, system_error

FAILED = 1
"""Exit code: the command ran, but tokens differ in a check, a batch has errors, a preparation could not be kept, or a
removal was declined."""

MISTAKE = 2
"""Exit code: a wrong command line, bundle or file; one line on stderr says what to do."""

INTERRUPTED = 130
"""Exit code after Ctrl-C, as shells report a program that SIGINT ended."""

BROKEN_PIPE = 141
"""Exit code after the reader of standard output has exited (`| head`), as shells report SIGPIPE."""


@dataclass(frozen=True)
class Command:
    """An entry of `COMMANDS`.

    summary : for the overview of `ondevice --help`
    examples : shown first by `ondevice COMMAND --help`
    module : imported when the command is used; by default the one of its name here. `add_arguments(parser)` declares
        options, `run(args)` returns the exit code; in a module of several commands these names end with the command's
    extra : the extra of ondevice-runtime that installs the module, None where it is part of this package
    """

    summary: str
    examples: str
    module: str = ""
    extra: str | None = None


COMMANDS = {
    "export": Command(
        "convert a checkpoint to a bundle",
        """
  ondevice export google/gemma-4-E2B-it --out gemma-4-E2B-it
  ondevice export ./checkpoint --drafter ./drafter --quantize int8 --out ./bundle
""",
        module="ondevice_export.command",
        extra="export",
    ),
    "generate": Command(
        "continue a prompt",
        """
  ondevice generate gemma-4-E2B-it "Why is the sky blue?" --chat
  cat notes.txt | ondevice generate gemma-4-E2B-it "Summarise this." --chat
  ondevice generate gemma-4-E2B-it - < prompt.txt
  ondevice generate gemma-4-E2B-it "Who wrote Faust? As JSON." --chat --json-schema person.json
  ondevice generate gemma-4-E2B-it --ids 2,5,7 --temperature 0 --json
""",
    ),
    "chat": Command(
        "chat with a model in the terminal",
        """
  ondevice chat gemma-4-E2B-it
  ondevice chat gemma-4-E2B-it --thinking --system "Answer in one sentence."
""",
    ),
    "run": Command(
        "chat with a model, or ask it one question; gets a model that is missing",
        """
  ondevice run gemma-4-E2B-it
  ondevice run gemma-4-E2B-it "Why is the sky blue?"
  ondevice run ./SmolLM2-135M-Instruct-Q4_0.gguf
""",
    ),
    "serve": Command(
        "serve the HTTP APIs of OpenAI, Anthropic and Ollama",
        """
  ondevice serve gemma-4-E2B-it
  ondevice serve ./bundles --memory 8 --alias gpt-4o=gemma-4-E2B-it
  ondevice serve gemma-4-E2B-it --host 0.0.0.0 --api-key-file key.txt --idle-unload 600
  ondevice serve gemma-4-E2B-it --port 0 --exit-with-parent
""",
    ),
    "batch": Command(
        "answer a file of prompts, several at once",
        """
  ondevice batch gemma-4-E2B-it prompts.jsonl --out answers.jsonl
  ondevice batch gemma-4-E2B-it prompts.jsonl --out answers.jsonl --chat --temperature 0 --max-sequences 16
  ondevice batch gemma-4-E2B-it prompts.jsonl --out answers.jsonl --ray auto
""",
        module="ondevice.cli.batch.command",
    ),
    "prepare": Command(
        "compile kernels and pack weights for this machine, once",
        "  ondevice prepare gemma-4-E2B-it",
        module="ondevice.cli.bundles",
    ),
    "pull": Command(
        "download a bundle from the Hugging Face hub",
        """
  ondevice pull someone/gemma-4-E2B-it-ondevice
  ondevice pull someone/gemma-4-E2B-it-ondevice --revision v2 --name e2b
""",
        module="ondevice.cli.bundles",
    ),
    "list": Command(
        "list the bundles in the model home and in ./bundles",
        "  ondevice list",
        module="ondevice.cli.bundles",
    ),
    "remove": Command(
        "delete bundles",
        """
  ondevice remove gemma-4-E2B-it
  ondevice remove bundles/small
""",
        module="ondevice.cli.bundles",
    ),
    "bench": Command(
        "measure speed with the tests of llama-bench, and drafters on text",
        """
  ondevice bench gemma-4-E2B-it
  ondevice bench gemma-4-E2B-it smollm2 -p 512 -n 128 -pg 512,128 -d 0,4096 --threads 1,2,4 -o json
  ondevice bench gemma-4-E2B-it --drafters none,mtp,auto --accept 0.6
  ondevice bench gemma-4-E2B-it --mtp-bench
  ondevice bench gemma-4-E2B-it --drafts --prompts humaneval.jsonl --limit 20 --lengths 2,4,auto --plot speed.png
  ondevice bench gemma-4-E2B-it --scenarios --quick --engine simd,ort --threads 1,2
""",
        module="ondevice.cli.bench.command",
    ),
    "check": Command(
        "check that drafts change no token, or measure what rounding has changed",
        """
  ondevice check gemma-4-E2B-it
  ondevice check gemma-4-E2B-it --prompts humaneval.jsonl --limit 20 --engine ort
  ondevice check gemma-4-E2B-it --against google/gemma-4-E2B-it
""",
    ),
    "tune": Command(
        "find the layers that self-speculative drafts can skip",
        """
  ondevice tune gemma-4-E2B-it
  ondevice tune gemma-4-E2B-it --seconds 3600 --prompts humaneval.jsonl --limit 8
""",
    ),
    "info": Command(
        "describe this machine or a bundle",
        """
  ondevice info
  ondevice info gemma-4-E2B-it --verify-hashes
""",
    ),
    "completion": Command(
        "let the shell complete words",
        """
  ondevice completion bash >> ~/.bash_completion
  ondevice completion zsh > "${fpath[1]}/_ondevice"
  ondevice completion fish > ~/.config/fish/completions/ondevice.fish
""",
    ),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line: the words after `ondevice`, by default those of the process.

    Returns:
        The exit code: 0, `FAILED`, `MISTAKE`, `INTERRUPTED` or `BROKEN_PIPE`.
    """
    if argv is None and "_ARGCOMPLETE" in os.environ:
        _complete()
    words = sys.argv[1:] if argv is None else list(argv)
    _open_closed_streams()
    if argv is None:
        _drop_unwritable_diagnostics()
    if not words:
        print(_overview().format_help(), end="", file=sys.stderr)
        return MISTAKE
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a character that the console lacks must not end the reply
    try:
        try:
            args = parse_args(words)
            return int(args.run(args) or 0)
        finally:
            _flush_output()
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        return BROKEN_PIPE
    except (OndeviceError, OSError, MemoryError) as error:
        if "--debug" in words:
            raise
        print(f"ondevice: {one_line(_message(error))}", file=sys.stderr)
        return MISTAKE


def _message(error: OndeviceError | OSError | MemoryError) -> str:
    if isinstance(error, MemoryError):
        return f"{str(error) or 'not enough memory'}: close other programs, or try a smaller --context-length"
    if isinstance(error, OSError) and type(error).__module__ == "builtins":  # Python's, not one of ours that is both
        return system_error(error)
    return str(error)


def parse_args(argv: Sequence[str]) -> argparse.Namespace:
    """Parse a command line, importing only the module of the command that it names.

    Raises:
        UsageError: unknown command or option, or a wrong value.
        MissingDependencyError: the command belongs to an extra that is not installed.
    """
    if not argv or argv[0] not in COMMANDS:
        if argv and not argv[0].startswith("-"):
            raise UsageError(f"unknown command {shown(argv[0])}{near(argv[0], COMMANDS) or '.'} Try `ondevice --help`")
        return _overview().parse_args(argv)
    parser, words = command_parser(argv[0]), argv[1:]
    if not words:  # an intermixed line lacks its options first, and its positionals only where these are there
        return parser.parse_args(words)
    # Intermixed: the prompt may follow an option, which argparse otherwise refuses for optional positionals.
    return parser.parse_intermixed_args(words)


def command_parser(name: str) -> Parser:
    """The argument parser of a command of `COMMANDS`; imports the command's module, and raises as `parse_args`."""
    command = COMMANDS[name]
    path = command.module or f"ondevice.cli.{name}"
    try:
        module = import_module(path)
    except ModuleNotFoundError as error:
        if command.extra is None:
            raise
        raise MissingDependencyError(error.name or path, command.extra) from error
    description = f"{command.summary[0].upper()}{command.summary[1:]}."
    parser = Parser(prog=f"ondevice {name}", examples=command.examples, description=description)
    add_arguments, run = (
        getattr(module, f"{each}_{name}", None) or getattr(module, each) for each in ("add_arguments", "run")
    )
    add_arguments(parser)
    parser.add_argument("--debug", action="store_true", help="show a traceback where an error occurs")
    parser.set_defaults(run=run)
    return parser


class Parser(argparse.ArgumentParser):
    """An `ArgumentParser` whose help begins with examples, and that raises `UsageError` instead of exiting."""

    def __init__(self, prog: str, *, description: str | None = None, examples: str = "") -> None:
        super().__init__(prog, description=description, allow_abbrev=False)
        self.examples = examples.strip("\n")

    def format_help(self) -> str:
        return f"examples:\n{self.examples}\n\n{super().format_help()}"

    def _print_message(self, message: str, file: Any = None) -> None:
        """Write a text; argparse would ignore that it cannot be written."""
        (file or sys.stderr).write(message)

    def error(self, message: str) -> NoReturn:
        _, found, unknown = message.partition("unrecognized arguments: ")
        if found and unknown.startswith("-"):
            word = unknown.split("=")[0].split()[0]
            meant = near(word, self._option_string_actions)
            raise UsageError(f"unknown option {word}{meant or '.'} Try `{self.prog} --help`")
        raise UsageError(f"{message}. Try `{self.prog} --help`")


def _overview() -> Parser:
    """The parser of `ondevice --help`, `ondevice --version` and unknown commands."""
    parser = Parser(
        prog="ondevice",
        examples="\n".join(COMMANDS[name].examples.split("\n")[1] for name in ("export", "generate", "chat")),
        description="Runs language models on CPUs, with speculative decoding that changes no output.",
    )
    parser.add_argument("--version", action="version", version=f"ondevice {__version__}")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", title="commands", required=True)
    for name, command in COMMANDS.items():
        subparsers.add_parser(name, help=command.summary)
    return parser


def _complete() -> None:
    """Print the completions that a shell's `ondevice completion` script asks for, and end the process."""
    from ondevice.cli.completion import complete, typed_command

    name = typed_command()
    if name and name not in COMMANDS:
        sys.exit(MISTAKE)
    complete(command_parser(name) if name else _overview())


def _open_closed_streams() -> None:
    """Open the null device for each standard stream that the caller closed (`<&-`, `>&-`, `2>&-`).

    Otherwise Python would print errors on standard output, and a file opened later would get the number of the closed
    stream, to which libraries write their messages.
    """
    while (number := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(number)
    sys.stdout = sys.stdout or Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115
    sys.stderr = sys.stderr or Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115


def _drop_unwritable_diagnostics() -> None:
    """Let standard error drop what it cannot write: a full disk under a log must not end a server."""
    stream = sys.stderr
    if isinstance(stream, io.TextIOWrapper):
        writer = io.BufferedWriter(_Diagnostics(stream))
        sys.stderr = io.TextIOWrapper(writer, stream.encoding, stream.errors, line_buffering=True)


class _Diagnostics(io.RawIOBase):
    """The bytes under a stream, whose failures are not errors."""

    def __init__(self, stream: io.TextIOWrapper) -> None:
        self._stream = stream  # which closes the bytes when it is dropped
        # with PYTHONUNBUFFERED nothing lies between
        self._raw: Any = getattr(stream.buffer, "raw", stream.buffer)

    def write(self, data: Any, /) -> int:
        with suppress(OSError):
            return self._raw.write(data) or 0
        return memoryview(data).nbytes

    def writable(self) -> bool:
        return True

    def isatty(self) -> bool:
        return self._stream.isatty()

    def fileno(self) -> int:
        return self._stream.fileno()


def _flush_output() -> None:
    """Write what standard output still holds: the interpreter's last flush would report a failure with a traceback.

    Raises:
        OSError: it cannot be written, for example to a full disk. The null device then gets the rest.
    """
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise


if __name__ == "__main__":
    sys.exit(main())
