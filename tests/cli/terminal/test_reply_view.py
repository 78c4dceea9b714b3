"""Views of a reply: text on stdout, thoughts as one line on stderr, tool calls as a line each, JSON lines."""

import json
import sys

import pytest

from ondevice.cli.terminal.reply_view import DraftsView, JsonLinesView, TextView
from ondevice.cli.terminal.style import Style, columns, styled, wrapped
from ondevice.generate.stats import Stats
from ondevice.generation import Piece, Step
from ondevice.text.messages import ToolCall

CALL = ToolCall("f", {"a": "ü"})


def step(text="", **fields):
    return Step(text, (1, 2), 0, 0, "none", 0.1, None, **fields)


def show(view, *steps):
    for each in steps:
        view.step(each)
    view.end()


@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        ([step("a"), step("b")], "ab\n"),
        ([step("a\n")], "a\n"),
        ([step()], "\n"),
        ([step(tool_calls=(CALL, CALL))], 'f({"a": "ü"})\nf({"a": "ü"})\n'),
        ([step("I look.", tool_calls=(CALL,)), step("x")], 'I look.\nf({"a": "ü"})\nx\n'),
    ],
)
def test_text_and_calls(steps, expected, capsys):
    show(TextView(), *steps)
    assert capsys.readouterr() == (expected, "")


def test_ids_without_a_tokenizer(capsys):
    show(TextView(as_ids=True), step(), step())
    assert capsys.readouterr().out == "1,2,1,2\n"


def test_thoughts_become_one_line(capsys):
    show(TextView(), step(reasoning="hm"), step(reasoning="hm", text="Yes."), step("!"))
    out, err = capsys.readouterr()
    assert out == "Yes.!\n"
    assert err.startswith("(thinking ... ")
    assert err.endswith(" s)\n")
    assert err.count("\n") == 1


def test_a_reply_that_only_thinks(capsys):
    show(TextView(), step(reasoning="hm"))
    out, err = capsys.readouterr()
    assert out == "\n"
    assert err.endswith(" s)\n")


def test_json_lines(capsys):
    show(JsonLinesView(), step("a", reasoning="b"), step(tool_calls=(CALL,)))
    first, second = map(json.loads, capsys.readouterr().out.splitlines())
    assert first == {"text": "a", "reasoning": "b", "token_ids": [1, 2]}
    assert second["tool_calls"] == [CALL.as_openai()]


@pytest.mark.parametrize(
    ("environment", "at_a_terminal", "dims"),
    [
        ({}, True, True),
        ({"NO_COLOR": ""}, True, True),  # no-color.org: when present and not an empty string
        ({"NO_COLOR": "1"}, True, False),
        ({"TERM": "dumb"}, True, False),
        ({}, False, False),
    ],
)
def test_colours(environment, at_a_terminal, dims, monkeypatch):
    for name in ("NO_COLOR", "TERM"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("WT_SESSION", "1")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: at_a_terminal, raising=False)
    assert (styled("x", Style.DIM, sys.stderr) != "x") == dims
    assert not styled("", Style.DIM, sys.stderr)


DRAFTED = [
    step("a", pieces=(Piece("a", "plain", 7),)),
    step("bcd\n", pieces=(Piece("b", "accepted", 8), Piece("c", "accepted", 9), Piece("d\n", "corrected", 10))),
    step("e", pieces=(Piece("", "accepted", 11), Piece("", "plain", 12), Piece("e", "plain", None))),
]


def use_colours(monkeypatch):
    """Let standard output and error be terminals with colours."""
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("WT_SESSION", "1")
    for stream in (sys.stdout, sys.stderr):
        monkeypatch.setattr(stream, "isatty", lambda: True, raising=False)


def test_drafts_are_coloured_by_their_origin(monkeypatch, capsys):
    use_colours(monkeypatch)
    view = DraftsView()
    show(view, *DRAFTED)
    assert capsys.readouterr().out == "a\x1b[32mbc\x1b[0m\x1b[1;35md\n\x1b[0me\n"
    legend = view.legend(Stats(new_tokens=7, target_forwards=2))
    assert legend == ("tokens: \x1b[32m3 accepted\x1b[0m, \x1b[1;35m1 corrected\x1b[0m, 2 plain; 3.00 tokens per round")


CONTROL = "a\x1b]52;c;eA==\x07\x9b2Jb\tc\n"


def test_control_characters_do_not_reach_a_terminal(monkeypatch, capsys):
    use_colours(monkeypatch)
    for view in (TextView(), DraftsView()):
        show(view, step(CONTROL, pieces=(Piece(CONTROL, "plain", 7),)))
        assert capsys.readouterr().out == "a\ufffd]52;c;eA==\ufffd\ufffd2Jb\tc\n"


def test_a_file_gets_the_text_as_it_is(capsys):
    show(TextView(), step(CONTROL))
    assert capsys.readouterr().out == CONTROL


def test_drafts_of_token_ids(monkeypatch, capsys):
    use_colours(monkeypatch)
    pieces = (Piece("", "plain", 7), Piece("", "accepted", 8), Piece("", "accepted", 9))
    show(DraftsView(as_ids=True), step(pieces=pieces[:1]), step(pieces=pieces[1:]))
    assert capsys.readouterr().out == "7\x1b[32m,8,9\x1b[0m\n"


@pytest.mark.parametrize(("name", "value"), [("NO_COLOR", "1"), ("TERM", "dumb")])
def test_drafts_without_colours_are_plain_text(capsys, monkeypatch, name, value):
    use_colours(monkeypatch)
    monkeypatch.setenv(name, value)
    view = DraftsView()
    show(view, *DRAFTED)
    assert capsys.readouterr().out == "abcd\ne\n"
    assert view.legend(Stats()) == "tokens: 3 accepted, 1 corrected, 2 plain; 0.00 tokens per round"


def test_lines_are_wrapped_between_words_and_codes_have_no_width():
    assert wrapped("\x1b[32mone two\x1b[0m, three", 8) == "\x1b[32mone two\x1b[0m,\nthree"
    assert wrapped("a longest b", 3) == "a\nlongest\nb"
    assert wrapped("", 3) == ""


def test_the_width_is_that_of_the_terminal_or_unlimited(monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    assert columns() == 40
    monkeypatch.delenv("COLUMNS")
    monkeypatch.setattr(sys, "__stdout__", None)
    assert columns() > 1000
