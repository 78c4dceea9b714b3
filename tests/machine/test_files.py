"""Files and directories appear complete or not at all, and a lock is of one process. Trust: `test_trust`."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ondevice.files import lock, rename_over, replace_json, replacing


def test_a_file_has_its_name_when_it_is_complete(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"old")
    with replacing(path) as file:
        file.write(b"new")
        assert path.read_bytes() == b"old"
    assert path.read_bytes() == b"new"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.skipif(sys.platform == "win32", reason="permissions of POSIX")
def test_it_has_the_permissions_of_the_old_file_or_of_any_new_one(tmp_path: Path) -> None:
    """Other users can read what was tuned for a bundle that they share."""
    path, usual = tmp_path / "file", tmp_path / "usual"
    usual.touch()
    replace_json(path, {})
    assert path.stat().st_mode == usual.stat().st_mode & ~0o022
    path.chmod(0o640)
    replace_json(path, {})
    assert path.stat().st_mode & 0o777 == 0o640


@pytest.mark.skipif(sys.platform == "win32", reason="permissions of POSIX")
def test_nobody_else_may_write_to_it_whatever_the_umask_is(tmp_path: Path) -> None:
    path, before = tmp_path / "file", os.umask(0)
    try:
        with replacing(path) as file:
            assert os.fstat(file.fileno()).st_mode & 0o777 == 0o644
        path.chmod(0o666)
        replace_json(path, {})
        assert path.stat().st_mode & 0o777 == 0o644
        with replacing(path, read_only=True):
            pass
        assert path.stat().st_mode & 0o777 == 0o444
    finally:
        os.umask(before)


def test_after_an_interrupt_the_old_file_is_there_and_no_other(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"old")

    def write() -> None:
        with replacing(path) as file:
            file.write(b"new")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write()
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_an_error_names_the_file_that_was_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "missing" / "file"
    with pytest.raises(FileNotFoundError) as caught, replacing(path):
        pass
    assert caught.value.filename == str(path)


def test_an_error_of_a_write_names_the_file_too(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="No space left") as caught, replacing(tmp_path / "new"):
        raise OSError(errno.ENOSPC, "No space left on device")
    assert caught.value.filename == str(tmp_path / "new")
    assert list(tmp_path.iterdir()) == []


def test_json_is_sorted(tmp_path: Path) -> None:
    path = tmp_path / "b.json"
    replace_json(path, {"b": 1, "a": None})
    assert path.read_text() == '{"a": null, "b": 1}'


def test_a_directory_takes_the_place_of_another(tmp_path: Path) -> None:
    new, path, retired = (tmp_path / name for name in ("new", "path", "retired"))
    new.mkdir()
    rename_over(new, path, retired)
    assert [each.name for each in tmp_path.iterdir()] == ["path"]
    new.mkdir()
    rename_over(new, path, retired)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["path", "retired"]


def test_a_directory_gets_its_name_back_where_the_new_one_cannot_have_it(tmp_path: Path) -> None:
    path, retired = tmp_path / "path", tmp_path / "retired"
    path.mkdir()
    with pytest.raises(FileNotFoundError):
        rename_over(tmp_path / "missing", path, retired)
    assert [each.name for each in tmp_path.iterdir()] == ["path"]


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no such locks")
def test_a_lock_ends_with_its_process(tmp_path: Path) -> None:
    path = tmp_path / "file"
    hold = (
        "import sys; from ondevice.files import lock; file = open(sys.argv[1], 'wb'); lock(file.fileno()); "
        "print('locked', flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", hold, str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "locked\n"
        with path.open("rb") as file:
            assert lock(file.fileno()) is False
        other.communicate()
    with path.open("rb") as file:
        assert lock(file.fileno()) is True
