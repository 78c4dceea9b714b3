"""Pack files in the cache directory: written once, found again, and checked before use."""

from __future__ import annotations

import io
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from ondevice import preparation
from ondevice.bundle_format.weight_format import INT4, INT8
from ondevice.engines.simd import pack_file, pack_layout
from ondevice.engines.simd.pack_cache import ABANDONED_S, KEPT_S, pack_sizes
from ondevice.engines.simd.pack_file import find_pack, open_pack, was_truncated
from ondevice.engines.simd.pack_layout import PAGE, PackLayout
from ondevice.engines.simd.tensor_files import Matrix, TensorFiles
from ondevice.errors import BundleCorruptError
from ondevice.preparation import CHECKING, PACKING, Preparation
from ondevice.progress import Advance

ENVIRONMENT = dict(os.environ)
"""The environment with the cache directory that has the compiled kernels."""


@pytest.fixture(autouse=True)
def cache(kernels: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    layout = layout_of()
    layout.write(np.zeros(layout.size, np.uint8), 1)  # loads the kernels, which the test's own directory does not have
    monkeypatch.setenv("ONDEVICE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(pack_file, "SMALL", 0)
    monkeypatch.setattr(pack_file, "READ", 0)
    return tmp_path / "cache"


def layout_of(seed: int = 0, rows: int = 64) -> PackLayout:
    rng = np.random.default_rng(seed)
    layout = PackLayout()
    for form in (INT4, INT8):
        codes = rng.integers(0, 256, (rows, form.bytes(64)), dtype=np.uint8)
        layout.add(Matrix(codes, rng.standard_normal((rows, 2)).astype(np.float32), form))
    return layout


class FakeFiles(TensorFiles):
    """Source files without a bundle: `SIZE` bytes that always verify."""

    SIZE = 1000

    def __init__(self, content: str = "content") -> None:
        self._content = content

    @property
    def size(self) -> int:
        return self.SIZE

    def content(self) -> str:
        return self._content

    def verify(self, advance: Advance) -> None:
        advance(self.size)


class Trusted(FakeFiles):
    def verify(self, advance: Advance) -> None:
        raise AssertionError("a pack that exists needs no verified bundle")


class Altered(FakeFiles):
    def verify(self, advance: Advance) -> None:
        raise BundleCorruptError("altered")


def opened_days_ago(path: Path, days: float) -> Path:
    path.parent.mkdir(exist_ok=True)
    path.touch()
    then = time.time() - 86400 * days
    os.utime(path, (then, then))
    return path


def replace(path: Path, content: bytes) -> None:
    path.unlink()
    path.write_bytes(content)


@pytest.fixture
def in_time() -> Iterator[None]:
    """End a test that would otherwise wait for ever."""

    def end(*_: object) -> None:
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, end)
    signal.alarm(300)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def test_a_pack_is_written_once_and_mapped_afterwards(cache: Path) -> None:
    made = open_pack(layout_of(), FakeFiles(), 2)
    (path,) = cache.iterdir()
    found = open_pack(layout_of(), Trusted(), 2)
    np.testing.assert_array_equal(made, found)
    assert isinstance(found, np.memmap)
    assert [path] == list(cache.iterdir())


@pytest.mark.skipif(sys.platform != "linux", reason="other systems map it")
def test_linux_reads_a_pack_of_medium_size(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pack_file, "READ", layout_of().size)
    made, found = open_pack(layout_of(), FakeFiles(), 1), open_pack(layout_of(), Trusted(), 1)
    (path,) = cache.iterdir()
    for pack in (made, found):
        assert not isinstance(pack, np.memmap)
        np.testing.assert_array_equal(pack, np.fromfile(path, np.uint8))
    path.chmod(0o600)
    os.truncate(path, PAGE)
    assert not was_truncated(found)


class Noted(io.BytesIO):
    """A file in memory that notes where it is written, and how much."""

    def __init__(self) -> None:
        super().__init__()
        self.writes: list[tuple[int, int]] = []

    def write(self, data: Any) -> int:
        self.writes.append((self.tell(), len(data)))
        return super().write(data)


@pytest.mark.parametrize(("system", "read", "whole"), [("linux", 0, True), ("linux", 999, False), ("darwin", 0, False)])
def test_what_linux_will_map_is_written_in_huge_pages_first(
    monkeypatch: pytest.MonkeyPatch, system: str, read: int, whole: bool
) -> None:
    """Each of them once, whatever part of it comes first, and the last one to the end of the file."""
    monkeypatch.setattr(pack_file, "sys", SimpleNamespace(platform=system))
    monkeypatch.setattr(pack_file, "READ", read)
    monkeypatch.setattr(pack_file, "HUGE_PAGE", 100)
    content = np.random.default_rng(0).integers(0, 256, 350, np.uint8)
    with Noted() as file:
        flushes = pack_file._Flushes(file, len(content))
        for start, stop in [(120, 130), (130, 290), (0, 100), (300, 350), (290, 300), (100, 120)]:
            flushes.put(start, content[start:stop])
        assert file.getvalue() == content.tobytes()
        large = [each for each in file.writes if each[0] % 100 == 0 and each[1] in (100, 50)]
        expected = [(100, 100), (200, 100), (0, 100), (0, 100), (300, 50), (300, 50)]
        assert large == (expected if whole else [(0, 100), (300, 50)])


@pytest.mark.skipif(not Path("/sys/kernel/mm/transparent_hugepage").exists(), reason="a system without huge pages")
@pytest.mark.parametrize(("memory", "asked"), [(2, True), (1.9, False)])
def test_a_pack_that_fits_twice_into_memory_is_mapped_in_huge_pages(
    cache: Path, monkeypatch: pytest.MonkeyPatch, memory: float, asked: bool
) -> None:
    layout = layout_of()
    monkeypatch.setattr(pack_file, "total_bytes", lambda root: int(memory * layout.size))
    pack = open_pack(layout, FakeFiles(), 1)
    (path,) = cache.iterdir()
    _, mapping = Path("/proc/self/smaps").read_text().split(f"{path}\n")
    assert (" hg" in next(line for line in mapping.splitlines() if line.startswith("VmFlags"))) == asked
    assert isinstance(pack, np.memmap)


@pytest.mark.parametrize("platform", ["darwin", "win32"])
def test_other_systems_map_a_pack_of_medium_size(cache: Path, monkeypatch: pytest.MonkeyPatch, platform: str) -> None:
    monkeypatch.setattr(pack_file, "READ", layout_of().size)
    open_pack(layout_of(), FakeFiles(), 1)
    monkeypatch.setattr(pack_file, "sys", SimpleNamespace(platform=platform))
    assert isinstance(open_pack(layout_of(), Trusted(), 1), np.memmap)


@pytest.mark.skipif(sys.platform != "linux", reason="other systems map it")
def test_a_pack_that_cannot_be_read_is_mapped(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    open_pack(layout_of(), FakeFiles(), 1)
    monkeypatch.setattr(pack_file, "READ", layout_of().size)
    monkeypatch.setattr(Path, "open", lambda *_, **__: (_ for _ in ()).throw(PermissionError()))
    assert isinstance(open_pack(layout_of(), Trusted(), 1), np.memmap)


@pytest.mark.skipif(sys.platform != "linux", reason="other systems map it")
def test_a_pack_without_memory_for_a_copy_is_mapped(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    open_pack(layout_of(), FakeFiles(), 1)
    monkeypatch.setattr(pack_file, "READ", layout_of().size)
    monkeypatch.setattr(pack_file, "private_memory", lambda size: (_ for _ in ()).throw(OSError("no memory")))
    assert isinstance(open_pack(layout_of(), Trusted(), 1), np.memmap)


def test_another_content_or_layout_has_another_pack(cache: Path) -> None:
    open_pack(layout_of(), FakeFiles(), 1)
    open_pack(layout_of(1), FakeFiles("other content"), 1)
    open_pack(layout_of(rows=32), FakeFiles(), 1)
    assert len(list(cache.iterdir())) == 3


@pytest.mark.skipif(os.name != "posix", reason="permissions of POSIX")
def test_a_pack_that_another_user_may_have_written_is_not_read(cache: Path) -> None:
    """The file is replaced; in a directory that others may write to, there is none."""
    open_pack(layout_of(), FakeFiles(), 1)
    (path,) = cache.iterdir()
    path.chmod(0o666)
    assert find_pack(layout_of(), "content").status == "damaged"
    open_pack(layout_of(), FakeFiles(), 1)
    assert not path.stat().st_mode & 0o222
    assert find_pack(layout_of(), "content").status == "packed"
    cache.chmod(0o777)
    state = find_pack(layout_of(), "content")
    reason = f"other users may write to {cache} (chmod go-w {cache})"
    assert (state.status, state.obstacle) == ("unwritable", reason)
    assert not isinstance(open_pack(layout_of(), Trusted(), 1), np.memmap)
    assert list(cache.iterdir()) == [path]


@pytest.mark.parametrize("damage", [b"", b"x" * 100])
def test_a_damaged_pack_is_made_anew(cache: Path, damage: bytes) -> None:
    made = np.array(open_pack(layout_of(), FakeFiles(), 1))
    (path,) = cache.iterdir()
    replace(path, damage)
    assert find_pack(layout_of(), "content").status == "damaged"
    np.testing.assert_array_equal(open_pack(layout_of(), FakeFiles(), 1), made)
    assert find_pack(layout_of(), "content").status == "packed"


def with_zeros(pack: bytes) -> bytes:
    """The pack with zeros in place of a page that was never written to disk."""
    return pack[: 2 * PAGE] + bytes(PAGE) + pack[3 * PAGE :]


def with_a_flipped_bit(pack: bytes) -> bytes:
    return pack[:-PAGE] + bytes([pack[-PAGE] ^ 64]) + pack[1 - PAGE :]


def without_weights(pack: bytes) -> bytes:
    return pack[:PAGE] + bytes(len(pack) - PAGE)


def without_a_header(pack: bytes) -> bytes:
    return bytes(PAGE) + pack[PAGE:]


@pytest.mark.parametrize("damage", [with_zeros, with_a_flipped_bit, without_weights, without_a_header])
def test_a_pack_with_other_content_is_made_anew(cache: Path, damage: Callable[[bytes], bytes]) -> None:
    made = np.array(open_pack(layout_of(), FakeFiles(), 1))
    (path,) = cache.iterdir()
    replace(path, damage(path.read_bytes()))
    np.testing.assert_array_equal(open_pack(layout_of(), FakeFiles(), 2), made)
    np.testing.assert_array_equal(open_pack(layout_of(), Trusted(), 2), made)


def test_of_a_large_pack_only_a_part_is_compared(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    layout = layout_of(rows=512)
    monkeypatch.setattr(pack_layout, "PIECES", 7)
    monkeypatch.setattr(pack_layout, "MAX_CHECKED", layout.size // 3)
    open_pack(layout, FakeFiles(), 1)
    found = np.array(open_pack(layout, Trusted(), 1))
    found[PAGE] ^= 1
    assert not layout.intact(found, 1)
    found[PAGE] ^= 1
    found[PAGE + (layout.size - PAGE) // 6] ^= 1  # in the second piece of seven
    assert layout.intact(found, 1)


def test_a_header_is_written_when_all_else_is_on_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """If the computer loses power while a pack is written, the file must not look complete."""
    seen: list[tuple[bool, bool]] = []

    def fsync(handle: int) -> None:
        pack = os.pread(handle, layout.size, 0)
        seen.append((any(pack[:PAGE]), any(pack[PAGE:])))

    monkeypatch.setattr(os, "fsync", fsync)
    layout = layout_of()
    assert layout.fits(open_pack(layout, FakeFiles(), 1))
    assert seen == [(False, True), (True, True)]


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no named pipes here")
@pytest.mark.usefixtures("in_time")
def test_a_named_pipe_in_a_pack_s_place(cache: Path) -> None:
    cache.mkdir()
    path = find_pack(layout_of(), "content").path
    assert path is not None
    os.mkfifo(path)
    open_pack(layout_of(), FakeFiles(), 1)
    assert path.is_file()
    assert find_pack(layout_of(), "content").status == "packed"


def test_a_directory_in_a_pack_s_place(cache: Path) -> None:
    path = find_pack(layout_of(), "content").path
    assert path is not None
    path.mkdir(parents=True)
    state = find_pack(layout_of(), "content")
    assert (state.status, state.obstacle) == ("unwritable", f"{path} is a directory")
    assert layout_of().fits(open_pack(layout_of(), Trusted(), 1))


@pytest.mark.skipif(os.name != "posix", reason="Windows does not cut what is mapped")
def test_a_pack_cannot_be_cut_by_mistake_and_it_is_seen(cache: Path) -> None:
    open_pack(layout_of(), FakeFiles(), 1)
    pack = open_pack(layout_of(), Trusted(), 1)
    (path,) = cache.iterdir()
    assert not path.stat().st_mode & 0o222
    assert not was_truncated(pack)
    path.chmod(0o600)
    os.truncate(path, PAGE)
    assert was_truncated(pack)
    assert not was_truncated(np.zeros(5, np.uint8))


@pytest.mark.skipif(os.name != "posix", reason="Windows does not cut what is mapped")
@pytest.mark.parametrize("cut", ["*.pack", "target.onnx.data", "drafter.onnx.data"])
def test_computing_over_a_file_that_was_cut_is_an_error(reference_bundle: Path, tmp_path: Path, cut: str) -> None:
    """The test runs in a separate process, because reading a missing page could end the process."""
    code = """
import os, sys
from pathlib import Path
import numpy as np
from ondevice.bundle import Bundle
from ondevice.engines.protocol import Rows, TokenTree
from ondevice.engines.simd.engine import SimdEngine
from ondevice.engines.simd import pack_cache, pack_file
from ondevice.errors import BundleCorruptError

pack_file.SMALL = pack_file.READ = 0
pack_file.cache_directory = pack_cache.cache_directory = lambda: Path(sys.argv[2])
for _ in range(2):
    engine = SimdEngine(Bundle.open(sys.argv[1]), threads=1)
session = engine.open_session()
engine.forward([Rows(session, TokenTree.chain([1, 2, 3]), [2])])
session.commit(range(3))
(path,) = Path(sys.argv[2]).rglob(sys.argv[3])
path.chmod(0o600)
os.truncate(path, 4096)
for compute in (
    lambda: engine.forward([Rows(session, TokenTree.chain([4]), [0])]),
    lambda: session.draft_step(4, np.zeros(engine.target.hidden_size, np.float32)),
):
    try:
        compute()
    except BundleCorruptError as error:
        print(error)
"""
    bundle = shutil.copytree(reference_bundle, tmp_path / "bundle")
    command = [sys.executable, "-c", code, str(bundle), str(tmp_path), cut]
    ended = subprocess.run(command, capture_output=True, text=True, check=True, env=ENVIRONMENT)
    was_cut = "the packed weights were" if cut == "*.pack" else f"{cut} was"
    assert [line.startswith(f"{was_cut} cut short while ") for line in ended.stdout.splitlines()] == [True, True]


def test_a_bundle_that_is_not_what_it_says_leaves_no_pack(cache: Path) -> None:
    with pytest.raises(BundleCorruptError):
        open_pack(layout_of(), Altered(), 1)
    assert list(cache.iterdir()) == []


def test_a_cache_that_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("", "utf-8")
    monkeypatch.setenv("ONDEVICE_CACHE", str(tmp_path / "file" / "below"))
    layout = layout_of()
    state = find_pack(layout, "content")
    assert (state.status, state.obstacle) == ("unwritable", f"{tmp_path / 'file' / 'below'} cannot be written to")
    assert layout.fits(open_pack(layout, Trusted(), 1))
    (line,) = caplog.messages
    assert line.endswith(f"packing 0.0 GB of weights at every start, because {state.obstacle}")


def test_a_directory_that_denies_everything(
    cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Access is denied by a patch, as for another user's directory: tests may run as root, which can write anywhere."""
    cache.mkdir()
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    layout = layout_of()
    assert layout.fits(open_pack(layout, Trusted(), 1))
    assert f"{cache} cannot be written to" in caplog.text
    assert list(cache.iterdir()) == []


def test_a_full_disk(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=500))
    layout = layout_of()
    assert find_pack(layout, "content").obstacle == f"{cache} has room for 0.0 GB only"
    assert layout.fits(open_pack(layout, Trusted(), 1))
    assert not cache.exists()


def test_a_disk_full_of_packs_that_nobody_opens(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    unused = opened_days_ago(cache / f"{'a' * 40}.pack", 1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=0 if unused.exists() else 1 << 40))
    made = open_pack(layout_of(), FakeFiles(), 1)
    np.testing.assert_array_equal(open_pack(layout_of(), Trusted(), 1), made)
    assert find_pack(layout_of(), "content").status == "packed"


def test_a_disk_that_fills_up_meanwhile(
    cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*words: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "truncate", fail)
    layout = layout_of()
    assert layout.fits(open_pack(layout, FakeFiles(), 1))
    assert list(cache.iterdir()) == []
    assert "could not be written (No space left on device): the weights stay in memory" in caplog.text


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="no list of descriptors here")
@pytest.mark.parametrize("call", ["truncate", "fsync"])
def test_a_failed_write_leaves_no_descriptor_open(cache: Path, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    def fail(*words: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, call, fail)
    before = sorted(Path("/proc/self/fd").iterdir())
    for _ in range(3):
        open_pack(layout_of(), FakeFiles(), 1)
    assert sorted(Path("/proc/self/fd").iterdir()) == before
    assert list(cache.iterdir()) == []


def test_two_processes_at_once(cache: Path) -> None:
    with ThreadPoolExecutor(4) as pool:
        packs = list(pool.map(lambda _: open_pack(layout_of(), FakeFiles(), 1), range(8)))
    for each in packs[1:]:
        np.testing.assert_array_equal(each, packs[0])
    assert len(list(cache.iterdir())) == 1


def test_a_state_tells_where_a_pack_will_be_and_makes_nothing(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    layout = layout_of()
    before = find_pack(layout, "content")
    assert (before.status, before.size, before.obstacle) == ("missing", layout.size, None)
    assert not cache.exists()
    open_pack(layout, FakeFiles(), 1)
    after = find_pack(layout, "content")
    assert (after.status, after.path) == ("packed", before.path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=0))
    assert after.obstacle is None
    assert pack_sizes() == [layout.size]
    monkeypatch.setattr(pack_file, "SMALL", layout.size)
    assert (find_pack(layout, "content").status, find_pack(layout, "content").path) == ("small", None)


@pytest.mark.parametrize("writable", [True, False])
def test_progress_goes_from_nothing_to_all(cache: Path, monkeypatch: pytest.MonkeyPatch, writable: bool) -> None:
    if not writable:
        monkeypatch.setenv("ONDEVICE_CACHE", str(Path(__file__) / "below"))
    heard: list[tuple[str, float]] = []

    def hear(stage: str, share: float) -> None:
        heard.append((stage, share))

    layout = layout_of()
    open_pack(layout, FakeFiles(), 2, Preparation(hear))
    stages, shares = zip(*heard, strict=True)
    assert set(stages) == {PACKING}
    assert shares[0] == 0
    assert list(shares) == sorted(shares)
    assert shares[-1] == 1
    heard.clear()
    monkeypatch.setattr(preparation, "UNREPORTED_S", -1.0)
    if writable:
        open_pack(layout, Trusted(), 2, Preparation(hear))
        assert {stage for stage, _ in heard} == {CHECKING}
        assert 0 < heard[-1][1] <= 1


@pytest.mark.parametrize("when", [0.0, 0.3, 1.0])
def test_an_interrupt_leaves_no_half_written_pack(cache: Path, when: float) -> None:
    """Also while the sources are verified, which never ends in this test."""

    class Endless(FakeFiles):
        def verify(self, advance: Advance) -> None:
            while True:
                advance(0)
                time.sleep(0.01)

    def interrupt(stage: str, share: float) -> None:
        if share >= when or share > 0.5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        open_pack(layout_of(), Endless(), 2, Preparation(interrupt))
    assert list(cache.glob("*")) == []


@pytest.mark.skipif(os.name != "posix", reason="Windows keeps what is open")
def test_what_a_killed_writer_left_is_removed_and_what_is_being_written_is_not(cache: Path) -> None:
    """The writer is killed while it writes, so it cannot clean up by itself."""
    write = (
        "import os, sys, tempfile; from ondevice.files import lock; "
        f"handle, name = tempfile.mkstemp(prefix='{'e' * 40}', suffix='.part', dir=sys.argv[1]); lock(handle); "
        "print(name, flush=True); sys.stdin.read()"
    )
    cache.mkdir()
    command = [sys.executable, "-c", write, str(cache)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as writer:
        assert writer.stdout is not None
        part = Path(writer.stdout.readline().strip())
        opened_days_ago(part, 0.5)
        open_pack(layout_of(), FakeFiles(), 1)
        assert part.exists()
        writer.kill()
    open_pack(layout_of(rows=32), FakeFiles(), 1)
    assert not part.exists()


def test_what_a_killed_writer_left_is_removed_later_by_a_start_that_packs_nothing(cache: Path) -> None:
    """The start after the kill writes the pack, and finds the remains too young."""
    young = opened_days_ago(cache / f"{'e' * 40}ab_12xyz.part", 0.5 * ABANDONED_S / 86400)
    remains = opened_days_ago(cache / f"{'d' * 40}ab_12xyz.part", 0)
    made = open_pack(layout_of(), FakeFiles(), 1)
    opened_days_ago(remains, 2 * ABANDONED_S / 86400)
    unused = opened_days_ago(cache / f"{'f' * 40}.pack", 1000)
    np.testing.assert_array_equal(open_pack(layout_of(), Trusted(), 1), made)
    assert not remains.exists()
    assert young.exists()
    assert unused.exists(), "room is made for a new pack only"


def test_writing_a_pack_removes_those_that_nobody_opens(cache: Path) -> None:
    kept_days, abandoned_days = KEPT_S / 86400, ABANDONED_S / 86400
    unused = opened_days_ago(cache / f"{'a' * 40}.pack", kept_days + 0.1)
    code = cache / f"kernels-{'0' * 16}"
    code.mkdir()
    os.utime(code, (0, 0))
    killed = opened_days_ago(cache / f"{'b' * 40}ab_12xyz.part", 2 * abandoned_days)
    kept = {
        opened_days_ago(cache / f"{'c' * 40}.pack", kept_days - 0.1),
        opened_days_ago(cache / f"{'d' * 40}ab_12xyz.part", 0.5 * abandoned_days),
        opened_days_ago(cache / "holiday.pack", 1000),
        opened_days_ago(cache / "download.part", 1000),
        opened_days_ago(cache / "compiled-0123456789abcdef", 1000),
    }
    open_pack(layout_of(), FakeFiles(), 1)
    assert not any(path.exists() for path in (unused, killed, code))
    assert kept <= set(cache.iterdir())
    assert len(list(cache.iterdir())) == len(kept) + 1


def test_a_pack_in_daily_use_stays(cache: Path) -> None:
    open_pack(layout_of(), FakeFiles(), 1)
    (path,) = cache.iterdir()
    opened_days_ago(path, 1000)
    open_pack(layout_of(), Trusted(), 1)
    open_pack(layout_of(rows=32), FakeFiles(), 1)
    assert path.exists()


def test_a_pack_that_cannot_be_dated_or_removed_is_no_obstacle(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def deny(*words: object) -> None:
        raise PermissionError(13, "Permission denied")

    unused = opened_days_ago(cache / f"{'a' * 40}.pack", 1000)
    monkeypatch.setattr(Path, "unlink", deny)
    monkeypatch.setattr(os, "utime", deny)
    made = open_pack(layout_of(), FakeFiles(), 1)
    np.testing.assert_array_equal(open_pack(layout_of(), Trusted(), 1), made)
    assert unused.exists()


@pytest.mark.skipif(os.name == "nt", reason="Windows keeps a file that is mapped")
def test_a_mapped_pack_outlives_its_file(cache: Path) -> None:
    open_pack(layout_of(), FakeFiles(), 1)
    mapped = open_pack(layout_of(), Trusted(), 1)
    content = np.array(mapped)
    (path,) = cache.iterdir()
    opened_days_ago(path, 1000)
    open_pack(layout_of(rows=32), FakeFiles(), 1)
    assert not path.exists()
    np.testing.assert_array_equal(mapped, content)
