"""An export that was killed: what it leaves is in nobody's way, and goes with the next one."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from ondevice.bundle import Bundle
from ondevice_export import bundle_writer, export
from ondevice_export.bundle_writer import Workspace, clean, retired_name
from tests.conftest import REFERENCE
from tests.fixtures.tiny_models import save_target

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="there a day must pass: it has no locks on directories")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    save_target(tmp_path_factory.mktemp("made") / "target", "31b")
    return tmp_path_factory.getbasetemp() / "made0" / "target"


def leftover(out: Path, kind: str = "partial", token: str = "0123abcd") -> Path:
    path = out.with_name(f".{out.name}.{kind}-{token}")
    path.mkdir(parents=True)
    (path / "target.onnx.data").write_bytes(b"half of it")
    return path


def test_leftovers_go_with_the_next_export(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "bundles" / "out"
    for name in ("out", "another", "with spaces\n"):
        leftover(out.with_name(name))
    mine = out.parent / ".notes.partial-list"
    mine.mkdir()
    export(source, out)
    assert sorted(path.name for path in out.parent.iterdir()) == [mine.name, out.name]


def test_an_export_at_work_keeps_its_directory(source: Path, tmp_path: Path) -> None:
    other = Workspace(tmp_path / "out")
    (other.directory / "target.onnx.data").write_bytes(b"half of it")
    export(source, tmp_path / "out")
    assert (other.directory / "target.onnx.data").exists()
    other.close()
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_where_there_are_no_locks_a_day_must_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bundle_writer, "lock", lambda handle: None)
    old, new = leftover(tmp_path / "old"), leftover(tmp_path / "new")
    os.utime(old, (0, 0))
    clean(tmp_path)
    assert list(tmp_path.iterdir()) == [new]
    made = Workspace(tmp_path / "out")
    assert made.directory.is_dir()
    made.close()


def test_names_do_not_depend_on_the_process(tmp_path: Path) -> None:
    """In a container every export may have the same process id."""
    first, second = Workspace(tmp_path / "out"), Workspace(tmp_path / "out")
    assert first.directory != second.directory
    first.close()
    second.close()


@pytest.mark.parametrize("replaced", [False, True])
def test_a_bundle_whose_replacement_was_killed_gets_its_name_back(source: Path, tmp_path: Path, replaced: bool) -> None:
    """Between the renaming of the old bundle and that of the new one."""
    out = export(source, tmp_path / "out")
    new = leftover(out)
    out.rename(retired_name(new))
    if replaced:
        export(source, tmp_path / "out", quantize="int8")
    clean(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert Bundle.open(out, verify_hashes=True).manifest.quantization.weights == ("int8" if replaced else "int4")


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "thesis.txt").write_text("do not lose this")
    (tmp_path / ".out.partial-0123abcd").symlink_to(tmp_path / "precious")
    (tmp_path / ".out.old-0123abcd").symlink_to(tmp_path / "precious")
    (tmp_path / "out").mkdir()
    clean(tmp_path)
    assert (tmp_path / "precious" / "thesis.txt").exists()


@pytest.mark.usefixtures("kernels")  # the export says on stderr that it compiles some
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_signal_in_the_middle(tmp_path: Path, number: signal.Signals) -> None:
    out = tmp_path / "bundles" / "out"
    code = f"""
import signal, sys, time
for number in (signal.SIGHUP, signal.SIGTERM):  # a parent such as nohup may have them ignored
    signal.signal(number, signal.SIG_DFL)
signal.signal(signal.SIGINT, signal.default_int_handler)
from ondevice_export import exporter
from ondevice.cli.main import main
def wait(*words):
    print("writing", flush=True)
    time.sleep(600)
exporter.GraphFiles.write_drafter = wait
sys.exit(main(["export", {str(REFERENCE / "target")!r}, "--out", {str(out)!r}]))
"""
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as running:
        assert running.stdout is not None
        assert running.stdout.readline() == "writing\n"
        running.send_signal(number)
        errors = running.communicate(timeout=300)[1]
    left = list(out.parent.iterdir())
    if number == signal.SIGKILL:
        assert [path.name.rpartition("-")[0] for path in left] == [".out.partial"]
        export(REFERENCE / "target", out)
        assert list(out.parent.iterdir()) == [out]
    else:
        assert left == []
        assert running.returncode == 128 + number
        assert errors == ""


def test_cleaning_opens_nothing_but_leftovers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However full the directory is."""
    (tmp_path / "models").mkdir()
    (tmp_path / "notes.txt").touch()
    opened: list[Path] = []
    real = bundle_writer._open

    def noted(directory: Path) -> int | None:
        opened.append(directory)
        return real(directory)

    monkeypatch.setattr(bundle_writer, "_open", noted)
    left = leftover(tmp_path / "out")
    clean(tmp_path)
    assert opened == [left]
