"""What begins with a slash in a chat."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from ondevice.errors import UsageError
from ondevice.machine import expanded
from ondevice.terminal.conversation import Conversation
from ondevice.terminal.options import add_generation_arguments, generation_options
from ondevice.terminal.parser import Parser
from ondevice.terminal.style import dim

if TYPE_CHECKING:
    from ondevice.options import GenerationKeywords

LEAVE = ("/exit", "/quit", "/bye")

DEFAULT = "default"


class Command(NamedTuple):
    """
    does : given the conversation and what stands behind the word
    takes : what may stand there; nothing if empty
    """

    does: Callable[[Conversation, str], None]
    summary: str
    takes: str = ""


def run_command(line: str, conversation: Conversation) -> None:
    """Run one.

    Raises:
        UsageError: there is none of that name, or it does not take what it was given.
    """
    word, _, rest = line.partition(" ")
    command = COMMANDS.get(word)
    if command is None:
        raise UsageError(f"no command {word}: /help lists them")
    rest = rest.strip()
    if rest and not command.takes:
        raise UsageError(f"{word} takes nothing behind it")
    command.does(conversation, rest)


def _say(text: str) -> None:
    print(text, file=sys.stderr)


def _help(conversation: Conversation, rest: str) -> None:
    lines = [(f"{word} {command.takes}".rstrip(), command.summary) for word, command in COMMANDS.items()]
    lines += [
        ("/exit", "leave, as /quit, /bye and Ctrl-D do"),
        ('"""', "begins a message of several lines, and ends it"),
        ("Ctrl-C", "stops a reply"),
    ]
    _say("\n".join(f"{word:20} {summary}" for word, summary in lines))


def _clear(conversation: Conversation, rest: str) -> None:
    conversation.clear()


def _drop(conversation: Conversation, rest: str) -> None:
    conversation.drop()


def _regenerate(conversation: Conversation, rest: str) -> None:
    conversation.regenerate()


def _system(conversation: Conversation, rest: str) -> None:
    if rest:
        conversation.instruct(None if rest == "none" else rest)
    else:
        _say(conversation.system or "no instructions: /system TEXT gives some")


def _think(conversation: Conversation, rest: str) -> None:
    thinks = not conversation.options.get("thinking")
    conversation.options["thinking"] = thinks
    _say(f"(thinking is {'on' if thinks else 'off'}{'' if conversation.can_think else UNKNOWN})")


UNKNOWN = ", but this bundle's template does not know it"


def _thoughts(conversation: Conversation, rest: str) -> None:
    _say(dim(conversation.thoughts, sys.stderr) or "no thoughts in the last reply")


def _set(conversation: Conversation, rest: str) -> None:
    if not rest:
        chosen = {name: value for name, value in conversation.options.items() if name != "thinking"}
        _say("\n".join(f"{name} {value}" for name, value in chosen.items()) or "nothing is set")
        return
    name, _, value = rest.partition(" ")
    name = name.removeprefix("--").replace("-", "_")
    changed = cast("dict[str, Any]", dict(conversation.options))
    changed.pop(name, None)
    if value.strip() != DEFAULT:
        changed |= _setting(name, value.strip())
    conversation.use(cast("GenerationKeywords", changed))


def _setting(name: str, value: str) -> dict[str, Any]:
    """An option by its name, and its value as it was typed."""
    parser = Parser("/set")
    add_generation_arguments(parser)
    known = sorted(action.dest for action in parser._actions if action.dest != "help")
    if name not in known:
        raise UsageError(f"there is no option {name}: /set takes {', '.join(known)}")
    try:
        arguments = parser.parse_args([f"--{name.replace('_', '-')}={value}"])
    except UsageError as error:
        raise UsageError(str(error).partition(". Try")[0]) from error
    return {key: given for key, given in generation_options(arguments).items() if key == name}


def _save(conversation: Conversation, rest: str) -> None:
    conversation.save(_path(rest))
    _say(f"(saved: {_path(rest)})")


def _load(conversation: Conversation, rest: str) -> None:
    conversation.load(_path(rest))
    _say(f"({len(conversation.messages)} messages)")


def _path(rest: str) -> Path:
    if not rest:
        raise UsageError("name a file")
    return expanded(rest)


def _stats(conversation: Conversation, rest: str) -> None:
    _say(conversation.stats())


COMMANDS = {
    "/clear": Command(_clear, "forget the conversation"),
    "/drop": Command(_drop, "forget the oldest question and its reply, for instance where the context is full"),
    "/regenerate": Command(
        _regenerate, "another reply to the last message (the same one with a seed or temperature 0)"
    ),
    "/system": Command(_system, "show the instructions, or give others from now on; none takes them away", "[TEXT]"),
    "/think": Command(_think, "let the model think before it answers, or no longer"),
    "/thoughts": Command(_thoughts, "show what it thought before the last reply"),
    "/set": Command(_set, "an option of the command line, as temperature 0.5; alone, show them", "[NAME VALUE]"),
    "/save": Command(_save, "write the conversation to a file, as JSON", "FILE"),
    "/load": Command(_load, "go on with a conversation from a file", "FILE"),
    "/stats": Command(_stats, "figures of the last reply"),
    "/help": Command(_help, "this list"),
}
