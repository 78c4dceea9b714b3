"""`ondevice chat`: a conversation, typed or piped, one message per line.

In order: the command, the conversation, the lines that begin with a slash, reading lines.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from ondevice.bundle import RESPONSE_TEMPLATE, model_home
from ondevice.cli.main import Parser
from ondevice.cli.options import (
    add_chat_arguments,
    add_generation_arguments,
    add_image_tokens_argument,
    add_model_arguments,
    generation_options,
    load_model,
)
from ondevice.cli.prompts import KINDS, content_part, dropped_files, named_files, read_list, standard_input
from ondevice.cli.terminal.progress import unseen_keys
from ondevice.cli.terminal.reply_view import MarkdownView, TextView, can_format, notice, stream_reply, summary
from ondevice.cli.terminal.style import RESET, Style, aligned, columns, has_colours, note, styled
from ondevice.errors import ContextOverflowError, OndeviceError, PromptError, UsageError, near, system_error
from ondevice.files import replacing
from ondevice.machine import expanded
from ondevice.text.messages import SYSTEM_ROLES
from ondevice.text.prompt_file import decode, read_lines

if TYPE_CHECKING:
    from ondevice.generate.stats import Stats
    from ondevice.generation import Reply
    from ondevice.model import Model
    from ondevice.options import GenerationDefaults, GenerationKeywords

REPLY_TOKENS = 4096
"""Default of `--max-new-tokens`: a reply with thoughts can have thousands, and Ctrl-C ends an endless one."""

DEFAULTS: GenerationKeywords = {"max_new_tokens": REPLY_TOKENS}
"""Options of a chat whose default is not that of `Model.stream`."""

CONTEXT_FULL = "/drop forgets the oldest question and its reply, /clear all"

NO_THINKING = ", but this bundle's template does not support it"

HELLO = {"role": "user", "content": "Hello"}
"""A message to try the template with."""

EXIT_WORDS = ("/exit", "/quit", "/bye")

QUOTES = '"""'
"""Begins and ends a message of several lines."""

PROMPT, MORE_PROMPT = "> ", "... "

HISTORY_LINES = 1000


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_arguments(parser)
    group = parser.add_argument_group("conversation")
    add_chat_arguments(group)
    add_image_tokens_argument(group)
    add_plain_argument(group)
    add_generation_arguments(parser, max_new_tokens=REPLY_TOKENS)


def add_plain_argument(group: argparse._ActionsContainer) -> None:
    group.add_argument(
        "--plain",
        action="store_true",
        help="show replies of a chat as the model writes them; by default, a terminal shows them as formatted "
        "Markdown, if the package rich is installed",
    )


def run(args: argparse.Namespace) -> int:
    standard_input()  # fails before the model is loaded
    with load_model(args) as model:
        make_view = MarkdownView if can_format() and not args.plain else TextView
        options: GenerationKeywords = {**DEFAULTS, **generation_options(args)}
        conversation = Conversation(model, options, args.system, make_view)
        if args.thinking and not conversation.can_think:
            print(f"ondevice: --thinking is on{NO_THINKING}", file=sys.stderr)
        typed = sys.stdin.isatty()
        if typed:
            print(f"{model.manifest.name}: /help lists the commands", file=sys.stderr)
        say = _spaced(conversation.say) if typed else conversation.say
        for text, is_quoted in messages(typed_lines() if typed else _piped_lines()):
            if is_quoted and text:
                say(text)
                continue
            if text in EXIT_WORDS:
                break
            dropped = dropped_files(text) if typed else []
            if dropped or text.startswith("/"):
                _obey(text, dropped, conversation, typed=typed)
            elif text:
                say(text)
    return 0


def _obey(line: str, dropped: Sequence[Path], conversation: Conversation, *, typed: bool) -> None:
    """Attach the files that were dropped, or else run the command. What goes wrong ends it, not the conversation, as
    does Ctrl-C while messages are typed.
    """
    try:
        if dropped:
            _attach(conversation, [(KINDS[path.suffix.lower()], path) for path in dropped])
        else:
            run_command(line, conversation)
    except OndeviceError as error:
        note(f"ondevice: {error}")
    except OSError as error:
        note(f"ondevice: {system_error(error)}")
    except KeyboardInterrupt:
        if not typed:
            raise
        note("(stopped)")


def _spaced(say: Callable[[str], None]) -> Callable[[str], None]:
    """`say` with an empty line before and after the reply, which tell it from what is typed."""

    def spaced(text: str) -> None:
        _print("")
        say(text)
        _print("")

    return spaced


