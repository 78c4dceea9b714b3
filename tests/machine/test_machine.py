import ctypes
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from ondevice import machine
from ondevice.bundle import Bundle
from ondevice.errors import BundleNotFoundError, UsageError
from ondevice.machine import processor_quota


def write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, "utf-8")


def test_this_machine():
    assert machine.default_threads() >= 1
    assert machine.physical_cores() >= 1
    assert machine.processor_name()
    assert machine.os_name()
    assert machine.peak_rss_bytes() > 2**20
    assert machine.available_bytes() > 2**20
    assert len(machine.core_processors()) == (machine.physical_cores() if sys.platform == "linux" else 0)


def test_without_glibc_no_memory_is_returned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda name: object())
    machine.return_free_memory()


@pytest.mark.parametrize(
    ("allowed", "one_each"),
    [({0, 1, 2, 3}, [0, 1]), ({0, 1}, [0, 1]), ({1, 3}, [1]), ({3, 2}, [2, 3]), ({7, 8}, [7, 8]), (set(), [])],
)
def test_hyper_threads_share_a_core(tmp_path, allowed, one_each):
    for number, siblings in enumerate(["0,2", "1,3", "0,2", "1,3"]):
        write(tmp_path / f"cpu{number}/topology/core_cpus_list", siblings + "\n")
    assert machine._one_processor_per_core(tmp_path, allowed) == one_each


def test_old_kernels_use_another_name(tmp_path):
    for number in range(2):
        write(tmp_path / f"cpu{number}/topology/thread_siblings_list", "0-1\n")
    assert machine._one_processor_per_core(tmp_path, {0, 1}) == [0]


def test_slow_cores_are_left_out(tmp_path):
    for number, capacity in enumerate([530] * 4 + [1024, 1024, 960, 960]):
        write(tmp_path / f"cpu{number}/topology/core_cpus_list", str(number))
        write(tmp_path / f"cpu{number}/cpu_capacity", f"{capacity}\n")
    assert machine._one_processor_per_core(tmp_path, set(range(8))) == [4, 5, 6, 7]
    assert machine._one_processor_per_core(tmp_path, set(range(4))) == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("files", "quota"),
    [
        ({}, None),
        ({"proc/self/cgroup": "0::/app", "sys/fs/cgroup/app/cpu.max": "max 100000"}, None),
        ({"proc/self/cgroup": "0::/app", "sys/fs/cgroup/app/cpu.max": "250000 100000"}, 2.5),
        ({"proc/self/cgroup": "0::/host/path", "sys/fs/cgroup/cpu.max": "50000 100000"}, 0.5),
        (
            {
                "proc/self/cgroup": "0::/slice/app",
                "sys/fs/cgroup/slice/app/cpu.max": "max 100000",
                "sys/fs/cgroup/slice/cpu.max": "300000 100000",
            },
            3.0,
        ),
        (
            {
                "proc/self/cgroup": "5:cpu,cpuacct:/docker/abc\n3:memory:/docker/abc",
                "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "400000",
                "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000",
            },
            4.0,
        ),
        (
            {
                "proc/self/cgroup": "1:cpu:/",
                "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1",
                "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000",
            },
            None,
        ),
        ({"proc/self/cgroup": "0::/", "sys/fs/cgroup/cpu.max": "100 0"}, None),
        ({"proc/self/cgroup": "nonsense", "sys/fs/cgroup/cpu.max": "nonsense"}, None),
    ],
)
def test_quota(tmp_path, files, quota):
    for name, text in files.items():
        write(tmp_path / name, text)
    assert processor_quota(tmp_path) == quota


@pytest.mark.skipif(sys.platform != "linux", reason="quotas are read on Linux only")
@pytest.mark.parametrize(("quota", "threads"), [(None, 8), (2.5, 2), (0.1, 1), (64.0, 8)])
def test_threads_keep_within_the_quota(monkeypatch, quota, threads):
    monkeypatch.setattr(machine, "physical_cores", lambda: 8)
    monkeypatch.setattr(machine, "processor_quota", lambda: quota)
    assert machine.default_threads.__wrapped__() == threads


def test_windows_records_are_counted():
    record = struct.pack("<II", 0, 48) + bytes(40)
    assert machine.count_records(record * 6) == 6
    assert machine.count_records(b"") == 0
    assert machine.count_records(bytes(64)) == 0


def test_peak_memory_is_read_from_the_status(tmp_path):
    write(tmp_path / "status", "VmPeak:\t   99 kB\nVmHWM:\t    2048 kB\n")
    assert machine._memory_field(tmp_path / "status", "VmHWM") == 2048 * 1024
    assert machine._memory_field(tmp_path / "none", "VmHWM") == 0


