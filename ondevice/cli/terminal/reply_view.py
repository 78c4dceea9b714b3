"""A reply while it is generated, as text, with coloured drafts, as formatted Markdown or JSON lines; its summary line.

`MarkdownView` uses the package `rich`. A block of Markdown, such as a paragraph, a list or a block of code, is shown as
it was written until the next block begins; then it is printed once more, formatted, in its place. Lines above it never
change.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from itertools import groupby
from time import perf_counter
from typing import TYPE_CHECKING, Any, ClassVar, get_args

from ondevice.cli.terminal.progress import cancel_on_interrupt, prompt_bar
from ondevice.cli.terminal.style import ESCAPE_CODE, Style, has_colours, is_terminal, styled
from ondevice.generate.stats import Origin, Stats

if TYPE_CHECKING:
    from rich.markdown import Markdown

    from ondevice.generation import Reply, Step
    from ondevice.model import Model
    from ondevice.options import GenerationKeywords
    from ondevice.text.codec import Prompt
    from ondevice.text.messages import ToolCall

ORIGIN_STYLES = {"accepted": Style.ACCEPTED, "corrected": Style.CORRECTED}
"""How `--watch-drafts` shows tokens by their origin; the others are not styled."""

CODE_THEME = "ansi_dark"
"""Colours of code: the terminal's own 16, which fit its background."""

STYLES = {"markdown.code": "cyan", "markdown.h1": "bold", "markdown.h2": "bold", "markdown.h3": "bold"}
"""Rich's own have backgrounds and underlines."""

NOTICES = {"cancelled": "(stopped)", "length": "(cut at --max-new-tokens)", "context": "(the context is full)"}

UNSEEN = {code: "\N{REPLACEMENT CHARACTER}" for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}
"""Control characters, with which a reply could move the cursor or set the clipboard of a terminal."""

TAB_SIZE = 4

LATER = 16
"""A block is parsed again when a line has ended and it is longer by one part in so many: parsing a list of a thousand
items after each of them would take longer than generating it."""


def stream_reply(
    model: Model, prompt: Prompt, options: GenerationKeywords, view: TextView | JsonLinesView | None = None
) -> Reply:
    """Generate a reply, showing every step in a view, and the prefill of long prompts as a bar.

    Ctrl-C ends the reply with the finish reason `cancelled`.
    """
    from ondevice.generation import Reply

    steps: list[Step] = []

    def on_prefill(done: int, total: int) -> None:
        (bar.show_below if view and steps else bar.show)(done, total)

    with_progress: GenerationKeywords = {**options, "on_prefill": on_prefill}
    with (
        cancel_on_interrupt(model.cancel) as interrupted,
        prompt_bar() as bar,
        model.stream(prompt, **with_progress) as generation,
    ):
        if interrupted.is_set():
            generation.cancel()  # Ctrl-C came before the model had a generation to cancel
        for step in generation:
            if view:
                view.step(step)
            steps.append(step)
    reply = Reply.of(steps, generation.stats)
    if view:
        view.end()
    return reply


class TextView:
    """Prints text on stdout as it comes, tool calls as a line each; thoughts become one dim line on stderr."""

    def __init__(self, *, as_ids: bool = False) -> None:
        """`as_ids` prints token ids in the form that `--ids` reads, for a bundle without a tokenizer."""
        self._as_ids = as_ids
        self._last = ""
        """The last character on stdout."""
        self._thinking_since = 0.0
        """When the thoughts began, 0 outside of thoughts."""

    def step(self, step: Step) -> None:
        if step.reasoning and not self._thinking_since:
            self._begin_thoughts()
        self._answer(step)
        for call in step.tool_calls:
            self._call(call)

    def end(self) -> None:
        self._end_thoughts()
        if self._last != "\n":
            print(flush=True)

    def _answer(self, step: Step) -> None:
        """Print the new part of the answer."""
        if self._as_ids and step.token_ids:
            self._write(("," if self._last else "") + ",".join(map(str, step.token_ids)))
        self._write(step.text)

    def _call(self, call: ToolCall) -> None:
        line = f"{call.name}({json.dumps(call.arguments, ensure_ascii=False)})\n"
        self._write(line if self._last in ("", "\n") else f"\n{line}")

    def _write(self, text: str, style: Style | None = None) -> None:
        """Print a text of the model, without control characters at a terminal."""
        self._put(styled(text.translate(UNSEEN) if is_terminal(sys.stdout) else text, style, sys.stdout), text[-1:])

    def _put(self, text: str, last: str) -> None:
        """Print a text with the terminal's codes in it. last : its last character without them"""
        if text:
            self._end_thoughts()
            self._last = last
            sys.stdout.write(text)
            sys.stdout.flush()

    def _begin_thoughts(self) -> None:
        self._thinking_since = perf_counter()
        self._print_dim("(thinking ...", end="")

    def _end_thoughts(self) -> None:
        """Complete the line about thoughts with their duration."""
        if self._thinking_since:
            self._print_dim(f" {perf_counter() - self._thinking_since:.1f} s)", end="\n")
            self._thinking_since = 0.0

    def _print_dim(self, text: str, end: str) -> None:
        print(styled(text, Style.DIM, sys.stderr), end=end, file=sys.stderr, flush=True)


