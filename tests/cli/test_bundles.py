"""`ondevice list` and `remove`: bundles of the model home by name, and others by path."""

import json
import os
import sys

import pytest

from ondevice.bundle import MANIFEST, SKIPPED_LAYERS, Bundle
from ondevice.cli.main import main
from ondevice.cli.terminal.style import age, size
from ondevice.model import load
from ondevice.native.library import LibraryChoice
from tests.cli.conftest import Terminal
from tests.fixtures.model_made import write_bundle


@pytest.fixture
def home(tmp_path, monkeypatch):
    """A model home with two bundles, no `./bundles`, and a directory of its own for the dates of loads: other tests,
    also in other processes, load bundles of the same content.
    """
    monkeypatch.chdir(tmp_path)
    home = tmp_path / "home"
    monkeypatch.setenv("ONDEVICE_HOME", str(home))
    monkeypatch.setattr("ondevice.bundle.cache_directory", lambda: tmp_path / "dates")
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
    assert lines[0].split() == ["name", "size", "weights", "last", "use", "drafter", "family"]
    assert "tokenizer.json is missing" in lines[1]
    total = size(sum(path.stat().st_size for path in (home / "gemma").iterdir()))
    assert lines[2].split() == ["gemma", *total.split(), "int4", "never", "none", "toy"]
    assert err == "third is incomplete: run the same `ondevice pull` again to resume it\n"


def test_list_shows_the_exports_here(run, home, monkeypatch, tmp_path):
    """By the names that commands take: their paths."""
    monkeypatch.chdir(tmp_path)
    write_bundle(tmp_path / "bundles" / "exported")
    _, out, _ = run("list")
    assert [line.split()[0] for line in out.splitlines()] == ["name", "gemma", "other", "bundles/exported"]
    monkeypatch.setenv("ONDEVICE_HOME", str(tmp_path / "bundles"))
    assert [line.split()[0] for line in run("list")[1].splitlines()] == ["name", "exported"]