@pytest.mark.skipif(sys.platform != "linux", reason="free memory is read from files on Linux only")
@pytest.mark.parametrize(
    ("files", "available"),
    [
        ({}, 8 << 30),
        ({"proc/self/cgroup": "0::/app", "sys/fs/cgroup/app/memory.max": "max"}, 8 << 30),
        (
            {
                "proc/self/cgroup": "0::/slice/app",
                "sys/fs/cgroup/slice/app/memory.max": "max\n",
                "sys/fs/cgroup/slice/app/memory.current": "100000\n",
                "sys/fs/cgroup/slice/memory.max": "500000",
                "sys/fs/cgroup/slice/memory.current": "200000",
            },
            300000,
        ),
        (
            {
                "proc/self/cgroup": "4:cpu:/docker/abc\n3:memory:/docker/abc",
                "sys/fs/cgroup/memory/memory.limit_in_bytes": "500000",
                "sys/fs/cgroup/memory/memory.usage_in_bytes": "600000",
                "sys/fs/cgroup/cpu/memory.limit_in_bytes": "1",
            },
            0,
        ),
    ],
)
def test_available_memory_is_within_the_quota(tmp_path, files, available):
    write(tmp_path / "proc/meminfo", "MemTotal: 16777216 kB\nMemAvailable:    8388608 kB\n")
    for name, text in files.items():
        write(tmp_path / name, text)
    assert machine.available_bytes(tmp_path) == available


@pytest.mark.skipif(sys.platform != "linux", reason="where memory has files")
@pytest.mark.parametrize(
    ("files", "total"),
    [
        ({}, 8 << 30),
        ({"sys/fs/cgroup/memory.max": "max\n"}, 8 << 30),
        ({"sys/fs/cgroup/memory.max": "2147483648\n", "sys/fs/cgroup/memory.current": "2000000000\n"}, 2 << 30),
        ({"sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n"}, 8 << 30),
    ],
)
def test_all_memory_is_what_a_group_may_have(tmp_path, files, total):
    write(tmp_path / "proc/meminfo", f"MemTotal: {8 << 20} kB\nMemAvailable: 1000 kB\n")
    write(tmp_path / "proc/self/cgroup", "0::/\n4:memory:/\n")
    for name, text in files.items():
        write(tmp_path / name, text)
    assert machine.total_bytes(tmp_path) == total
    assert machine.memory_warning(total, tmp_path) is None
    assert "weights have 9.0 GB and this machine has" in (machine.memory_warning(9_000_000_000, tmp_path) or "")


def test_nothing_is_said_of_a_machine_that_does_not_say(monkeypatch):
    monkeypatch.setattr(machine, "total_bytes", lambda root: 0)
    assert machine.memory_warning(1 << 50) is None


def test_the_peak_can_start_again():
    """In a process of its own: what a large one has mapped may be taken from it meanwhile."""
    program = (
        "from ondevice import machine\n"
        "large = bytearray(b'x' * 2**27)\n"
        "del large\n"
        "print(machine.peak_rss_bytes(), machine.reset_peak_rss(), machine.peak_rss_bytes())\n"
        "large = bytearray(b'x' * 2**26)\n"
        "print(machine.peak_rss_bytes())\n"
    )
    words = subprocess.run(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, check=True
    ).stdout.split()
    if words[1] == "False":
        pytest.skip("this system does not let a process reset its peak")
    first, before, after = int(words[0]), int(words[2]), int(words[3])
    assert before <= first - 2**25
    assert after >= before + 2**25


@pytest.mark.parametrize(
    ("cpuinfo", "board", "name"),
    [
        ("processor\t: 0\nmodel name\t: Fast CPU @ 3GHz\nmodel name\t: other", None, "Fast CPU @ 3GHz"),
        ("model name\t: Cloud CPU\ncpu family\t: 25\nmodel\t\t: 17", None, "Cloud CPU (family 25, model 17)"),
        ("processor\t: 0\nCPU part\t: 0xd0b", "Raspberry Pi 5 Model B\0", "Raspberry Pi 5 Model B"),
        ("CPU part\t: 0xd0b\nModel\t\t: Some board", None, "Some board"),
        (None, None, ""),
    ],
)
def test_processor_name(tmp_path, cpuinfo, board, name):
    for file, text in (("cpuinfo", cpuinfo), ("model", board)):
        if text is not None:
            write(tmp_path / file, text)
    assert machine._linux_processor_name(tmp_path / "cpuinfo", tmp_path / "model") == name


def test_a_user_without_a_home_has_no_cache(monkeypatch):
    """As in a container that runs with some number as its user id. Where all may write, none is looked for either."""

    def fail():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", fail)
    for name in ("ONDEVICE_CACHE", "XDG_CACHE_HOME", "LOCALAPPDATA", "ONDEVICE_HOME"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(OSError, match=r"(?i)not a directory|cannot find"):
        machine.cache_directory().mkdir(parents=True)
    with pytest.raises(BundleNotFoundError, match="no such name"):
        Bundle.open("nowhere")


def test_a_path_that_is_none():
    with pytest.raises(UsageError, match=r"a path is a string or a pathlib\.Path, not None"):
        machine.expanded(None)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="~nosuchuser/x: there is no home directory"):
        machine.expanded("~nosuchuser/x")
    assert machine.expanded("~") == Path.home()