class DraftsView(TextView):
    """A `TextView` that shows on a terminal which tokens were drafted and which drafts were wrong. Without colours,
    standard output gets the same text as from a `TextView`.
    """

    def __init__(self, *, as_ids: bool = False) -> None:
        super().__init__(as_ids=as_ids)
        self._counts: Counter[Origin] = Counter()

    def _answer(self, step: Step) -> None:
        for origin, pieces in groupby(step.pieces, key=lambda piece: piece.origin):
            style, same = ORIGIN_STYLES.get(origin), list(pieces)
            ids = [str(piece.token_id) for piece in same if piece.token_id is not None]
            self._counts[origin] += len(ids)
            if self._as_ids and ids:
                self._write(("," if self._last else "") + ",".join(ids), style)
            self._write("".join(piece.text for piece in same), style)

    def legend(self, stats: Stats) -> str:
        """The line for stderr that explains the colours, with the number of tokens of each and the tokens per round."""
        counts = ", ".join(
            styled(f"{self._counts[origin]} {origin}", ORIGIN_STYLES.get(origin), sys.stderr)
            for origin in get_args(Origin)
        )
        return f"tokens: {counts}; {stats.tokens_per_round:.2f} tokens per round"


class JsonLinesView:
    """Prints one JSON object per step on stdout. The command prints the object of the whole reply."""

    def step(self, step: Step) -> None:
        fields = {"text": step.text, "reasoning": step.reasoning, "token_ids": list(step.token_ids)}
        if step.tool_calls:
            fields["tool_calls"] = [call.as_openai() for call in step.tool_calls]
        print(json.dumps(fields), flush=True)

    def end(self) -> None:
        pass


def notice(reply: Reply) -> str:
    """Why a reply did not end by itself; empty if it did."""
    return NOTICES.get(reply.finish_reason, "")


def summary(stats: Stats) -> str:
    """One line: tokens, speed, drafts, threads, time to the first token."""
    parts = [
        f"{stats.new_tokens} tokens",
        f"{stats.decode_tokens_per_s:.1f} tokens/s",
        f"{stats.tokens_per_round:.2f} tokens per round",
    ]
    if stats.drafter == "none":
        parts.append("no drafter")
    elif not stats.drafted:
        parts.append(f"nothing drafted ({stats.drafter})")
    else:
        parts.append(f"{stats.draft_acceptance_rate:.0%} of {stats.drafted} drafted tokens accepted ({stats.drafter})")
    if stats.experts_per_round:
        parts.append(f"{stats.experts_per_round:.1f} experts per layer and round")
    if stats.usual_threads < stats.threads:
        parts.append(f"on {stats.usual_threads} of {stats.threads} threads, which is faster now")
    parts.append(f"first token after {stats.prefill_s:.2f} s ({stats.prompt_tokens} prompt tokens)")
    return ", ".join(parts)


def content(reply: Reply) -> dict[str, Any]:
    """The fields of a reply that do not depend on how long it took or what was drafted."""
    fields: dict[str, Any] = {
        "text": reply.text,
        "reasoning": reply.reasoning,
        "tool_calls": [call.as_openai() for call in reply.tool_calls],
        "token_ids": list(reply.token_ids),
        "finish_reason": reply.finish_reason,
    }
    if reply.logprobs:
        fields["logprobs"] = [
            {"token_id": each.token_id, "logprob": each.logprob, "top": [list(pair) for pair in each.top]}
            for each in reply.logprobs
        ]
    return fields


def first_difference(one: Sequence[int], other: Sequence[int]) -> int:
    """The first index at which two sequences differ, or the length of the shorter one."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((index for index, (a, b) in pairs if a != b), min(len(one), len(other)))


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
        """Rows of the screen that show the end of `_block`; the cursor is after the last one."""
        self._formatted = False
        """Whether a block was printed, so that the next one needs an empty line before it."""

    def end(self) -> None:
        self._complete()
        super().end()

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
            self._put(f"\n{shown}" if self._formatted else shown, shown[-1])
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

    whole = [f"{line}\n" for line in text.split("\n")[:-1]]  # those of the parser: `splitlines` knows other ends
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
    """Characters that make a screen show `after` in place of `before`, rows; the cursor is at the end of `before`."""
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
