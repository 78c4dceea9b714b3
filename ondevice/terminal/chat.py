"""`ondevice chat`: a conversation."""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Iterator

from ondevice.errors import UsageError
from ondevice.terminal.conversation import Conversation
from ondevice.terminal.loading import load_model
from ondevice.terminal.options import add_generation_arguments, add_model_arguments, generation_options
from ondevice.terminal.prompt_input import standard_input
from ondevice.text.prompt_file import decode

HELP = """\
/clear       forget the conversation
/regenerate  another reply to the last message (the same one with --seed or --temperature 0)
/stats       figures of the last reply
/help        this list
/exit        leave, as /quit, /bye and Ctrl-D do
\"\"\"          begins a message of several lines, and ends it
Ctrl-C       stops a reply"""

LEAVE = ("/exit", "/quit", "/bye")

MARK = '"""'
"""Before and after a message of several lines."""

REPLY_TOKENS = 1024


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_arguments(parser)
    parser.add_argument("--system", metavar="TEXT", help="instructions for the whole conversation")
    add_generation_arguments(parser, max_new_tokens=REPLY_TOKENS)


def run(args: argparse.Namespace) -> int:
    standard_input()  # before a model is loaded for nothing
    with load_model(args) as model:
        conversation = Conversation(model, generation_options(args), args.system)
        if sys.stdin.isatty():
            print(f"{model.manifest.name}: /help lists the commands", file=sys.stderr)
        lines = _typed() if sys.stdin.isatty() else _piped()
        for message in _messages(lines):
            if message in LEAVE:
                break
            if message:
                _answer(message, conversation)
    return 0


def _answer(line: str, conversation: Conversation) -> None:
    if line == "/clear":
        conversation.clear()
    elif line == "/regenerate":
        conversation.regenerate()
    elif line == "/stats":
        print(conversation.stats(), file=sys.stderr)
    elif line == "/help":
        print(HELP, file=sys.stderr)
    elif line.startswith("/"):
        print(f"ondevice: no command {line.split(maxsplit=1)[0]}: /help lists them", file=sys.stderr)
    else:
        conversation.say(line)


def _messages(lines: Iterator[str]) -> Iterator[str]:
    """Lines, those between two marks as one."""
    for line in lines:
        message = line.strip()
        if message.startswith(MARK):
            message = message.removeprefix(MARK)
            while not message.endswith(MARK) and (more := next(lines, None)) is not None:
                message += f"\n{more.rstrip()}"
            message = message.removesuffix(MARK).strip("\n")
        yield message


def _typed() -> Iterator[str]:
    """Lines from a person, until Ctrl-D."""
    with contextlib.suppress(ImportError):  # Windows has none: its console does the same
        import readline  # importing it gives input() a history and editing keys

        readline.parse_and_bind("set enable-bracketed-paste on")  # pasted lines are one message
    while True:
        try:
            yield input("> ")
        except KeyboardInterrupt:
            print("\n(Ctrl-D leaves)", file=sys.stderr)
        except EOFError:
            print()
            return
        except UnicodeDecodeError as error:
            raise UsageError("this terminal does not send UTF-8: set its encoding to UTF-8") from error


def _piped() -> Iterator[str]:
    """One message per line."""
    for line in standard_input():
        yield decode(line, "standard input")
