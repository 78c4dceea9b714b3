"""`ondevice list` and `remove`: what lies under the model home, and only that."""

import io
import json
import sys

import pytest

from ondevice.bundle import MANIFEST
from tests.model_made import write_bundle


@pytest.fixture
def home(tmp_path, monkeypatch):
    home = tmp_path / "home"
    monkeypatch.setenv("ONDEVICE_HOME", str(home))
    for name in ("gemma", "other"):
        write_bundle(home / name)
    return home


def test_a_list(run, home):
    write_bundle(home / "broken")
    (home / "broken" / "tokenizer.json").unlink()
    (home / ".third.fetching").mkdir()
    (home / "no bundle").mkdir()
    code, out, err = run("list")
    lines = out.splitlines()
    assert (code, len(lines)) == (0, 4)
    assert lines[0].split() == ["name", "size", "family", "weights", "drafter"]
    assert "tokenizer.json is missing" in lines[1]
    assert lines[2].split() == ["gemma", "0.00", "GB", "toy", "int4", "none"]
    assert err == "third is not complete: the same `ondevice pull` goes on with it\n"


def test_a_list_for_programs(run, home):
    _, out, _ = run("list", "--json")
    found = [json.loads(line) for line in out.splitlines()]
    size = sum(path.stat().st_size for path in (home / "gemma").iterdir())
    about = {"family": "toy", "quantization": "int4", "drafter": False}
    assert found[0] == {"name": "gemma", "size": size, "fault": None, **about}


def test_an_empty_list_says_what_to_do(run, monkeypatch, tmp_path):
    monkeypatch.setenv("ONDEVICE_HOME", str(tmp_path / "nowhere"))
    code, out, err = run("list")
    assert (code, out) == (0, "")
    assert "ondevice pull" in err


def test_removing(run, home):
    (home / ".gemma.fetching").mkdir()
    (home / ".gone.removed-12345678").mkdir()
    assert run("remove", "gemma", "--yes") == (0, "", "")
    assert sorted(path.name for path in home.iterdir()) == ["other"]


def test_nothing_is_removed_where_one_name_is_wrong(run, home):
    code, _, err = run("remove", "gemma", "gema", "--yes")
    assert (code, err.count("\n")) == (2, 1)
    assert (home / "gemma" / MANIFEST).exists()


@pytest.mark.parametrize("name", ["..", ".", "gemma/../other", "/etc", ".fetching"])
def test_only_names_are_removed(run, home, name):
    code, _, _ = run("remove", name, "--yes")
    assert code == 2
    assert (home / "other" / MANIFEST).exists()


def test_of_a_link_only_the_link_is_removed(run, home, tmp_path):
    write_bundle(tmp_path / "elsewhere")
    (home / "link").symlink_to(tmp_path / "elsewhere")
    assert run("remove", "link", "--yes")[0] == 0
    assert not (home / "link").is_symlink()
    assert (tmp_path / "elsewhere" / MANIFEST).exists()


def test_it_asks_nobody_where_nobody_is(run, home):
    code, _, err = run("remove", "gemma", stdin="y\n")
    assert (code, (home / "gemma").exists()) == (2, True)
    assert "--yes" in err


@pytest.mark.parametrize(("answer", "code"), [("y\n", 0), ("\n", 1), ("no\n", 1), ("", 1)])
def test_it_asks_on_a_terminal(home, monkeypatch, answer, code):
    from ondevice.terminal.main import main

    class Terminal(io.StringIO):
        def isatty(self):
            return True

    asked = Terminal()
    monkeypatch.setattr(sys, "stdin", Terminal(answer))
    monkeypatch.setattr(sys, "stderr", asked)
    assert main(["remove", "gemma"]) == code
    assert (home / "gemma").exists() == bool(code)
    assert "(0.00 GB)? [y/N] " in asked.getvalue()
