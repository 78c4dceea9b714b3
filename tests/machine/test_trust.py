"""Files that another user may have written are not used: code, packs, costs, skipped layers. One line says why."""

from __future__ import annotations

import grp
import os
import pwd
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from ondevice import files, machine
from ondevice.bundle import Bundle
from ondevice.engines.layer_path import PathMemory, SkipRecord
from ondevice.engines.simd.pack_cache import remove_unused
from ondevice.files import distrust, make_cache_directory, trusted
from ondevice.generate.costs import CostsFile, KnownCosts
from ondevice.native import library
from ondevice.native.sets import native_platform

if os.name != "posix":
    pytest.skip("owners and permissions of POSIX", allow_module_level=True)

GiveAway = Callable[[Path], None]


@pytest.fixture(autouse=True)
def nothing_was_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "_said", set())


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A directory that only this user may write to, and that is not above the home directory."""
    (tmp_path / "mine").mkdir(mode=0o755)
    return tmp_path / "mine"


@pytest.fixture
def give_away(monkeypatch: pytest.MonkeyPatch) -> GiveAway:
    """A function that makes a file or link another user's: really, if these tests run as root."""
    given: set[Path] = set()
    lstat = Path.lstat

    def changed(path: Path) -> os.stat_result | SimpleNamespace:
        found = lstat(path)
        return SimpleNamespace(st_mode=found.st_mode, st_gid=found.st_gid, st_uid=12345) if path in given else found

    def give(path: Path) -> None:
        if os.geteuid() == 0:
            os.chown(path, 12345, 12345, follow_symlinks=False)
        else:
            given.add(path)

    monkeypatch.setattr(Path, "lstat", changed)
    return give


def test_one_s_own_files_are_trusted(directory: Path) -> None:
    (directory / "file").touch(0o644)
    for path in (directory, directory / "file"):
        assert distrust(path) is None
        assert trusted(path)


