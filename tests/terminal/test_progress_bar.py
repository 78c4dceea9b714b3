import io
import sys
import time

import pytest

from ondevice.terminal import progress_bar
from ondevice.terminal.progress_bar import byte_bar, prompt_bar
from tests.model_made import load_toy


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    monkeypatch.setattr(progress_bar, "PATIENCE_S", 0.0)


def shown_on(monkeypatch, stderr):
    """Within a test only: after every fixture, pytest puts its own there."""
    monkeypatch.setattr(sys, "stderr", stderr)
    return stderr


def test_a_bar_shows_how_far_it_is_and_goes_away(monkeypatch):
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


def test_a_bar_goes_away_before_all_is_done(monkeypatch):
    stderr = shown_on(monkeypatch, Terminal())
    with prompt_bar() as bar:
        bar.show(0, 10)
        assert not stderr.getvalue().endswith(" \r")
    assert stderr.getvalue().endswith(" \r")


def test_no_bar_for_what_is_soon_done(monkeypatch):
    monkeypatch.setattr(progress_bar, "PATIENCE_S", 3600.0)
    stderr = shown_on(monkeypatch, Terminal())
    with byte_bar("packing weights") as bar:
        for done in range(11):
            bar.show(done, 10)
    assert stderr.getvalue() == ""


def test_no_bar_where_nobody_looks(monkeypatch):
    stderr = shown_on(monkeypatch, io.StringIO())
    with byte_bar("packing weights") as bar:
        bar.show(5, 10)
    assert stderr.getvalue() == ""


@pytest.mark.parametrize("words", [["generate", "abc", "--max-new-tokens", "2"], ["chat"], ["bench", "--limit", "1"]])
def test_every_command_shows_how_far_preparing_is(run, bundle, monkeypatch, words):
    def load(location, *, on_prepare, **options):
        on_prepare("compiling kernels", 0.2)
        time.sleep(0.6)
        on_prepare("packing weights", 0.5)
        on_prepare("packing weights", 1.0)
        return load_toy(location, **options)

    monkeypatch.setattr("ondevice.loading.load", load)
    stderr = shown_on(monkeypatch, Terminal())
    run(words[0], bundle, *words[1:], stdin="")
    assert "packing weights" in stderr.getvalue()


def test_hashing_shows_how_far_it_is(run, bundle, monkeypatch):
    stderr = shown_on(monkeypatch, Terminal())
    run("info", bundle, "--verify-hashes")
    assert "verifying" in stderr.getvalue()


@pytest.mark.parametrize("say", [lambda bar: bar.say("a note"), lambda bar: progress_bar.LOG.warning("a note")])
def test_a_line_appears_above_a_bar_and_not_in_it(monkeypatch, say):
    stderr = shown_on(monkeypatch, Terminal())
    with byte_bar("packing weights") as bar:
        bar.show(0, 10)
        say(bar)
    text = stderr.getvalue()
    before, after = text.split("a note")
    assert before.endswith("\r")
    assert after.startswith("\n")
    assert progress_bar.LOG.handlers == []


@pytest.mark.parametrize("stderr", [Terminal(), io.StringIO()])
def test_a_line_where_there_is_no_bar_is_a_line(monkeypatch, stderr):
    with shown_on(monkeypatch, stderr), byte_bar("packing weights") as bar:
        bar.say("a note")
        progress_bar.LOG.warning("another")
        assert stderr.getvalue() == "a note\nanother\n"


def test_a_bar_below_text_begins_on_a_line_of_its_own(monkeypatch):
    stderr = shown_on(monkeypatch, Terminal())
    with prompt_bar() as bar:
        bar.show_below(1, 10)
        assert stderr.getvalue().startswith("\n\r")
        bar.show_below(10, 10)
        assert bar._bar is None
    assert stderr.getvalue().count("\n") == 1


def test_what_is_soon_done_leaves_the_text_alone(monkeypatch):
    monkeypatch.setattr(progress_bar, "PATIENCE_S", 60.0)
    stderr = shown_on(monkeypatch, Terminal())
    with prompt_bar() as bar:
        for done in range(1, 11):
            bar.show_below(done, 10)
    assert not stderr.getvalue()
