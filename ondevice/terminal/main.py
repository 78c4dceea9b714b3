"""`ondevice COMMAND`: parse, run, and turn every mistake into one line."""

from __future__ import annotations

import argparse
import io
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

from ondevice import __version__
from ondevice.errors import OndeviceError, one_line
from ondevice.terminal.exit_codes import BROKEN_PIPE, INTERRUPTED, MISTAKE
from ondevice.terminal.parser import Parser


@dataclass(frozen=True)
class Command:
    """A subcommand: `module` has add_arguments(parser) and run(args) -> exit code, and is imported only to be used."""

    module: str
    summary: str
    examples: str


COMMANDS = {
    "export": Command(
        "ondevice.terminal.export",
        "make a bundle from a checkpoint",
        """
  ondevice export google/gemma-4-E2B-it --out gemma-4-E2B-it
  ondevice export ./checkpoint --drafter ./drafter --quantize int8 --out ./bundle
""",
    ),
    "generate": Command(
        "ondevice.terminal.generate",
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
        "ondevice.terminal.chat",
        "talk to a bundle",
        """
  ondevice chat gemma-4-E2B-it
  ondevice chat gemma-4-E2B-it --thinking --system "Answer in one sentence."
""",
    ),
    "serve": Command(
        "ondevice.terminal.serve",
        "answer HTTP requests as OpenAI's and Anthropic's APIs do",
        """
  ondevice serve gemma-4-E2B-it
  ondevice serve gemma-4-E2B-it --host 0.0.0.0 --api-key-file key.txt --idle-unload 600
  ondevice serve gemma-4-E2B-it --port 0 --exit-with-parent
""",
    ),
    "batch": Command(
        "ondevice.terminal.batch.command",
        "answer a file of prompts, several at once",
        """
  ondevice batch gemma-4-E2B-it prompts.jsonl --out answers.jsonl
  ondevice batch gemma-4-E2B-it prompts.jsonl --out answers.jsonl --chat --temperature 0 --max-sequences 16
  ondevice batch gemma-4-E2B-it prompts.jsonl --out answers.jsonl --ray auto
""",
    ),
    "prepare": Command(
        "ondevice.terminal.prepare",
        "compile kernels and pack weights for this machine, once",
        """
  ondevice prepare gemma-4-E2B-it
""",
    ),
    "pull": Command(
        "ondevice.terminal.pull",
        "fetch a ready bundle from the Hugging Face hub",
        """
  ondevice pull someone/gemma-4-E2B-it-ondevice
  ondevice pull someone/gemma-4-E2B-it-ondevice --revision v2 --name e2b
""",
    ),
    "list": Command(
        "ondevice.terminal.list",
        "show the bundles that can be called by name",
        """
  ondevice list
""",
    ),
    "remove": Command(
        "ondevice.terminal.remove",
        "delete bundles that are called by name",
        """
  ondevice remove gemma-4-E2B-it
""",
    ),
    "bench": Command(
        "ondevice.terminal.bench.command",
        "measure every drafter and draft length",
        """
  ondevice bench gemma-4-E2B-it
  ondevice bench gemma-4-E2B-it --prompts humaneval.jsonl --limit 20 --lengths 2,4,auto --plot speed.png
  ondevice bench gemma-4-E2B-it --scenarios --quick
  ondevice bench gemma-4-E2B-it --scenarios --engines simd,ort --threads 1,2,4 --csv
""",
    ),
    "check": Command(
        "ondevice.terminal.check.command",
        "prove that drafts change no token of a bundle's replies",
        """
  ondevice check gemma-4-E2B-it
  ondevice check gemma-4-E2B-it --prompts humaneval.jsonl --limit 20 --engine ort
""",
    ),
    "tune": Command(
        "ondevice.terminal.tune",
        "find the blocks that a draft of the model itself can do without",
        """
  ondevice tune gemma-4-E2B-it
  ondevice tune gemma-4-E2B-it --seconds 3600 --prompts humaneval.jsonl --limit 8
""",
    ),
    "info": Command(
        "ondevice.terminal.info.command",
        "describe this machine, or a bundle",
        """
  ondevice info
  ondevice info gemma-4-E2B-it --verify-hashes
""",
    ),
    "completion": Command(
        "ondevice.terminal.completion",
        "let the shell complete words",
        """
  ondevice completion bash >> ~/.bash_completion
  ondevice completion zsh > "${fpath[1]}/_ondevice"
  ondevice completion fish > ~/.config/fish/completions/ondevice.fish
""",
    ),
}

EXAMPLES = """
  ondevice export google/gemma-4-E2B-it --out gemma-4-E2B-it
  ondevice generate gemma-4-E2B-it "Why is the sky blue?" --chat
  ondevice chat gemma-4-E2B-it
"""


def parse_args(argv: Sequence[str]) -> argparse.Namespace:
    """Parse a command line; only the module of the command it names is imported.

    Raises:
        UsageError: a command line that cannot be understood.
    """
    if not argv or argv[0] not in COMMANDS:
        return _overview().parse_args(argv)
    # Intermixed: the prompt may follow an option, which argparse otherwise refuses for optional positionals.
    return command_parser(argv[0]).parse_intermixed_args(argv[1:])


def command_parser(name: str) -> Parser:
    """The parser of one of `COMMANDS`, whose module it imports."""
    command = COMMANDS[name]
    module = import_module(command.module)
    parser = Parser(prog=f"ondevice {name}", examples=command.examples, description=command.summary.capitalize() + ".")
    module.add_arguments(parser)
    parser.add_argument("--debug", action="store_true", help="show a traceback when something goes wrong")
    parser.set_defaults(run=module.run)
    return parser


def _overview() -> Parser:
    """The parser of everything that is not a command: help, version, mistakes."""
    parser = Parser(
        prog="ondevice",
        examples=EXAMPLES,
        description="Gemma 4 on CPUs, offline, with drafts that never change the output.",
    )
    parser.add_argument("--version", action="version", version=f"ondevice {__version__}")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", title="commands", required=True)
    for name, command in COMMANDS.items():
        subparsers.add_parser(name, help=command.summary)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code: 0, 2 for a mistake of the user's, 130 for Ctrl-C."""
    words = sys.argv[1:] if argv is None else list(argv)
    _open_closed_streams()
    if not words:
        print(_overview().format_help(), end="", file=sys.stderr)
        return MISTAKE
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a console that lacks a character must not end the reply
    try:
        args = parse_args(words)
        return int(args.run(args))
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        _drop_output()
        return BROKEN_PIPE
    except (OndeviceError, OSError, MemoryError) as error:
        if "--debug" in words:
            raise
        remedy = ": close other programs, or try a smaller --context-length" if isinstance(error, MemoryError) else ""
        print(f"ondevice: {one_line(str(error) or 'there is not enough memory')}{remedy}", file=sys.stderr)
        return MISTAKE


def _open_closed_streams() -> None:
    """Let what is said to a closed stream (`>&-`, `2>&-`) go nowhere. Python would print errors on standard output, and
    a file that is opened later would have the stream's number, for libraries to write their complaints into.
    """
    while (number := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(number)
    sys.stdout = sys.stdout or Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115
    sys.stderr = sys.stderr or Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115


def _drop_output() -> None:
    """The reader has left (`| head`): let the interpreter's last flush go nowhere instead of complaining."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    sys.exit(main())