def test_an_empty_list_says_where_it_looked(run, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ONDEVICE_HOME", str(tmp_path / "home"))
    assert f"no bundles in {tmp_path / 'home'} and ./bundles: get one with `ondevice run`" in run("list")[2]


def test_list_as_json(run, home):
    _, out, _ = run("list", "--json")
    found = [json.loads(line) for line in out.splitlines()]
    size = sum(path.stat().st_size for path in (home / "gemma").iterdir())
    about = {"family": "toy", "quantization": "int4", "drafter": False, "used_at": None}
    assert found[0] == {"name": "gemma", "size": size, "fault": None, **about}


def test_list_says_when_a_bundle_was_last_loaded(run, home, reference_bundle, monkeypatch):
    (home / "reference").symlink_to(reference_bundle)
    bundle = Bundle.open(reference_bundle)
    assert bundle.used_at is None
    load(reference_bundle, threads=1).close()  # not the toy engine
    loaded = bundle.used_at
    assert loaded is not None
    assert json.loads(run("list", "--json")[1].splitlines()[-1])["used_at"] == loaded
    used = [line.split()[4:7] for line in run("list")[1].splitlines()[1:]]
    assert used[-1][:2] == ["just", "now"]
    monkeypatch.setattr("ondevice.cli.bundles.time", lambda: loaded + 3 * 86400)
    assert " 3 days ago " in run("list")[1].splitlines()[-1]


def test_a_load_without_a_writable_cache_is_not_noted(reference_bundle, monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setenv("ONDEVICE_CACHE", str(tmp_path / "file" / "below"))
    bundle = Bundle.open(reference_bundle)
    bundle.mark_used()
    assert bundle.used_at is None


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [
        (-5, "just now"),
        (59, "just now"),
        (60, "1 minute ago"),
        (7300, "2 hours ago"),
        (86400, "1 day ago"),
        (4e6, "46 days ago"),
    ],
)
def test_ages(seconds, shown):
    assert age(seconds) == shown


@pytest.mark.parametrize(("width", "last"), [(200, "family"), (40, "use"), (20, "size")])
def test_a_narrow_terminal_shows_fewer_columns(run, home, monkeypatch, width, last):
    monkeypatch.setenv("COLUMNS", str(width))
    lines = run("list")[1].splitlines()
    assert lines[0].split()[-1] == last
    assert max(map(len, lines)) <= width


def test_an_empty_list_names_the_commands_that_fill_it(run, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
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
def test_only_bundles_are_removed(run, home, name):
    code, _, _ = run("remove", name, "--yes")
    assert code == 2
    assert (home / "other" / MANIFEST).exists()


@pytest.mark.parametrize("name", ["bundles/small", "./bundles/small/", "{}/bundles/small"])
def test_a_path_is_removed(run, home, tmp_path, name):
    for each in ("small", "other"):
        write_bundle(tmp_path / "bundles" / each)
    assert run("remove", name.format(tmp_path), "--yes") == (0, "", "")
    assert sorted(path.name for path in (tmp_path / "bundles").iterdir()) == ["other"]


def test_a_tuned_bundle_is_removed(run, home, tmp_path):
    (write_bundle(tmp_path / "bundles" / "small") / SKIPPED_LAYERS).touch()
    assert run("remove", "bundles/small", "--yes") == (0, "", "")
    assert not (tmp_path / "bundles" / "small").exists()


@pytest.mark.parametrize("manifest", [None, "{}", "[", "[1]", '{"files": 1}', '{"files": {"unlisted": {}}}'])
def test_a_path_with_other_files_stays(run, home, tmp_path, manifest):
    """Also one with a bundle.json of another program."""
    path = write_bundle(tmp_path / "bundles" / "small")
    (path / "notes.txt").touch()
    if manifest is not None:
        (path / MANIFEST).write_text(manifest)
    code, _, err = run("remove", "bundles/small", "--yes")
    assert (code, (path / MANIFEST).exists()) == (2, True)
    assert "has files that its bundle.json does not list (" in err


def test_a_bundle_beside_is_removed_by_its_path_only(run, home, tmp_path):
    write_bundle(tmp_path / "small")
    code, _, err = run("remove", "small", "--yes")
    assert (code, (tmp_path / "small").exists()) == (2, True)
    assert "the directory here is `ondevice remove ./small`" in err
    code, _, err = run("remove", "./smal", "--yes")
    assert code == 2
    assert err.startswith("ondevice: no bundle at ./smal: no such directory")
    assert run("remove", "--yes", __file__)[2].startswith(f"ondevice: no bundle at {__file__}: it is a file")


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
    assert " kB)? [y/N] " in asked.getvalue()


@pytest.mark.skipif(os.name != "posix", reason="changes the mode of a directory")
@pytest.mark.parametrize("engine", ["auto", "ort"])
def test_prepare_says_that_nothing_was_kept(run, reference_bundle, tmp_path, monkeypatch, engine):
    """And `info` says so in place of the advice to prepare the bundle."""
    monkeypatch.setattr("ondevice.prepare", lambda bundle, **_: None)
    monkeypatch.setattr("ondevice.native.library.choice", lambda: LibraryChoice("generic", None))
    cache = tmp_path / "cache"
    cache.mkdir()
    cache.chmod(0o777)
    monkeypatch.setenv("ONDEVICE_CACHE", str(cache))
    reason = f"other users may write to {cache} (chmod go-w {cache})"
    code, _, err = run("prepare", reference_bundle, "--engine", engine)
    assert code == 1
    assert err == f"{reference_bundle}: not kept: {reason}: set ONDEVICE_CACHE to another directory\n"
    assert f"no, at every start, because {reason}: set ONDEVICE_CACHE\n" in run("info", reference_bundle)[1]


def test_prepare_says_that_a_bundle_is_ready(run, reference_bundle, monkeypatch):
    monkeypatch.setattr("ondevice.cli.info.not_kept", lambda bundle, engine: None)
    monkeypatch.setattr("ondevice.prepare", lambda bundle, **_: None)
    code, _, err = run("prepare", reference_bundle)
    assert code == 0
    assert err.startswith(f"{reference_bundle}: ready on this machine, in ")
