"""Record `ondevice generate` with and without drafts as an animated picture for the README.

    python -m benchmarks.bundles.widened DIRECTORY/e2b-shape --head-bits 4
    python -m benchmarks.publish.recording DIRECTORY/e2b-shape [--prompt FILE] [--out FILE.svg] [-- OPTIONS OF GENERATE]

Both commands run in a pseudo-terminal, one after the other, on the same prompt and seed. Their output is replayed side
by side with the times at which it came, from the first token of each; loading and prefill are left out. The picture
needs no script: every piece of text has a CSS animation that shows it at its time, and hides it if the terminal
overwrote it. Readers that asked their system for less motion see the last state.
"""

from __future__ import annotations

import argparse
import os
import pty
import re
import shlex
import shutil
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fcntl import ioctl
from html import escape
from pathlib import Path

from benchmarks.command import command_line, run_command, whole

ROOT = Path(__file__).parents[2]
PICTURE = ROOT / "docs" / "recording.svg"
PROMPT = ROOT / "models" / "demo_prompt.txt"

WITHOUT, WITH = ("--drafter=none",), ("--compare",)
"""The options of each command beyond the common ones."""

COLUMNS, ROWS = 62, 24
"""Size of a terminal, in characters."""
ADVANCE, LINE = 6.6, 15.5
"""Width of a character and height of a line, in pixels. Text is stretched to this width, whatever font a reader has."""
WIDTH, MARGIN, GAP, BAR = 880, 9, 12, 30
PANE = (WIDTH - GAP) // 2

BEGIN_S, END_S = 1.0, 6.0
"""The picture's time before the first token, and after the last output before it starts again."""

STYLES = {
    "1": "bold",
    "2": "dim",
    "31": "red",
    "32": "green",
    "33": "yellow",
    "34": "blue",
    "35": "magenta",
    "36": "cyan",
}
"""Parameters of the escape sequence for colours, and the classes of text; others are shown plain."""

CSS = """\
text { font: 11px ui-monospace, SFMono-Regular, Menlo, Consolas, "DejaVu Sans Mono", monospace }
text { fill: #1f2328; white-space: pre }
.pane { fill: #f6f8fa; stroke: #d1d9e0 } .title { font-weight: bold; font-size: 12px } .command { fill: #0969da }
.bold { font-weight: bold } .dim { fill: #59636e } .red { fill: #d1242f } .green { fill: #1a7f37 }
.yellow { fill: #9a6700 } .blue { fill: #0969da } .magenta { fill: #8250df } .cyan { fill: #1b7c83 }
@media (prefers-color-scheme: dark) {
text { fill: #e6edf3 } .pane { fill: #151b23; stroke: #3d444d } .command { fill: #4493f8 } .dim { fill: #9198a1 }
.red { fill: #f85149 } .green { fill: #3fb950 } .yellow { fill: #d29922 } .blue { fill: #4493f8 }
.magenta { fill: #ab7df8 } .cyan { fill: #39c5cf }
}"""


@dataclass(frozen=True)
class Piece:
    """Text in one line of a terminal.

    row, column : of its first character
    begin, end : seconds from which on and until which it is there; end is None if it stays
    """

    row: int
    column: int
    text: str
    style: str
    begin: float
    end: float | None


