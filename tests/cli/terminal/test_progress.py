"""Progress bars: when they appear and disappear, and lines printed above and below them."""

import io
import sys
import time

import pytest

from ondevice.cli.terminal import progress
from ondevice.cli.terminal.progress import byte_bar, prompt_bar
from tests.cli.conftest import Terminal
from tests.fixtures.model_made import load_toy


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    monkeypatch.setattr(progress, "PATIENCE_S", 0.0)


def shown_on(monkeypatch, stderr):
    """Replace stderr; called in the test, because pytest sets its own after the fixtures."""
    monkeypatch.setattr(sys, "stderr", stderr)
    return stderr


def test_a_bar_shows_the_share_and_disappears(monkeypatch):
    stderr = shown_on(monkeypatch, Terminal())
    with byte_bar("packing weights") as bar:
        bar.show(0, 4_000_000)
        assert bar._bar is not None
        bar._bar.mininterval = 0
        bar.show(1_000_000, 4_000_000)
        assert "packing weights:  25%" in stderr.getvalue()
        assert "1.00M/4.00M" in stderr.getvalue()
        bar.show(4_000_000, 4_000_000)
        assert bar._bar is None
    assert stderr.getvalue().endswith(" \r")


def test_a_bar_of_unfinished_work_disappears(monkeypatch):
    stderr = shown_on(monkeypatch, Terminal())
    with prompt_bar() as bar:
        bar.show(0, 10)
        assert not stderr.getvalue().endswith(" \r")
    assert stderr.getvalue().endswith(" \r")


def test_short_work_has_no_bar(monkeypatch):
    monkeypatch.setattr(progress, "PATIENCE_S", 3600.0)
    stderr = shown_on(monkeypatch, Terminal())
    with byte_bar("packing weights") as bar:
        for done in range(11):
            bar.show(done, 10)
    assert stderr.getvalue() == ""


def test_without_a_terminal_there_is_no_bar(monkeypatch):
    stderr = shown_on(monkeypatch, io.StringIO())
    with byte_bar("packing weights") as bar:
        bar.show(5, 10)
    assert stderr.getvalue() == ""


@pytest.mark.parametrize(
    "words", [["generate", "abc", "--max-new-tokens", "2"], ["chat"], ["bench", "--drafts", "--limit", "1"]]
)
def test_commands_show_the_progress_of_preparing(run, bundle, monkeypatch, words):
    def load(location, *, on_prepare, **options):
        on_prepare("compiling kernels", 0.2)
        time.sleep(0.6)
        on_prepare("packing weights", 0.5)
        on_prepare("packing weights", 1.0)
        return load_toy(location, **options)

    monkeypatch.setattr("ondevice.model.load", load)
    stderr = shown_on(monkeypatch, Terminal())
    run(words[0], bundle, *words[1:], stdin="")
    assert "packing weights" in stderr.getvalue()


def test_hashing_shows_its_progress(run, bundle, monkeypatch):
    stderr = shown_on(monkeypatch, Terminal())
    run("info", bundle, "--verify-hashes")
    assert "verifying" in stderr.getvalue()


@pytest.mark.parametrize("say", [lambda bar: bar.say("a note"), lambda bar: progress.LOG.warning("a note")])
def test_a_line_appears_above_a_bar_and_not_in_it(monkeypatch, say):
    stderr = shown_on(monkeypatch, Terminal())
    with byte_bar("packing weights") as bar:
        bar.show(0, 10)
        say(bar)
    text = stderr.getvalue()
    before, after = text.split("a note")
    assert before.endswith("\r")
    assert after.startswith("\n")
    assert progress.LOG.handlers == []


@pytest.mark.parametrize("stderr", [Terminal(), io.StringIO()])
def test_without_a_bar_a_line_is_just_printed(monkeypatch, stderr):
    with shown_on(monkeypatch, stderr), byte_bar("packing weights") as bar:
        bar.say("a note")
        progress.LOG.warning("another")
        assert stderr.getvalue() == "a note\nanother\n"


def test_a_bar_below_text_begins_on_a_line_of_its_own(monkeypatch):
    stderr = shown_on(monkeypatch, Terminal())
    with prompt_bar() as bar:
        bar.show_below(1, 10)
        assert stderr.getvalue().startswith("\n\r")
        bar.show_below(10, 10)
        assert bar._bar is None
    assert stderr.getvalue().count("\n") == 1


def test_short_work_does_not_break_the_line(monkeypatch):
    monkeypatch.setattr(progress, "PATIENCE_S", 60.0)
    stderr = shown_on(monkeypatch, Terminal())
    with prompt_bar() as bar:
        for done in range(1, 11):
            bar.show_below(done, 10)
    assert not stderr.getvalue()


def test_of_nested_bars_one_says_a_line(monkeypatch):
    stderr = shown_on(monkeypatch, Terminal())
    with byte_bar("outer"):
        with byte_bar("inner"):
            progress.LOG.warning("a note")
        progress.LOG.warning("another")
    assert stderr.getvalue() == "a note\nanother\n"
    assert progress.LOG.handlers == []
