"""`MarkdownView`: what a terminal shows while a reply comes and at its end, and when replies are formatted at all."""

import os
import re
import sys

import pytest

from ondevice.cli.terminal import reply_view
from ondevice.cli.terminal.reply_view import MarkdownView, can_format, change, complete_blocks, formatted, tail
from ondevice.generation import Step
from ondevice.text.messages import ToolCall

REPLY = """# Title

A **bold** word and `code`, in a line that is longer than the screen is wide, with 日本語.

- one
- two

1. first

2. second

```python
def f(x):
    return x  # a comment that is longer than the screen is wide
```

> quoted

The end.
"""

SHOWN = """Title

A bold word and code, in a
line that is longer than the
screen is wide, with 日本語.

 • one
 • two

 1 first
 2 second

def f(x):
    return x  # a comment that
 is longer than the screen is
wide

▌ quoted

The end.
"""


class Screen:
    """A terminal that knows line breaks, wrapping, and the codes that move up and clear below."""

    def __init__(self, columns, lines):
        self.rows, self._columns, self._lines = [""], columns, lines
        self._row = self._column = 0

    def write(self, text):
        from rich.cells import cell_len

        for up, clear, code, character in re.findall(r"\x1b\[(\d+)A|\x1b\[(J)|\x1b\[([0-9;]*m)|(.)", text, re.DOTALL):
            if up:
                assert int(up) < min(self._lines, self._row + 1), "a line that has left the screen cannot be changed"
                self._row -= int(up)
            elif clear:
                del self.rows[self._row + 1 :]
                self.rows[self._row] = self.rows[self._row][: self._column]
            elif character == "\r":
                self._column = 0
            elif character == "\n":
                self._next_row()
            elif not code:
                assert character.isprintable()
                if cell_len(self.rows[self._row] + character) > self._columns:
                    self._next_row()
                assert self._column == len(self.rows[self._row]), "text is only ever appended"
                self.rows[self._row] += character
                self._column += 1

    def text(self):
        return "\n".join(row.rstrip() for row in self.rows)

    def _next_row(self):
        self._row, self._column = self._row + 1, 0
        if self._row == len(self.rows):
            self.rows.append("")


@pytest.fixture
def at_a_terminal(monkeypatch):
    """Show replies of pieces of text at a terminal of 30 columns; returns the screen and what was written."""
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("WT_SESSION", "1")

    def show(capsys, steps, lines=8):
        monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
        monkeypatch.setenv("COLUMNS", "30")
        monkeypatch.setenv("LINES", str(lines))
        view, written = MarkdownView(), []
        for each in steps:
            view.step(each)
            written.append(capsys.readouterr().out)
        view.end()
        written.append(capsys.readouterr().out)
        screen = Screen(30, lines)
        for each in written:
            screen.write(each)
        return screen.text(), "".join(written)

    return show


def step(text="", **fields):
    return Step(text, (1,), 0, 0, "none", 0.1, None, **fields)


def pieces(text, size):
    return [step(text[at : at + size]) for at in range(0, len(text), size)]


@pytest.mark.parametrize("lines", [3, 8, 50])
@pytest.mark.parametrize("size", [1, 3, 7, 40, 10_000])
def test_the_screen_shows_formatted_blocks_however_the_text_came(at_a_terminal, capsys, size, lines):
    text, written = at_a_terminal(capsys, pieces(REPLY, size), lines)
    assert text == SHOWN
    assert "\x1b[1mbold\x1b[0m" in written


def test_text_is_seen_before_its_block_is_complete(at_a_terminal, capsys):
    _, written = at_a_terminal(capsys, [step("A **bo")])
    assert written.startswith("A **bo")


def test_a_reply_without_text(at_a_terminal, capsys):
    assert at_a_terminal(capsys, [step()])[0] == "\n"
    assert at_a_terminal(capsys, [])[0] == "\n"


