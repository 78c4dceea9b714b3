"""`ondevice run`: an answer, a chat, and models that are missing."""

import sys

import pytest

from ondevice.cli import run as command
from tests.cli.conftest import Terminal
from tests.fixtures.model_made import write_bundle


@pytest.fixture
def ran(monkeypatch, tmp_path):
    """The commands that were run to get a model; each makes a bundle where it would be."""
    commands = []

    def run(*words):
        commands.append(words)
        write_bundle(tmp_path / "home" / "model" if words[0] == "pull" else tmp_path / words[-1])

    monkeypatch.setattr(command, "_run", run)
    monkeypatch.setenv("ONDEVICE_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    return commands


def test_a_prompt_gets_one_answer_as_a_chat(run, bundle, prompts):
    code, out, _ = run("run", bundle, "ab", "-n", 4)
    assert code == 0
    assert out
    assert prompts == [[{"role": "user", "content": "ab"}]]


def test_piped_text_is_the_prompt(run, bundle, prompts):
    assert run("run", bundle, "-n", 4, stdin="ab\ncd\n")[0] == 0
    assert prompts == [[{"role": "user", "content": "ab\ncd\n"}]]


def test_a_terminal_gets_a_chat(run, bundle, prompts, monkeypatch):
    lines = iter(["ab", "cd"])

    def typed(prompt):
        line = next(lines, None)
        if line is None:
            raise EOFError
        return line

    monkeypatch.setattr("builtins.input", typed)
    monkeypatch.setattr(sys, "stdin", Terminal())
    monkeypatch.setattr("ondevice.cli.chat.standard_input", lambda: None)
    assert run("run", bundle, "-n", 4)[0] == 0
    assert [asked[-1]["content"] for asked in prompts] == ["ab", "cd"]


def test_a_bundle_of_the_hub_is_pulled_once(run, ran, prompts, monkeypatch):
    monkeypatch.setattr("ondevice.hub.is_published", lambda name: True)
    for _ in range(2):
        assert run("run", "owner/model", "ab", "-n", 4, "--yes")[0] == 0
    assert ran == [("pull", "owner/model")]


def test_a_checkpoint_of_the_hub_is_exported(run, ran, prompts, monkeypatch, tmp_path):
    monkeypatch.setattr("ondevice.hub.is_published", lambda name: False)
    assert run("run", "owner/model", "ab", "-n", 4, "--yes")[0] == 0
    assert ran == [("export", "owner/model", "--out", str(tmp_path / "home" / "model"))]


def test_a_gguf_file_is_exported_once(run, ran, prompts, tmp_path):
    (tmp_path / "small.gguf").write_bytes(b"GGUF")
    for _ in range(2):
        assert run("run", "small.gguf", "ab", "-n", 4, "--yes")[0] == 0
    assert ran == [("export", "small.gguf", "--out", "bundles/small")]


@pytest.mark.parametrize(("said", "code"), [("y\n", 0), ("\n", 1)])
def test_it_asks_first(run, ran, prompts, monkeypatch, said, code):
    monkeypatch.setattr("ondevice.hub.is_published", lambda name: True)
    monkeypatch.setattr(sys, "stdin", Terminal(said))
    monkeypatch.setattr(sys, "stderr", Terminal())
    assert run("run", "owner/model", "ab", "-n", 4)[0] == code
    assert len(ran) == (code == 0)


def test_without_a_terminal_it_does_not_ask(run, ran):
    code, _, err = run("run", "owner/model", "ab", stdin="")
    assert code == 2
    assert "add --yes" in err


@pytest.mark.parametrize("name", ["nowhere", "a/b/c", "/x", "directory"])
def test_what_is_no_model(run, ran, tmp_path, name):
    (tmp_path / "directory").mkdir()
    code, _, err = run("run", name, "ab")
    assert code == 2
    assert "is no bundle, no checkpoint, no .gguf file and no OWNER/NAME" in err
