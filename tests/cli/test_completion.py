"""Words that a shell offers while a command line is typed."""

import contextlib
import functools
import io
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from ondevice.cli import completion, main
from ondevice.cli.completion import SHELLS, complete
from ondevice.cli.main import COMMANDS
from tests.fixtures.model_made import write_bundle


@pytest.fixture
def candidates(monkeypatch):
    """The candidates of the last of some words."""

    def ask(words):
        line = shlex.join(["ondevice", *words]).removesuffix("''")
        # it would take the number 9 for a stream of its own, which is pytest's here
        monkeypatch.setattr("argcomplete.CompletionFinder._init_debug_stream", lambda finder: None)
        # and it flushes the standard error of its import, which may be that of a test that has ended
        monkeypatch.setattr("argcomplete.io.debug_stream", io.StringIO())
        monkeypatch.setenv("COMP_LINE", line)
        monkeypatch.setenv("COMP_POINT", str(len(line)))
        monkeypatch.setenv("_ARGCOMPLETE", "1")
        monkeypatch.setenv("_ARGCOMPLETE_SUPPRESS_SPACE", "1")
        monkeypatch.setenv("_ARGCOMPLETE_IFS", "\n")
        written = io.StringIO()
        ended = functools.partial(complete, output_stream=written, exit_method=lambda code: None)
        monkeypatch.setattr(completion, "complete", ended)
        with contextlib.suppress(SystemExit):
            main._complete()
        return written.getvalue().split("\n") if written.getvalue() else []

    return ask


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([""], ["-h", "--help", "--version", *COMMANDS]),
        (["g"], ["generate"]),
        (["sing", ""], []),
        (["generate", "b", "--kv"], ["--kv-cache"]),
        (["generate", "b", "--kv-cache", ""], ["fp16", "int8"]),
        (["generate", "--kv-cache", "i"], ["int8"]),
        (["generate", "--kv-cache="], ["--kv-cache=fp16", "--kv-cache=int8"]),
        (["generate", "--kv-cache=f"], ["--kv-cache=fp16"]),
        (["chat", "b", "--drafter", "n"], ["ngram", "none"]),
        (["chat", "b", "--threads", ""], []),
        (["chat", "b", "--threads", "1"], []),
        (["export", "x", "--head-bits", ""], ["4", "8"]),
        (["completion", ""], list(SHELLS)),
    ],
)
def test_commands_options_and_choices(candidates, words, expected):
    assert candidates(words) == expected


def test_bundles_by_name_and_by_path(candidates, tmp_path, monkeypatch):
    monkeypatch.setenv("ONDEVICE_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    for name in ("home/gemma", "home/other", "here", "bundles/gem", "bundles/garnet"):
        write_bundle(tmp_path / name)
    (tmp_path / "bundles" / "gone").mkdir()
    assert candidates(["generate", "ge"]) == ["gemma"]
    assert candidates(["bench", ""]) == ["gemma", "here", "other"]
    assert candidates(["remove", "ge"]) == ["gemma"]
    assert candidates(["remove", "gemma", "o"]) == ["other"]
    assert candidates(["info", "bundles/g"]) == ["bundles/garnet", "bundles/gem"]
    assert candidates(["chat", "--engine", "simd", "--system", "hello", "he"]) == ["here"]
    assert candidates(["chat", "here", "--drafter", "n"]) == ["ngram", "none"]
    assert candidates(["chat", "here", "--drafter", "h"]) == ["here"]
    assert candidates(["generate", "--chat", "here", "g"]) == []  # the prompt


@pytest.mark.parametrize("words", [["completion"], ["completion", "csh"]])
def test_a_shell_must_be_named(run, words):
    code, out, err = run(*words)
    assert (code, out) == (2, "")
    assert "bash" in err


@pytest.mark.parametrize("shell", SHELLS)
def test_a_script_is_valid(run, shell):
    """Where the shell is installed: bash is on every system but Windows."""
    code, out, _ = run("completion", shell)
    assert code == 0
    assert "_ARGCOMPLETE" in out
    if shell != "powershell" and shutil.which(shell) and os.name != "nt":
        subprocess.run([shell, "-n"], input=out, text=True, check=True)


@pytest.mark.skipif(os.name == "nt", reason="needs bash")
def test_bash_completes(run, tmp_path):
    root = Path(__file__).parents[2]
    (tmp_path / "ondevice").write_text(f'#!/bin/sh\nexec "{sys.executable}" -m ondevice "$@"\n')
    (tmp_path / "ondevice").chmod(0o755)
    _, script, _ = run("completion", "bash")
    line = 'COMP_LINE="ondevice generate x --engine s"; COMP_POINT=${#COMP_LINE}'
    typed = f'{line}; _python_argcomplete ondevice; printf "%s," "${{COMPREPLY[@]}}"'
    environment = {**os.environ, "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"}
    environment["PYTHONPATH"] = os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")])
    ended = subprocess.run(
        ["bash", "-c", f"{script}\n{typed}"], env=environment, capture_output=True, text=True, check=True
    )
    assert ended.stdout == "simd ,"


def test_without_argcomplete(run, monkeypatch):
    monkeypatch.setitem(sys.modules, "argcomplete.shell_integration", None)
    code, _, err = run("completion", "bash")
    assert (code, err) == (2, "ondevice: `ondevice completion` needs argcomplete: pip install argcomplete\n")