def test_missing_files_have_no_reason_and_are_not_trusted(directory: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Another user might create one before it is opened."""
    for path in (directory / "missing", directory / "missing" / "below"):
        assert distrust(path) is None
        assert not trusted(path)
    assert not caplog.messages


@pytest.mark.parametrize("mode", [0o666, 0o646, 0o664])
def test_a_file_that_others_may_write_is_not(directory: Path, mode: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "_is_own_group", lambda number: False)
    file = directory / "file"
    file.touch()
    file.chmod(mode)
    assert distrust(file) == f"other users may write to {file} (chmod go-w {file})"
    assert distrust(directory) is None
    file.chmod(0o644)
    assert distrust(file) is None


def test_nothing_is_trusted_below_a_directory_that_others_may_write(directory: Path) -> None:
    below = directory / "a" / "b"
    below.mkdir(parents=True, mode=0o755)
    (below / "file").touch()
    directory.chmod(0o777)
    reason = f"other users may write to {directory} (chmod go-w {directory})"
    assert [distrust(path) for path in (directory, below, below / "file", below / "missing")] == [reason] * 4
    directory.chmod(0o1777)  # as /tmp: others can add files, and not replace these
    assert [distrust(path) for path in (directory, below, below / "file", below / "missing")] == [None] * 4


def test_another_user_s_file_or_directory_is_not_trusted(directory: Path, give_away: GiveAway) -> None:
    below = directory / "below"
    below.mkdir()
    (below / "file").touch()
    give_away(below / "file")
    assert distrust(below) is None
    assert distrust(below / "file") == f"{below / 'file'} belongs to user 12345, neither to you nor to root"
    directory.chmod(0o1777)
    give_away(below)
    for path in (below, below / "file", below / "missing"):
        assert distrust(path) == f"{below} belongs to user 12345, neither to you nor to root"


def test_links_are_followed_through_every_directory(directory: Path, give_away: GiveAway) -> None:
    """Where a link lies, who made it, and where it leads."""
    for name in ("safe", "open"):
        (directory / name).mkdir()
    (directory / "safe" / "file").touch()
    (directory / "direct").symlink_to("safe/../safe/file")
    (directory / "open" / "link").symlink_to(directory / "safe")
    (directory / "indirect").symlink_to(Path("open", "link"))
    assert distrust(directory / "direct") is None
    assert distrust(directory / "indirect" / "file") is None
    (directory / "open").chmod(0o777)
    assert distrust(directory / "direct") is None
    assert str(distrust(directory / "indirect" / "file")).startswith(f"other users may write to {directory / 'open'} ")
    give_away(directory / "direct")
    assert str(distrust(directory / "direct")).startswith(f"{directory / 'direct'} belongs to user 12345")
    (directory / "round").symlink_to("round")
    assert distrust(directory / "round") is None
    assert not (directory / "round").exists()


def test_what_is_above_the_home_directory_does_not_matter(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever can write there can replace the home directory. It does itself."""
    home = directory / "home" / "me"
    home.mkdir(parents=True)
    (directory / "home").chmod(0o777)
    assert distrust(home / "file") is not None
    monkeypatch.setattr(files, "home", lambda: home)
    assert distrust(home / "file") is None
    assert distrust(directory / "home" / "other") is None
    home.chmod(0o777)
    assert distrust(home / "file") is not None


@pytest.mark.parametrize(
    ("name", "number", "members", "own"),
    [
        ("me", 50, [], True),
        ("me", 50, ["me"], True),
        ("me", 50, ["me", "you"], False),
        ("staff", 50, [], False),
        ("me", 51, [], False),
    ],
)
def test_a_user_s_own_group_may_write(
    directory: Path, monkeypatch: pytest.MonkeyPatch, name: str, number: int, members: list[str], own: bool
) -> None:
    """With a umask of 002, as Fedora has, the files of a user are writable by the group that only this user is in."""
    monkeypatch.setattr(grp, "getgrgid", lambda gid: SimpleNamespace(gr_name=name, gr_gid=gid, gr_mem=members))
    monkeypatch.setattr(pwd, "getpwuid", lambda uid: SimpleNamespace(pw_name="me", pw_gid=50))
    assert files._is_own_group(number) is own
    monkeypatch.setattr(files, "_is_own_group", lambda gid: own)
    directory.chmod(0o775)
    assert (distrust(directory) is None) is own
    directory.chmod(0o777)
    assert distrust(directory) is not None


@pytest.mark.skipif(sys.platform != "linux", reason="reads Linux's attributes of files")
def test_an_access_list_may_let_others_write(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rights of the group are then the most that the list gives to anybody."""
    monkeypatch.setattr(files, "_is_own_group", lambda gid: True)
    directory.chmod(0o775)
    assert distrust(directory) is None
    entries = [(0x01, 7, -1), (0x02, 7, 12345), (0x04, 5, -1), (0x10, 7, -1), (0x20, 5, -1)]
    data = struct.pack("<I", 2) + b"".join(struct.pack("<HHi", *entry) for entry in entries)
    try:
        os.setxattr(directory, "system.posix_acl_access", data)
    except OSError:
        pytest.skip("this file system has no access lists")
    assert distrust(directory) == f"other users may write to {directory} (chmod go-w {directory})"
    directory.chmod(0o755)
    assert distrust(directory) is None


def test_without_a_home_directory_nothing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is a device then, below which nothing can be."""
    monkeypatch.setattr(files, "home", lambda: machine.NO_HOME)
    assert distrust(machine.NO_HOME / ".cache" / "ondevice") is None
    with pytest.raises(NotADirectoryError):
        make_cache_directory(machine.NO_HOME / ".cache" / "ondevice")


def test_an_unknown_user_or_group_has_no_own_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a container."""

    def fail(number: int) -> None:
        raise KeyError(number)

    monkeypatch.setattr(pwd, "getpwuid", fail)
    assert not files._is_own_group(os.getegid())


def test_on_windows_the_user_s_profile_is_trusted(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "win32")
    monkeypatch.setattr(files, "home", lambda: directory / "me")
    assert distrust(directory / "me" / "AppData" / "Local" / "file") is None
    for other in (directory / "you" / "file", directory / "me" / ".." / "you"):
        assert distrust(other) == f"it is outside of your profile, {directory / 'me'}"
    assert not trusted(directory / "me" / "file")
    (directory / "me").mkdir()
    (directory / "me" / "file").touch()
    assert trusted(directory / "me" / "file")


def test_one_line_says_why(directory: Path, caplog: pytest.LogCaptureFixture) -> None:
    directory.chmod(0o777)
    assert not any(trusted(directory / name) for name in ("a", "b", "a"))
    reason = f"other users may write to {directory} (chmod go-w {directory})"
    assert caplog.messages == [f"not using {directory / 'a'}: {reason}"]


def test_the_cache_directory_is_made_for_this_user_alone(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And what is in it for reading by others, so that one which was made for all users can be shared."""
    cache = directory / "above" / "cache"
    monkeypatch.setenv("ONDEVICE_CACHE", str(cache))
    before = os.umask(0)
    try:
        make_cache_directory(cache / "costs")
    finally:
        os.umask(before)
    modes = [path.stat().st_mode & 0o777 for path in (cache.parent, cache, cache / "costs")]
    assert modes == [0o700, 0o700, 0o755]
    make_cache_directory(cache / "costs")
    cache.chmod(0o777)
    with pytest.raises(PermissionError, match="other users may write to it"):
        make_cache_directory(cache / "costs")


# The readers. `open_cache` is one that others may write to, with files that were written before they could.


@pytest.fixture
def cache(directory: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ONDEVICE_CACHE", str(directory / "cache"))
    return directory / "cache"


COSTS = KnownCosts(1.0, 0.5, {1: 1.0, 2: 1.1}, {"mtp": {1: 0.1}}, {})


def test_costs_of_others_are_not_read(cache: Path) -> None:
    assert CostsFile(cache / "costs", ["key"]).write(COSTS)
    file = CostsFile(cache / "costs", ["key"])
    assert file.read() == COSTS
    cache.chmod(0o777)
    assert file.read() is None
    assert not file.write(COSTS)
    cache.chmod(0o700)
    file.path.chmod(0o666)
    assert file.read() is None
    assert CostsFile(cache / "costs", ["key"]).write(COSTS)  # it replaces the file
    assert file.read() == COSTS


def test_skipped_layers_of_others_are_not_read_and_those_in_a_bundle_are(
    cache: Path, reference_export: Path, directory: Path
) -> None:
    bundle = Bundle.open(shutil.copytree(reference_export, directory / "bundle"))
    memory = PathMemory(bundle)
    tuned, swift = memory.tuned_files[0], memory.swift_files[0]
    for path in (tuned, swift):
        assert memory.write((path,), SkipRecord()) == path
        assert PathMemory(bundle).read((path,)) is not None
    cache.chmod(0o777)
    bundle.path.chmod(0o777)
    assert PathMemory(bundle).read((swift,)) is None
    assert PathMemory(bundle).read((tuned,)) is not None
    memory.keep((swift,), SkipRecord())  # without an error


def test_machine_code_of_others_is_not_loaded(
    cache: Path, give_away: GiveAway, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(library, "choice", lambda: library.LibraryChoice("generic", None))
    part = "tokens"
    file = library.cached(part)
    assert library.obstacle() is None
    library.write(file, b"code", "generic", native_platform())
    assert library.kept(part) == file
    for path in (file, file.with_suffix(".json")):
        path.chmod(0o666)
        assert library.kept(part) is None
        assert caplog.messages.pop() == f"not using {path}: other users may write to {path} (chmod go-w {path})"
        path.chmod(0o644)
    assert library.kept(part) == file
    give_away(file.parent)
    assert library.kept(part) is None
    reason = f"{file.parent} belongs to user 12345, neither to you nor to root"
    assert library.obstacle() == reason
    assert library.when(library.obstacle()) == f"at every start, because {reason}: set ONDEVICE_CACHE"


def test_a_library_that_others_may_write_is_not_chosen(
    directory: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = directory / "made.so"
    library.write(file, b"code", library.choice().set, native_platform())
    directory.chmod(0o777)
    monkeypatch.setenv(library.CHOICE, str(file))
    assert library.choice.__wrapped__().file != file
    assert f"not using the kernels in {file}: other users may write to {directory}" in caplog.text


def test_nothing_is_removed_from_a_directory_that_others_may_write(cache: Path) -> None:
    cache.mkdir()
    pack = cache / f"{'0' * 40}.pack"
    pack.touch()
    os.utime(pack, (0, 0))
    cache.chmod(0o777)
    remove_unused()
    assert pack.exists()
    cache.chmod(0o700)
    remove_unused()
    assert not pack.exists()


@pytest.mark.slow
def test_a_bundle_runs_without_the_cache_and_says_why(reference_export: Path, cache: Path) -> None:
    """Kernels that are built are in memory only."""
    cache.mkdir(mode=0o755)
    cache.chmod(0o777)
    command = [sys.executable, "-m", "ondevice", "generate", str(reference_export), "x", "--max-new-tokens", "2"]
    environment = {**os.environ, "ONDEVICE_CACHE": str(cache), "TMPDIR": str(cache.parent)}
    ended = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    reason = f"other users may write to {cache} (chmod go-w {cache})"
    *preparing, unused = (line for line in ended.stderr.splitlines() if reason in line)
    assert unused.startswith(f"not using {cache}")
    assert unused.endswith(f": {reason}")
    built = f"preparing for this machine: compiling kernels at every start, because {reason}: set ONDEVICE_CACHE"
    assert preparing == ([built] if library.choice().file is None else [])
    assert list(cache.iterdir()) == []
    assert [path.name for path in cache.parent.iterdir()] == [cache.name]


def test_the_default_directory_is_the_home_directory_s(monkeypatch: pytest.MonkeyPatch, directory: Path) -> None:
    for name in ("ONDEVICE_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(directory))
    make_cache_directory(machine.cache_directory())
    assert (directory / ".cache").stat().st_mode & 0o777 == 0o700
    assert (directory / ".cache" / "ondevice").stat().st_mode & 0o777 == 0o700
