"""A reply on a terminal as formatted Markdown, with the package `rich`, while it is generated.

A block of Markdown, such as a paragraph, a list or a block of code, is shown as it was written until the next block
begins; then it is printed once more, formatted, in its place. Lines above it never change.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from typing import TYPE_CHECKING, ClassVar

from ondevice.cli.reply_view import TextView
from ondevice.cli.style import ESCAPE_CODE, has_colours, is_terminal

if TYPE_CHECKING:
    from rich.markdown import Markdown

    from ondevice.generation import Reply, Step
    from ondevice.text.messages import ToolCall

CODE_THEME = "ansi_dark"
"""Colours of code: the terminal's own 16, which fit its background."""

STYLES = {"markdown.code": "cyan", "markdown.h1": "bold", "markdown.h2": "bold", "markdown.h3": "bold"}
"""Rich's own have backgrounds and underlines."""

UNSEEN = {code: "\N{REPLACEMENT CHARACTER}" for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}
"""Control characters, with which a reply could move the cursor."""

TAB_SIZE = 4

LATER = 16
"""A block is parsed again when a line has ended and it is longer by one part in so many: parsing a list of a thousand
items after each of them would take longer than generating it."""


def can_format() -> bool:
    """Whether standard output is a terminal, and `rich` is installed."""
    return is_terminal(sys.stdout) and find_spec("rich") is not None


class MarkdownView(TextView):
    """A `TextView` that formats the answer. Only for a terminal: it moves the cursor."""

    def __init__(self) -> None:
        super().__init__()
        self._block = ""
        """Text of the block that is not complete yet."""
        self._parsed_from = 0
        """Length from which `_block` is parsed again."""
        self._rows: list[str] = []
        """Rows of the screen that show the end of `_block`; the cursor is behind the last one."""
        self._formatted = False
        """Whether a block was printed, so that the next one needs an empty line before it."""

    def end(self, reply: Reply) -> None:
        self._complete()
        super().end(reply)

    def _answer(self, step: Step) -> None:
        text = step.text.translate(UNSEEN).expandtabs(TAB_SIZE)
        if not text:
            return
        self._end_thoughts()
        self._block += text
        if "\n" in text and len(self._block) >= self._parsed_from:
            complete = complete_blocks(self._block)
            if complete:
                rest = self._block[len(complete) :]
                self._block = complete
                self._complete()
                self._block = rest
            self._parsed_from = len(self._block) + len(self._block) // LATER
        self._draw(tail(self._block, *shutil.get_terminal_size()))

    def _begin_thoughts(self) -> None:
        self._complete()
        super()._begin_thoughts()

    def _call(self, call: ToolCall) -> None:
        self._complete()
        super()._call(call)

    def _complete(self) -> None:
        """Replace the rows on the screen by the formatted block."""
        self._draw([])
        if shown := formatted(self._block, shutil.get_terminal_size().columns):
            self._write(f"\n{shown}" if self._formatted else shown)
            self._formatted = True
        self._block = ""

    def _draw(self, rows: list[str]) -> None:
        """Change the rows on the screen from `_rows` to `rows`, from the first one that differs on."""
        sys.stdout.write(change(self._rows, rows))
        sys.stdout.flush()
        self._rows = rows


def complete_blocks(text: str) -> str:
    """The beginning of a Markdown text that further text cannot change any more: whole blocks of it, or nothing.

    Only whole lines are looked at: a line that has just begun may still turn into the next item of a list.
    """
    from markdown_it import MarkdownIt

    lines = text.splitlines(keepends=True)
    whole = lines if text.endswith("\n") else lines[:-1]
    parsed = MarkdownIt().enable("table").disable("inline").parse("".join(whole))
    begins = [token.map[0] for token in parsed if token.level == 0 and token.map is not None]
    return "".join(whole[: begins[-1]]) if len(begins) > 1 else ""


def tail(text: str, columns: int, lines: int) -> list[str]:
    """The last rows of a text that fit on a screen, without its last line, as a terminal would wrap them."""
    from rich.cells import chop_cells

    most = max(lines - 1, 1)
    rows = [row for line in text.split("\n")[-most:] for row in (chop_cells(line, max(columns - 1, 1)) or [""])]
    return rows[-most:]


def change(before: list[str], after: list[str]) -> str:
    """What to write so that a screen shows the rows `after` instead of `before`, which the cursor is at the end of."""
    if not before:
        return "\n".join(after)
    same = 0
    while same < min(len(before), len(after)) and before[same] == after[same]:
        same += 1
    if before == after:
        return ""
    last = len(before) - 1
    if same >= last and len(after) > last and after[last].startswith(before[last]):
        return "\n".join([after[last].removeprefix(before[last]), *after[last + 1 :]])
    first = min(same, last, max(len(after) - 1, 0))
    up = f"\x1b[{last - first}A" if last > first else ""
    return f"\r{up}\x1b[J" + "\n".join(after[first:])


def formatted(text: str, columns: int) -> str:
    """A Markdown text as lines for a terminal, with its escape codes; ends with a line break.

    Long lines of code are not wrapped, so that a terminal copies them as they are.
    """
    from io import StringIO

    from rich.console import Console
    from rich.theme import Theme

    console = Console(
        file=StringIO(),
        width=columns,
        force_terminal=True,
        no_color=not has_colours(sys.stdout),
        color_system="standard",
        legacy_windows=False,
        highlight=False,
        theme=Theme(STYLES),
    )
    with console.capture() as captured:
        console.print(_markdown(text), crop=False)
    lines = [line.rstrip() for line in captured.get().split("\n")]
    seen = [at for at, line in enumerate(lines) if ESCAPE_CODE.sub("", line).strip()]
    return "".join(f"{line}\n" for line in lines[seen[0] : seen[-1] + 1]) if seen else ""


def _markdown(text: str) -> Markdown:
    from rich.console import Console, ConsoleOptions
    from rich.markdown import CodeBlock, Heading, Markdown, MarkdownElement
    from rich.syntax import Syntax
    from rich.text import Text

    class PlainHeading(Heading):
        """A heading on the left, without a frame."""

        def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
            self.text.justify = "left"
            yield self.text

    class PlainCode(CodeBlock):
        """Code without margins and background."""

        def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
            code = str(self.text).rstrip()
            highlighted = Syntax(code, self.lexer_name, theme=CODE_THEME).highlight(code)
            highlighted.rstrip()
            highlighted.no_wrap, highlighted.overflow = True, "ignore"
            yield highlighted

    class Formatted(Markdown):
        elements: ClassVar[dict[str, type[MarkdownElement]]] = {
            **Markdown.elements,
            "heading_open": PlainHeading,
            "fence": PlainCode,
            "code_block": PlainCode,
        }

    return Formatted(text, code_theme=CODE_THEME, hyperlinks=False)
