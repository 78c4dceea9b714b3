"""Views of a reply: text on stdout, thoughts as one line on stderr, tool calls as a line each, JSON lines."""

import json
import sys

import pytest

from ondevice.cli.reply_view import JsonLinesView, TextView, dim
from ondevice.generate.stats import Stats
from ondevice.generation import Reply, Step
from ondevice.text.messages import ToolCall

CALL = ToolCall("f", {"a": "ü"})


def step(text="", **fields):
    return Step(text, (1, 2), 0, 0, "none", 0.1, None, **fields)


def show(view, *steps):
    for each in steps:
        view.step(each)
    view.end(Reply.of(steps, Stats()))


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
    assert (dim("x", sys.stderr) != "x") == dims
    assert not dim("", sys.stderr)
