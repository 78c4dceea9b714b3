"""`ondevice list` and `remove`, which see and delete only bundles of the model home."""

import json
import sys

import pytest

from ondevice.bundle import MANIFEST
from ondevice.cli.main import main
from tests.cli.conftest import Terminal
from tests.model_made import write_bundle


@pytest.fixture
def home(tmp_path, monkeypatch):
    home = tmp_path / "home"
    monkeypatch.setenv("ONDEVICE_HOME", str(home))
    for name in ("gemma", "other"):
        write_bundle(home / name)
    return home


def test_list(run, home):
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
    assert err == "third is incomplete: run the same `ondevice pull` again to resume it\n"


def test_list_as_json(run, home):
    _, out, _ = run("list", "--json")
    found = [json.loads(line) for line in out.splitlines()]
    size = sum(path.stat().st_size for path in (home / "gemma").iterdir())
    about = {"family": "toy", "quantization": "int4", "drafter": False}
    assert found[0] == {"name": "gemma", "size": size, "fault": None, **about}


def test_an_empty_list_names_the_commands_that_fill_it(run, monkeypatch, tmp_path):
    monkeypatch.setenv("ONDEVICE_HOME", str(tmp_path / "nowhere"))
    code, out, err = run("list")
    assert (code, out) == (0, "")
    assert "ondevice pull" in err


def test_remove(run, home):
    (home / ".gemma.fetching").mkdir()
    (home / ".gone.removed-12345678").mkdir()
    assert run("remove", "gemma", "--yes") == (0, "", "")
    assert sorted(path.name for path in home.iterdir()) == ["other"]


def test_nothing_is_removed_if_one_name_is_wrong(run, home):
    code, _, err = run("remove", "gemma", "gema", "--yes")
    assert (code, err.count("\n")) == (2, 1)
    assert (home / "gemma" / MANIFEST).exists()


@pytest.mark.parametrize("name", ["..", ".", "gemma/../other", "/etc", ".fetching"])
def test_only_names_are_removed(run, home, name):
    code, _, _ = run("remove", name, "--yes")
    assert code == 2
    assert (home / "other" / MANIFEST).exists()


def test_a_link_is_removed_without_its_target(run, home, tmp_path):
    write_bundle(tmp_path / "elsewhere")
    (home / "link").symlink_to(tmp_path / "elsewhere")
    assert run("remove", "link", "--yes")[0] == 0
    assert not (home / "link").is_symlink()
    assert (tmp_path / "elsewhere" / MANIFEST).exists()


def test_without_a_terminal_it_needs_yes(run, home):
    code, _, err = run("remove", "gemma", stdin="y\n")
    assert (code, (home / "gemma").exists()) == (2, True)
    assert "--yes" in err


@pytest.mark.parametrize(("answer", "code"), [("y\n", 0), ("\n", 1), ("no\n", 1), ("", 1)])
def test_at_a_terminal_it_asks(home, monkeypatch, answer, code):
    asked = Terminal()
    monkeypatch.setattr(sys, "stdin", Terminal(answer))
    monkeypatch.setattr(sys, "stderr", asked)
    assert main(["remove", "gemma"]) == code
    assert (home / "gemma").exists() == bool(code)
    assert "(0.00 GB)? [y/N] " in asked.getvalue()