def test_calls_stand_below_the_text(at_a_terminal, capsys):
    text, _ = at_a_terminal(capsys, [step("I **look**.", tool_calls=(ToolCall("f", {"a": 1}),)), step("*So.*")])
    assert text == 'I look.\nf({"a": 1})\n\nSo.\n'


def test_thoughts_between_two_blocks(at_a_terminal, capsys):
    text, _ = at_a_terminal(capsys, [step("*a*"), step(reasoning="hm"), step("*b*")])
    assert text == "a\n\nb\n"


def test_a_reply_cannot_move_the_cursor(at_a_terminal, capsys):
    text, _ = at_a_terminal(capsys, [step("a\x1b[2Jb\r\x9bc\n\n"), step("\x07d")])
    assert text == "a�[2Jb��c\n\n�d\n"


def test_without_colours_there_is_no_colour(at_a_terminal, capsys, monkeypatch):
    monkeypatch.setenv("NO_COLOR", "1")
    text, written = at_a_terminal(capsys, pieces(REPLY, 9))
    assert text == SHOWN
    codes = {int(code) for codes in re.findall(r"\x1b\[([0-9;]*)m", written) for code in codes.split(";")}
    assert codes <= {0, 1, 2, 3, 4, 7}


def test_code_is_copied_as_it_was_written(monkeypatch):
    code = "def f():\n\n    return 1  # " + "long " * 30
    lines = re.sub(r"\x1b\[[0-9;]*m", "", formatted(f"```python\n{code}\n```\n", 30))
    assert lines == f"{code.rstrip()}\n"


@pytest.mark.parametrize(
    ("text", "complete"),
    [
        ("one", ""),
        ("one\n\n", ""),
        ("one\n\ntwo", ""),
        ("one\n\ntwo\n", "one\n\n"),
        ("- a\n\n-", ""),
        ("- a\n\n- b\n", ""),
        ("- a\n\nb\n", "- a\n\n"),
        ("```\na\n\nb\n", ""),
        ("```\na\n```\nb\n", "```\na\n```\n"),
        ("| a |\n| - |\n| 1 |\n", ""),
        ("a\n\nb\n\nc\n", "a\n\nb\n\n"),
        ("a\n\nb\u2028c\u2028d\ne\n\nf\n", "a\n\nb\u2028c\u2028d\ne\n\n"),
    ],
)
def test_blocks_are_complete_when_another_one_has_begun(text, complete):
    assert complete_blocks(text) == complete


def test_the_tail_fits_the_screen():
    assert tail("abcdef\ngh", 4, 10) == ["abc", "def", "gh"]
    assert tail("abcdef\ngh\n", 4, 3) == ["gh", ""]
    assert tail("日本語", 5, 10) == ["日本", "語"]
    assert tail("abc", 1, 1) == ["c"]


@pytest.mark.parametrize(
    ("before", "after", "written"),
    [
        ([], ["a", "b"], "a\nb"),
        (["a"], ["ab"], "b"),
        (["a"], ["ab", "c"], "b\nc"),
        (["a", "b"], ["a", "b", "", "c"], "\n\nc"),
        (["a", "b"], ["a", "b"], ""),
        (["a", "b"], [], "\r\x1b[1A\x1b[J"),
        (["a", "b"], ["b", "c"], "\r\x1b[1A\x1b[Jb\nc"),
        (["a", "b"], ["a"], "\r\x1b[1A\x1b[Ja"),
    ],
)
def test_only_rows_that_change_are_written(before, after, written):
    assert change(before, after) == written


@pytest.mark.parametrize(
    ("terminal", "term", "rich", "formats"),
    [
        (True, "xterm", True, True),
        (False, "xterm", True, False),
        (True, "dumb", True, False),
        (True, "xterm", False, False),
    ],
)
def test_only_a_terminal_gets_formatted_replies(monkeypatch, terminal, term, rich, formats):
    monkeypatch.setenv("TERM", term)
    monkeypatch.setenv("WT_SESSION", "1")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: terminal, raising=False)
    monkeypatch.setattr(reply_view, "find_spec", lambda name: os if rich else None)
    assert can_format() == formats