class Screen:
    """A terminal without scrolling that keeps the history of every cell.

    It understands newlines, carriage returns, backspaces, colours, and the clearing of a line; other escape sequences
    are ignored.
    """

    _ESCAPE = re.compile(r"\x1b\[([0-9;?]*)([A-Za-z])|\x1b[()=>].?|\x1b\][^\x07]*\x07")

    def __init__(self, columns: int) -> None:
        self._columns = columns
        self._row = self._column = 0
        self._style = ""
        self._cells: dict[tuple[int, int], tuple[str, str, float]] = {}
        self._gone: list[Piece] = []

    def write(self, text: str, when: float) -> None:
        """Process output that came at a time, in seconds."""
        start = 0
        while start < len(text):
            if found := self._ESCAPE.match(text, start):
                self._control(found[1] or "", found[2] or "", when)
                start = found.end()
                continue
            self._print(text[start], when)
            start += 1

    def pieces(self) -> list[Piece]:
        """All text that ever was on the screen; neighbours of the same time and style are one piece."""
        stay = [
            Piece(row, column, text, style, begin, None)
            for (row, column), (text, style, begin) in self._cells.items()
            if text != " "
        ]
        cells = sorted([*self._gone, *stay], key=lambda each: (each.begin, each.row, each.column))
        joined: list[Piece] = []
        for cell in cells:
            last = joined[-1] if joined else None
            if last and (last.row, last.style, last.begin, last.end) == (cell.row, cell.style, cell.begin, cell.end):
                space = cell.column - last.column - len(last.text)
                if space >= 0:
                    text = last.text + " " * space + cell.text
                    joined[-1] = Piece(last.row, last.column, text, last.style, last.begin, last.end)
                    continue
            joined.append(cell)
        return joined

    def _print(self, character: str, when: float) -> None:
        if character == "\n":
            self._row += 1
        elif character == "\r":
            self._column = 0
        elif character == "\b":
            self._column = max(self._column - 1, 0)
        elif character >= " ":
            if self._column == self._columns:
                self._row, self._column = self._row + 1, 0
            self._put(character, when)
            self._column += 1

    def _put(self, character: str, when: float) -> None:
        self._clear(self._row, self._column, when)
        self._cells[self._row, self._column] = (character, self._style, when)

    def _clear(self, row: int, column: int, when: float) -> None:
        text, style, begin = self._cells.pop((row, column), (" ", "", when))
        if text != " " and begin < when:
            self._gone.append(Piece(row, column, text, style, begin, when))

    def _control(self, parameters: str, command: str, when: float) -> None:
        if command == "m":
            codes = parameters.split(";") if parameters else ["0"]
            kept = [] if "0" in codes else self._style.split()
            self._style = " ".join(kept + [STYLES[code] for code in codes if code in STYLES])
        elif command == "K":
            first = self._column if parameters in ("", "0") else 0
            for row, column in [place for place in self._cells if place[0] == self._row and place[1] >= first]:
                self._clear(row, column, when)
        elif command == "A":
            self._row = max(self._row - int(parameters or 1), 0)


def record(command: Sequence[str], prompt: Path, directory: Path) -> list[Piece]:
    """Run a command in a pseudo-terminal, its input read from a file, and return its output.

    Raises:
        SystemExit: the command failed.
    """
    controller, terminal = pty.openpty()
    ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
    environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": str(COLUMNS), "LINES": str(ROWS)}
    screen = Screen(COLUMNS)
    with prompt.open("rb") as given:
        process = subprocess.Popen(
            command, stdin=given, stdout=terminal, stderr=terminal, cwd=directory, env=environment
        )
    os.close(terminal)
    while chunk := _read(controller):
        screen.write(chunk.decode("utf-8", "replace"), time.perf_counter())
    os.close(controller)
    if process.wait():
        raise SystemExit(f"{shlex.join(command)} ended with exit code {process.returncode}")
    return from_first_text(screen.pieces())


def from_first_text(pieces: Sequence[Piece]) -> list[Piece]:
    """The same pieces with times that begin at the first text that stays, without what was gone before."""
    first = min(piece.begin for piece in pieces if piece.end is None)
    return [
        Piece(
            piece.row,
            piece.column,
            piece.text,
            piece.style,
            max(piece.begin - first, 0.0),
            None if piece.end is None else piece.end - first,
        )
        for piece in pieces
        if piece.end is None or piece.end > first
    ]


def _read(controller: int) -> bytes:
    try:
        return os.read(controller, 1 << 16)
    except OSError:  # Linux's end of a pseudo-terminal
        return b""


def draw(panes: Sequence[tuple[str, Sequence[str], Sequence[Piece]]]) -> str:
    """The picture of terminals side by side.

    Args:
        panes: title, words of the command, and output of each. A command is broken between words only.
    """
    length = max(piece.begin for _, _, pieces in panes for piece in pieces) + BEGIN_S + END_S
    rows = max(piece.row for _, _, pieces in panes for piece in pieces) + 1
    commands = [_wrapped(command) for _, command, _ in panes]
    above = max(map(len, commands))
    height = round(BAR + (above + rows + 0.6) * LINE + MARGIN)
    rules = Rules(length)
    body: list[str] = []
    for number, ((title, _, pieces), command) in enumerate(zip(panes, commands, strict=True)):
        left = number * (PANE + GAP) + 0.5
        body += [f'<rect class="pane" x="{left:g}" y="0.5" width="{PANE - 1}" height="{height - 1}" rx="6"/>']
        body += [f'<text class="title" x="{left + MARGIN:g}" y="20">{escape(title)}</text>']
        body += [
            f'<text class="command" x="{left + MARGIN:g}" y="{BAR + LINE * (line + 0.8):g}">{escape(part)}</text>'
            for line, part in enumerate(command)
        ]
        top = BAR + (above + 0.4) * LINE
        body += [_text(piece, left + MARGIN, top, rules) for piece in pieces]
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}">'
    return "\n".join([head, "<style>", CSS, *rules.lines(), "</style>", *body, "</svg>\n"])


