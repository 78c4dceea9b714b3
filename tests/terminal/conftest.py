import io
import sys

import pytest

from ondevice.terminal.main import main
from tests.model_made import load_toy, write_bundle


@pytest.fixture
def bundle(tmp_path):
    return write_bundle(tmp_path / "toy")


@pytest.fixture
def toy(monkeypatch):
    """Let every command load the toy engine; holds the models it loaded."""
    loaded = []

    def load(location, **options):
        loaded.append(load_toy(location, **options))
        return loaded[-1]

    monkeypatch.setattr("ondevice.loading.load", load)
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
    """The messages that the model was asked to answer, one list per reply."""
    from ondevice.model import Model

    asked = []
    real = Model.stream

    def stream(self, prompt, **options):
        asked.append(prompt)
        return real(self, prompt, **options)

    monkeypatch.setattr(Model, "stream", stream)
    return asked