class Conversation:
    """The messages of one session in OpenAI's form. A reply that was stopped stays as far as it came."""

    def __init__(
        self,
        model: Model,
        options: GenerationKeywords,
        system: str | None = None,
        make_view: Callable[[], TextView] = TextView,
    ) -> None:
        """`options` are keywords of `Model.stream`; `make_view` makes the view of each reply.

        Raises:
            PromptError: the bundle has no chat template, or one that refuses a system message.
        """
        self._model = model
        self.options = options
        self._make_view = make_view
        self.thinking = options.get("thinking") or True
        """The option `thinking` where `/think` switches it on: a word keeps saying how much."""
        self.messages: list[dict[str, Any]] = []
        self.attached: list[tuple[str, dict[str, Any]]] = []
        """Attachments of the next message: names with their number of tokens, and content parts in OpenAI's form."""
        self.thoughts = ""
        """The thoughts of the last reply."""
        self.stats: Stats | None = None
        """Figures of the last reply."""
        self.instruct(system)
        model.encode([*self.messages, HELLO])  # a bundle that cannot chat fails now, not after the first message

    @property
    def system(self) -> str | None:
        """The text of the system message."""
        return self.messages[0]["content"] if self._system_messages else None

    @property
    def _system_messages(self) -> list[dict[str, Any]]:
        return self.messages[:1] if self.messages and self.messages[0]["role"] in SYSTEM_ROLES else []

    @property
    def defaults(self) -> GenerationDefaults:
        """The bundle's values of options that are not set."""
        return self._model.defaults

    @property
    def can_think(self) -> bool:
        """Whether `thinking` changes what the template writes."""
        return self._model.encode([HELLO], thinking=True) != self._model.encode([HELLO], thinking=False)

    def instruct(self, system: str | None) -> None:
        """Replace the system message from now on; None removes it."""
        turns = self.messages[len(self._system_messages) :]
        self.messages = [*([{"role": "system", "content": system}] if system else []), *turns]

    def use(self, options: GenerationKeywords) -> None:
        """Generate with other options from now on; OndeviceError for one that is invalid or not supported here."""
        self._model.stream([*self._system_messages, HELLO], **options).close()  # validates, computes nothing
        self.options = options

    def attach(self, kind: str, path: Path) -> None:
        """Let an `image` or `audio` file go with the next message. It is read now: later it may change.

        Raises:
            PromptError: a file that is not one of this kind, or more than the bundle and its context can read.
        """
        part = content_part(kind, path)
        parts, tokens = [each for _, each in self.attached], self.options.get("image_tokens")
        dot = {"type": "text", "text": "."}
        lengths = [
            len(self._model.encode([{"role": "user", "content": [*content, dot]}], image_tokens=tokens))
            for content in (parts, [*parts, part])
        ]
        self.attached.append((f"{path.name} ({lengths[1] - lengths[0]} tokens)", part))

    def say(self, text: str) -> None:
        """Send a message, with what is attached, and show the reply."""
        parts = [part for _, part in self.attached]
        if self._ask([*parts, {"type": "text", "text": text}] if parts else text):
            self.attached = []

    def _ask(self, content: Any) -> bool:
        """Send the content of a message and show the reply; False for one that does not fit, which leaves the
        conversation unchanged.
        """
        asked = [*self.messages, {"role": "user", "content": content}]
        try:
            with unseen_keys():
                reply = stream_reply(self._model, asked, self.options, self._make_view())
        except PromptError as error:
            hint = f" ({CONTEXT_FULL})" if isinstance(error, ContextOverflowError) else ""
            note(f"ondevice: {error}{hint}")
            return False
        self.messages = [*asked, self._as_message(reply)]
        self.thoughts = reply.reasoning
        self.stats = reply.stats
        note(f"(the context is full: {CONTEXT_FULL})" if reply.finish_reason == "context" else notice(reply))
        return True

    def regenerate(self) -> None:
        """Answer the last message again, replacing its reply; UsageError without one."""
        before = self.messages
        if len(before) < 2 or (before[-2]["role"], before[-1]["role"]) != ("user", "assistant"):
            raise UsageError("there is no message to answer again")
        answered = False
        try:
            self.messages = before[:-2]
            answered = self._ask(before[-2]["content"])
        finally:
            if not answered:
                self.messages = before

    def drop(self) -> None:
        """Forget the oldest question and its reply; UsageError without one."""
        system = self._system_messages
        turns = self.messages[len(system) :]
        if not turns:
            raise UsageError("there is no message to drop")
        later = [index for index, message in enumerate(turns) if index and message["role"] == "user"]
        self.messages = [*system, *(turns[later[0] :] if later else [])]

    def clear(self) -> None:
        """Forget all messages but the system message, and what the model's cache and drafters keep of them."""
        self.messages = self._system_messages
        self.attached = []
        self.thoughts = ""
        self._model.forget()

    def save(self, path: Path) -> None:
        """Write the messages to a file, as JSON in OpenAI's form, pictures and sounds in base64.

        Raises:
            UsageError: the file exists and is not a saved conversation, or no file can have this name.
            OSError: it cannot be written; the old one stays.
        """
        if path.exists():
            try:
                read_list(path, "list of messages", dict)
            except PromptError as error:
                raise UsageError(f"{path} is not a conversation and is not overwritten: name another file") from error
        content = f"{json.dumps(self.messages, indent=1, ensure_ascii=False)}\n".encode()
        try:
            with replacing(path) as file:
                file.write(content)
        except ValueError as error:  # a NUL, or a letter that names of files cannot have in this locale
            raise UsageError(f"cannot write {str(path)!r}: {error}") from error

    def load(self, path: Path) -> None:
        """Continue with the messages of a file; PromptError if this bundle's template does not accept them."""
        messages = read_list(path, "list of messages", dict)
        self._model.encode([*messages, HELLO])
        self.messages, self.thoughts = messages, ""

    def _as_message(self, reply: Reply) -> dict[str, Any]:
        """The reply as a message for the template.

        Where the bundle does not say how to separate thoughts, its text keeps the control tokens, because the template
        can remove thoughts from earlier turns only by these, except those at its end, which the template writes itself.
        """
        if reply.reasoning or reply.tool_calls or RESPONSE_TEMPLATE in self._model.manifest.files:
            return reply.message
        text, tokenizer, inner = reply.text, self._model.tokenizer, list(reply.token_ids)
        if tokenizer is not None:
            while inner and inner[-1] in tokenizer.special_ids:
                inner.pop()
            if not tokenizer.special_ids.isdisjoint(inner):
                text = tokenizer.decode(inner, keep_special=True)
        return {"role": "assistant", "content": text}


