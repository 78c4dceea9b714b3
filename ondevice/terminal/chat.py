"""`ondevice chat`: a conversation."""

from __future__ import annotations

import argparse
import sys

from ondevice.errors import OndeviceError
from ondevice.terminal import lines
from ondevice.terminal.chat_commands import LEAVE, UNKNOWN, run_command
from ondevice.terminal.conversation import Conversation
from ondevice.terminal.loading import load_model
from ondevice.terminal.options import (
    add_chat_arguments,
    add_generation_arguments,
    add_model_arguments,
    generation_options,
)
from ondevice.terminal.prompt_input import standard_input

REPLY_TOKENS = 4096
"""A reply that thinks first has thousands; Ctrl-C ends one that does not end."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_arguments(parser)
    add_chat_arguments(parser.add_argument_group("conversation"))
    add_generation_arguments(parser, max_new_tokens=REPLY_TOKENS)


def run(args: argparse.Namespace) -> int:
    standard_input()  # before a model is loaded for nothing
    with load_model(args) as model:
        conversation = Conversation(model, generation_options(args), args.system)
        if args.thinking and not conversation.can_think:
            print(f"ondevice: --thinking is on{UNKNOWN}", file=sys.stderr)
        if sys.stdin.isatty():
            print(f"{model.manifest.name}: /help lists the commands", file=sys.stderr)
        for message in lines.messages(lines.typed() if sys.stdin.isatty() else lines.piped()):
            if message in LEAVE:
                break
            if message.startswith("/"):
                _run_command(message, conversation)
            elif message:
                conversation.say(message)
    return 0


def _run_command(message: str, conversation: Conversation) -> None:
    """A mistake ends the command, not the conversation."""
    try:
        run_command(message, conversation)
    except (OndeviceError, OSError) as error:
        print(f"ondevice: {error}", file=sys.stderr)
