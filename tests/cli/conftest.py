"""The toy bundle and engine for every command, and a command line run in this process."""

import io
import sys

import pytest

from ondevice.cli.main import main
from tests.fixtures.model_made import load_toy, write_bundle


class Terminal(io.StringIO):
    """Text in memory in place of a stream that is a terminal."""

    def isatty(self):
        return True


@pytest.fixture(autouse=True)
def no_columns(monkeypatch):
    """Leave lines as long as they are: pytest's workers say that they have 80 columns."""
    monkeypatch.delenv("COLUMNS", raising=False)


@pytest.fixture
def bundle(tmp_path):
    return write_bundle(tmp_path / "toy")


@pytest.fixture
def toy(monkeypatch, kernels):
    """Let every command load the toy engine; a list of the models that were loaded.

    The kernels exist before: a command that compiles them says so on the standard error that the tests compare.
    """
    loaded = []

    def load(location, **options):
        loaded.append(load_toy(location, **options))
        return loaded[-1]

    monkeypatch.setattr("ondevice.model.load", load)
    return loaded


@pytest.fixture
def run(capsys, monkeypatch, toy):
    """Run a command line in this process: exit code, standard output, standard error."""

    def call(*words, stdin=None):
        if stdin is not None:
            content = stdin if isinstance(stdin, bytes) else stdin.encode()
            monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content), "utf-8"))
        code = main([str(word) for word in words])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call


@pytest.fixture
def prompts(toy, monkeypatch):
    """The prompts that `Model.stream` was called with, one per reply."""
    from ondevice.model import Model

    asked = []
    real = Model.stream

    def stream(self, prompt, **options):
        asked.append(prompt)
        return real(self, prompt, **options)

    monkeypatch.setattr(Model, "stream", stream)
    return asked