class ChatCommand(NamedTuple):
    """A line that begins with a slash.

    run : called with the conversation and, if the command takes one, its argument: the text after its word
    argument : how `/help` shows the argument; empty for a command that takes none
    """

    run: Callable[..., None]
    summary: str
    argument: str = ""


def run_command(line: str, conversation: Conversation) -> None:
    """Run a line that begins with a slash; UsageError where no command or argument is like that."""
    word, _, rest = line.partition(" ")
    if word in EXIT_WORDS:
        raise UsageError(f"{word} takes no argument")
    command = CHAT_COMMANDS.get(word)
    if command is None:
        raise UsageError(
            f"unknown command {word}{near(word, [*CHAT_COMMANDS, *EXIT_WORDS]) or ':'} /help lists the commands"
        )
    rest = rest.strip()
    if rest and not command.argument:
        raise UsageError(f"{word} takes no argument")
    command.run(conversation, *([rest] if command.argument else []))


def _system(conversation: Conversation, rest: str) -> None:
    if rest:
        conversation.instruct(None if rest == "none" else rest)
    else:
        _print(conversation.system or "no system message: /system TEXT sets one")


def _think(conversation: Conversation) -> None:
    thinks = not conversation.options.get("thinking")
    conversation.options["thinking"] = thinks and conversation.thinking
    note(f"(thinking is {'on' if thinks else 'off'}{'' if conversation.can_think else NO_THINKING})")


def _thoughts(conversation: Conversation) -> None:
    _print(styled(conversation.thoughts, Style.DIM, sys.stderr) or "no thoughts in the last reply")


def _stats(conversation: Conversation) -> None:
    note(summary(conversation.stats) if conversation.stats else "no reply yet")


def _set(conversation: Conversation, rest: str) -> None:
    name, _, value = rest.partition(" ")
    name = name.removeprefix("--").replace("-", "_")
    if not value.strip():
        settings = _settings(conversation)
        shown = {known: text for known, text in settings.items() if name in ("", known)}
        if not shown:
            raise UsageError(f"unknown option {name}{near(name, settings) or ':'} /set shows all of them")
        _print("\n".join(aligned(shown, columns())))
        return
    others = {known: own for known, own in conversation.options.items() if known != name}
    changed = {} if value.strip() == "default" else _parse_setting(name, value.strip())
    conversation.use(cast("GenerationKeywords", {**DEFAULTS, **others, **changed}))