class Rules:
    """The animations of a picture: a class for each pair of times."""

    def __init__(self, length: float) -> None:
        """
        Args:
            length: of the animation, in seconds.
        """
        self._length = length
        self._names: dict[tuple[float, float | None], str] = {}

    def name(self, piece: Piece) -> str:
        return self._names.setdefault((piece.begin, piece.end), f"t{len(self._names)}")

    def lines(self) -> Iterator[str]:
        """The style sheet."""
        yield "@media (prefers-reduced-motion: no-preference) {"
        yield f".t {{ animation: {self._length:.2f}s step-end infinite }}"
        for (begin, end), name in self._names.items():
            last = "" if end is None else f" {self._share(end)} {{ opacity: 0 }}"
            yield f"@keyframes {name} {{ 0% {{ opacity: 0 }} {self._share(begin)} {{ opacity: 1 }}{last} }}"
            yield f".{name} {{ animation-name: {name} }}"
        yield "}"
        gone = [f".{name}" for (_, end), name in self._names.items() if end is not None]
        if gone:
            yield f"@media (prefers-reduced-motion: reduce) {{ {', '.join(gone)} {{ opacity: 0 }} }}"

    def _share(self, seconds: float) -> str:
        return f"{100 * (seconds + BEGIN_S) / self._length:.2f}%"


def _text(piece: Piece, left: float, top: float, rules: Rules) -> str:
    x, y = left + piece.column * ADVANCE, top + (piece.row + 0.8) * LINE
    classes = " ".join(filter(None, ["t", rules.name(piece), piece.style]))
    length = len(piece.text) * ADVANCE
    return f'<text class="{classes}" x="{x:.1f}" y="{y:.1f}" textLength="{length:.1f}">{escape(piece.text)}</text>'


def _wrapped(command: Sequence[str]) -> list[str]:
    """The lines of a command on a terminal, broken between its words."""
    lines = ["$"]
    for word in command:
        if len(lines[-1]) + 1 + len(word) > COLUMNS - 2:
            lines[-1] += " \\"
            lines.append("   ")
        lines[-1] += f" {word}"
    return lines


def main() -> None:
    arguments, options = _arguments()
    program = shutil.which("ondevice", path=str(Path(sys.executable).parent)) or "ondevice"
    bundle = arguments.bundle.absolute()
    prepared = subprocess.run([program, "prepare", str(bundle)], check=False)  # so that neither run reports on it
    if prepared.returncode:  # it has said why
        raise SystemExit(prepared.returncode)
    panes = []
    for title, added in (("without drafts", WITHOUT), ("with drafts, then compared with plain decoding", WITH)):
        extra = options if added is WITH else []
        given = ["generate", bundle.name, "-", *added, *extra, f"-n{arguments.tokens}", f"--seed={arguments.seed}"]
        pieces = record([program, *given], arguments.prompt, bundle.parent)
        command = ["ondevice", *map(shlex.quote, given), f"< {arguments.prompt.name}"]
        panes.append((title, command, pieces))
    arguments.out.write_text(draw(panes), "utf-8")
    print(arguments.out)


def _arguments() -> tuple[argparse.Namespace, list[str]]:
    """The script's own arguments, and those after `--`."""
    parser = command_line(__doc__)
    parser.add_argument("bundle", type=Path, help="a bundle's directory")
    parser.add_argument("--prompt", type=Path, default=PROMPT, metavar="FILE", help="(default: that of `make pair`)")
    parser.add_argument("--tokens", type=whole(1), default=96, metavar="N", help="of the reply (default: 96)")
    parser.add_argument("--seed", type=int, default=1, metavar="N", help="of the draws (default: 1)")
    parser.add_argument("--out", type=Path, default=PICTURE, metavar="FILE", help="(default: docs/recording.svg)")
    given = sys.argv[1:]
    own = given.index("--") if "--" in given else len(given)
    return parser.parse_args(given[:own]), given[own + 1 :]


if __name__ == "__main__":
    run_command(main)