def _settings(conversation: Conversation) -> dict[str, list[str]]:
    """All options and their values, those of the bundle where none is set."""
    parser = Parser("/set")
    add_generation_arguments(parser, max_new_tokens=REPLY_TOKENS)
    add_image_tokens_argument(parser)
    found = {}
    for action in parser._actions:
        if (name := action.dest) != "help":
            own = conversation.options.get(name)
            default = getattr(conversation.defaults, name, action.default)
            usual = "default" if default is None else f"{default} (default)"
            found[name] = [usual if own is None else str(own)]
    return found


def _parse_setting(name: str, value: str) -> dict[str, Any]:
    """A keyword of `Model.stream` from an option's name and value, parsed as on the command line."""
    parser = Parser("/set")
    add_generation_arguments(parser)
    add_image_tokens_argument(parser)
    known = sorted(action.dest for action in parser._actions if action.dest != "help")
    if name not in known:
        raise UsageError(f"unknown option {name}{near(name, known) or ':'} /set takes {', '.join(known)}")
    try:
        arguments = parser.parse_args([f"--{name.replace('_', '-')}={value}"])
    except UsageError as error:
        raise UsageError(str(error).partition(". Try")[0]) from error
    return {key: given for key, given in generation_options(arguments).items() if key == name}


def _attach_named(kind: str, conversation: Conversation, rest: str) -> None:
    """`/image` or `/audio`."""
    if rest == "none":
        conversation.attached = []
        rest = ""
    _attach(conversation, [(kind, path) for path in (named_files(rest) or [_path(rest)] if rest else [])])


def _attach(conversation: Conversation, files: Iterable[tuple[str, Path]]) -> None:
    """Attach files, each with its kind, and show what goes with the next message."""
    for kind, path in files:
        conversation.attach(kind, path)
    names = ", ".join(name for name, _ in conversation.attached)
    note(f"(with the next message: {names})" if names else "(nothing goes with the next message)")


def _save(conversation: Conversation, rest: str) -> None:
    path = _path(rest)
    conversation.save(path)
    note(f"(saved: {path})")


def _load(conversation: Conversation, rest: str) -> None:
    conversation.load(_path(rest))
    _print(f"({len(conversation.messages)} messages)")


def _path(rest: str) -> Path:
    if not rest:
        raise UsageError("give the name of a file")
    return expanded(rest)


def _help(_: Conversation) -> None:
    lines = {f"{word} {command.argument}".rstrip(): [command.summary] for word, command in CHAT_COMMANDS.items()}
    lines |= {
        "/exit": ["end the chat, as /quit, /bye and Ctrl-D do"],
        QUOTES: ["begins and ends a message of several lines"],
        "Ctrl-C": ["stops a reply or a command, and drops a message of several lines"],
        "a file": ["a picture or sound that is dropped into the terminal goes with the next message"],
        "Tab": ["completes commands, and names of files after those that take one"],
        "arrow up": ["earlier messages, also those of earlier chats"],
    }
    _print("\n".join(aligned(lines, columns())))


def _print(text: str) -> None:
    print(text, file=sys.stderr)


CHAT_COMMANDS = {
    "/clear": ChatCommand(Conversation.clear, "forget the conversation"),
    "/drop": ChatCommand(
        Conversation.drop, "forget the oldest question and its reply, for example when the context is full"
    ),
    "/regenerate": ChatCommand(
        Conversation.regenerate, "answer the last message again (the reply is the same with a seed or temperature 0)"
    ),
    "/system": ChatCommand(_system, "show or replace the system message; none removes it", "[TEXT]"),
    "/think": ChatCommand(_think, "switch thinking before the answer on or off"),
    "/thoughts": ChatCommand(_thoughts, "show the thoughts of the last reply"),
    "/set": ChatCommand(
        _set, "set an option of the command line, as temperature 0.5; without arguments, show them", "[NAME VALUE]"
    ),
    "/image": ChatCommand(
        partial(_attach_named, "image"), "let a picture go with the next message; none takes all back", "FILE"
    ),
    "/audio": ChatCommand(partial(_attach_named, "audio"), "let a sound go with the next message", "FILE"),
    "/save": ChatCommand(_save, "write the conversation to a file, as JSON", "FILE"),
    "/load": ChatCommand(_load, "continue a conversation from a file", "FILE"),
    "/stats": ChatCommand(_stats, "show speed and drafts of the last reply"),
    "/help": ChatCommand(_help, "show this list"),
}


class ChatInput(NamedTuple):
    """Input that was typed or piped at once.

    text : a line, or several
    is_quoted : whether it is a message even if it begins like a command: several lines, between two `QUOTES` or pasted
    """

    text: str
    is_quoted: bool


def messages(lines: Generator[str | None, str | None]) -> Iterator[ChatInput]:
    """Messages and commands: one per line, or several lines between two `QUOTES`. Pasted lines come as one. A message
    without the second `QUOTES` is dropped.

    Args:
        lines: is sent the prompt for a line that continues a message; yields None where Ctrl-C drops that message.
    """
    for line in lines:
        text = (line or "").strip()
        is_pasted = "\n" in text
        if is_pasted or not text.startswith(QUOTES):
            yield ChatInput(text, is_pasted)
            continue
        text = text.removeprefix(QUOTES)
        while not text.endswith(QUOTES):
            try:
                more = lines.send(MORE_PROMPT)
            except StopIteration:
                more = None
            if more is None:
                note(f"(not sent: the message does not end with {QUOTES})")
                break
            text += f"\n{more.rstrip()}"
        else:
            yield ChatInput(text.removesuffix(QUOTES).strip("\n"), True)


def _piped_lines() -> Generator[str | None, str | None]:
    for line in read_lines(standard_input(), "standard input"):
        yield decode(line, "standard input")


def typed_lines() -> Generator[str | None, str | None]:
    """Lines typed at a terminal until Ctrl-D, with the history of earlier chats on the arrow keys.

    It can be sent another prompt than `PROMPT`, for the next line; Ctrl-C at that prompt yields None.
    """
    with _line_editing(model_home() / "chat_history"):
        prompt: str | None = None
        while True:
            try:
                prompt = yield input(_shown_prompt(prompt or PROMPT))
            except KeyboardInterrupt:
                print("" if prompt else "\n(Ctrl-D leaves)", file=sys.stderr)
                if prompt:
                    prompt = yield None
            except EOFError:
                print()
                return
            except UnicodeDecodeError as error:
                raise UsageError("this terminal does not send UTF-8: set its encoding to UTF-8") from error


def _shown_prompt(prompt: str) -> str:
    """The prompt in colour. Readline does not count what is between \\001 and \\002 as characters of the line."""
    if "readline" not in sys.modules or not has_colours(sys.stdout):
        return prompt
    return f"\001{Style.PROMPT}\002{prompt}\001{RESET}\002"


def completions(line: str) -> list[str]:
    """Completions of the last word of a typed line: a command, or the name of a file for one that takes a file."""
    word, space, rest = line.partition(" ")
    if not space:
        return [f"{name} " for name in [*CHAT_COMMANDS, *EXIT_WORDS] if word and name.startswith(word)]
    if " " in rest or word not in CHAT_COMMANDS or CHAT_COMMANDS[word].argument != "FILE":
        return []
    directory = rest[: rest.rfind("/") + 1]
    try:
        found = sorted(expanded(directory or ".").iterdir())
    except OSError:
        return []
    names = [f"{directory}{path.name}{'/' if path.is_dir() else ' '}" for path in found]
    return [name for name in names if name.startswith(rest)]


@contextlib.contextmanager
def _line_editing(path: Path) -> Iterator[None]:
    """Within the block, `input` has readline's editing keys, and a history that is kept in a file.

    Python on Windows has no readline; its console has editing keys of its own, and no history is kept.
    """
    try:
        import readline  # the import alone gives `input` its keys
    except ImportError:
        yield
        return
    if os.environ.get("TERM") != "dumb":  # which would show the codes around what is pasted
        readline.parse_and_bind("set enable-bracketed-paste on")  # pasted lines become one message
    readline.parse_and_bind("bind ^I rl_complete" if "libedit" in (readline.__doc__ or "") else "tab: complete")
    readline.set_completer_delims(" ")
    readline.set_completer(lambda word, number: dict(enumerate(completions(readline.get_line_buffer()))).get(number))
    with contextlib.suppress(OSError):
        readline.read_history_file(path)
    try:
        yield
    finally:
        readline.set_history_length(HISTORY_LINES)
        with contextlib.suppress(OSError):  # a model home that is not writable: no history is kept
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch(mode=0o600)
            readline.write_history_file(path)
