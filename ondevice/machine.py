"""Properties of this computer: home and cache directories, processor, usable cores, memory, and container limits.

Uses the standard library only and is cheap to import. Public functions come first, by topic; the helpers that read
Linux files, control groups, macOS and Windows follow. Functions with a `root` argument read `proc` and `sys` below
that directory, for tests.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import platform
import struct
import sys
from collections.abc import Iterator
from functools import lru_cache
from os import PathLike
from pathlib import Path
from typing import Literal

from ondevice.errors import UsageError

NO_HOME = Path(os.devnull)
"""Home directory of a user without one. No directory can be created below it. A directory that other users can write
to, such as /tmp, would be unsafe: compiled code in the cache is executed.
"""

STATUS = Path("/proc/self/status")
CLEAR = Path("/proc/self/clear_refs")
CPUINFO = Path("/proc/cpuinfo")
DEVICE_TREE = Path("/proc/device-tree/model")

MIN_CAPACITY_SHARE = 0.6
"""Cores with less than this share of the fastest core's capacity are not used: a Cortex-A55 has 0.5 of the Cortex-A76
on the same chip.
"""


# Directories.


def home() -> Path:
    """The user's home directory; `NO_HOME` if the system knows none, as for an unknown user id in a container."""
    try:
        return Path.home()
    except RuntimeError:
        return NO_HOME


def expanded(path: str | PathLike[str]) -> Path:
    """Replace `~` or `~user` at the beginning of a path.

    Raises:
        UsageError: not a path, or no such user.
    """
    try:
        return Path(path).expanduser()
    except TypeError as error:
        raise UsageError(f"a path is a string or a pathlib.Path, not {path!r:.99}") from error
    except RuntimeError as error:
        raise UsageError(f"{path}: there is no home directory of this name: write the path out") from error


def cache_directory() -> Path:
    """Directory of everything that can be made again: compiled kernels, packed weights, measured costs.

    It is `$ONDEVICE_CACHE`, or else the platform's cache directory. It may not exist, and may not be writable.

    Raises:
        UsageError: `$ONDEVICE_CACHE` names a user that does not exist.
    """
    if chosen := os.environ.get("ONDEVICE_CACHE"):
        try:
            return expanded(chosen)
        except UsageError as error:
            raise UsageError(f"ONDEVICE_CACHE is {error}") from error
    if os.name == "nt":
        return Path(os.environ.get("LOCALAPPDATA") or home() / "AppData/Local") / "ondevice" / "cache"
    return Path(os.environ.get("XDG_CACHE_HOME") or home() / ".cache") / "ondevice"


# Processor and operating system.


def processor_name() -> str:
    """Model name of the CPU, such as `AMD Ryzen 7 7840U`, or of a small board, such as `Raspberry Pi 5 Model B`."""
    name = ""
    if sys.platform == "linux":
        name = _linux_processor_name(CPUINFO, DEVICE_TREE)
    elif sys.platform == "darwin":
        name = _mac_processor_name()
    elif sys.platform == "win32":
        name = _windows_processor_name()
    return " ".join(name.split()) or platform.processor() or platform.machine()


def os_name() -> str:
    """Name, release and architecture of the operating system, such as `Linux 6.8.0 x86_64`."""
    return f"{platform.system()} {platform.release()} {platform.machine()}"


# Cores and threads.
#
# One thread per physical core: the kernels saturate a core's arithmetic units and the memory bus, so a second thread
# per core only adds overhead. Efficiency cores of small boards and phones are left out, because every thread gets an
# equal share of the work and all wait for the slowest. In a container with a processor quota fewer threads run,
# because the system stops all threads together when the quota is used up.


@lru_cache
def default_threads() -> int:
    """Number of compute threads: physical cores within this process's affinity and container quota; at least 1."""
    cores = physical_cores()
    quota = processor_quota() if sys.platform == "linux" else None
    return cores if quota is None else max(1, min(cores, int(quota)))


def physical_cores() -> int:
    """Physical cores that this process may use, without slow ones; logical cores if the system does not say more."""
    if sys.platform == "linux":
        return len(core_processors()) or 1
    count = _mac_cores() if sys.platform == "darwin" else _windows_cores() if sys.platform == "win32" else None
    return count or os.cpu_count() or 1


def processors() -> int:
    """Logical processors that this process may use, hyper-threads included; at least 1."""
    if sys.platform == "linux":
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def core_processors() -> list[int]:
    """Numbers of the logical processors to pin threads to, one per physical core; empty where threads are not pinned
    (anything but Linux).
    """
    if sys.platform != "linux":
        return []
    return _one_processor_per_core(Path("/sys/devices/system/cpu"), os.sched_getaffinity(0))


# Memory, in bytes.


def peak_rss_bytes() -> int:
    """Peak resident set size since the process began, or since `reset_peak_rss`; 0 if the system does not say."""
    if sys.platform == "linux":
        # getrusage is wrong here: its value survives exec, so a small program shows the size of its parent.
        return _memory_field(STATUS, "VmHWM")
    if sys.platform == "win32":
        return _windows_peak_memory()
    import resource

    return int(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)  # bytes on macOS


def reset_peak_rss() -> bool:
    """Lower the peak to the current resident set size. Only Linux can.

    Returns:
        Whether it worked.
    """
    if sys.platform != "linux":
        return False
    try:
        CLEAR.write_text("5", "ascii")
    except OSError:
        return False
    return True


def available_bytes(root: Path = Path("/")) -> int:
    """Memory that can be allocated without swapping; all memory on macOS, which does not say; 0 if unknown."""
    if sys.platform == "linux":
        free, quota = _memory_field(root / "proc/meminfo", "MemAvailable"), memory_quota(root)
        return free if quota is None else min(free, quota)
    if sys.platform == "win32":
        return _windows_memory("available")
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def total_bytes(root: Path) -> int:
    """Memory of the machine, or the container's limit if that is lower; 0 if unknown."""
    if sys.platform == "linux":
        memory, limit = _memory_field(root / "proc/meminfo", "MemTotal"), memory_limit(root)
        return memory if limit is None else min(memory, limit)
    if sys.platform == "win32":
        return _windows_memory("total")
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def memory_warning(weight_bytes: int, root: Path = Path("/")) -> str | None:
    """Warning for weights that exceed this machine's memory; None if they fit, or if the memory is unknown.

    It is a warning and not an error: the weights are mapped files, so parts that do not fit are read from the disk, and
    some models seldom read a large part of theirs.
    """
    total = total_bytes(root)
    if not total or weight_bytes <= total:
        return None
    return (
        f"its weights have {weight_bytes / 1e9:.1f} GB and this machine has {total / 1e9:.1f} GB of memory: "
        "the part that does not fit is read from the disk for every token, which is slow"
    )


HUGE = 4 << 20
"""Bytes from which memory asks for huge pages, as numpy's arrays do."""


def private_memory(size: int, *, huge: bool = True) -> mmap.mmap:
    """Zeroed memory in pages of its own, which return to the system with the last array in them; a fork has copies.

    On Linux in `huge` pages, where the system has them: with pages of 4 KiB, address translation costs a tenth of the
    speed of reading.
    """
    if sys.platform == "win32":
        return mmap.mmap(-1, size)
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if huge and size >= HUGE:
        ask_for_huge_pages(memory)
    return memory


def ask_for_huge_pages(memory: mmap.mmap) -> None:
    """Have Linux use huge pages for memory or a mapped file, where it has them."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError):  # a kernel without huge pages
            memory.madvise(mmap.MADV_HUGEPAGE)


def return_free_memory() -> None:
    """Give memory that was freed back to the system. glibc keeps what lies between pieces that are still in use until
    this call, which other C libraries lack.
    """
    if sys.platform == "linux" and (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:
        trim(ctypes.c_size_t(0))


# Limits of Linux control groups (containers), versions 1 and 2.


def processor_quota(root: Path = Path("/")) -> float | None:
    """Processor time in cores: the lowest limit of this process's group and its parents; None without a limit."""
    limits = [limit for group in _control_groups(root, "cpu") if (limit := _group_cores(group)) is not None]
    return min(limits, default=None)


def memory_quota(root: Path) -> int | None:
    """Bytes that this process's group and its parents may still allocate; None without a limit.

    Cached file pages count as used although the system would free them, so the result may be too low, never too high.
    """
    left = [free for group in _control_groups(root, "memory") if (free := _group_free_bytes(group)) is not None]
    return min(left, default=None)


def memory_limit(root: Path) -> int | None:
    """Bytes that this process's group and its parents may use at most; None without a limit."""
    limits = [limit for group in _control_groups(root, "memory") if (limit := _group_limit(group)) is not None]
    return min(limits, default=None)


def _control_groups(root: Path, controller: str) -> Iterator[Path]:
    """Directories of this process's groups that may have a controller, from the innermost outwards."""
    mounts = root / "sys/fs/cgroup"
    for line in read_text(root / "proc/self/cgroup").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if not controllers:
            hierarchies = [mounts, mounts / "unified"]
        elif controller in controllers.split(","):
            hierarchies = [mounts / controllers, mounts / controller]
        else:
            continue
        # A container often sees its own group mounted at the top, but the host's path in /proc.
        inner = Path(path.lstrip("/"))
        for hierarchy in hierarchies:
            for part in (inner, *inner.parents):
                yield hierarchy / part


def _group_cores(group: Path) -> float | None:
    """Quota divided by period: `cpu.max` holds both (version 2), two files hold one each (version 1)."""
    words = _words(group / "cpu.max") or _words(group / "cpu.cfs_quota_us") + _words(group / "cpu.cfs_period_us")
    # "max" and -1 mean no limit.
    if len(words) != 2 or not all(word.isdecimal() for word in words) or int(words[1]) == 0:
        return None
    return int(words[0]) / int(words[1])


def _group_free_bytes(group: Path) -> int | None:
    """Limit minus usage, from the files of version 2 or else of version 1."""
    words = _words(group / "memory.max") + _words(group / "memory.current") or (
        _words(group / "memory.limit_in_bytes") + _words(group / "memory.usage_in_bytes")
    )
    if len(words) != 2 or not all(word.isdecimal() for word in words):
        return None
    return max(0, int(words[0]) - int(words[1]))


def _group_limit(group: Path) -> int | None:
    """Limit from the file of version 2 or else of version 1; None for "max"."""
    words = _words(group / "memory.max") or _words(group / "memory.limit_in_bytes")
    return int(words[0]) if words and words[0].isdecimal() else None


# Linux files.


def read_text(path: Path) -> str:
    """Content of a small file; empty if it cannot be read."""
    try:
        return path.read_text("utf-8", errors="replace")
    except OSError:
        return ""


def _words(path: Path) -> list[str]:
    return read_text(path).split()


def _linux_processor_name(cpuinfo: Path, device_tree: Path) -> str:
    """`model name` on x86; on ARM, where that is missing, the board's name says more than the core's part number.

    Virtual machines often have a name without a number, such as `AMD EPYC`, for CPUs of which one may have twice the
    arithmetic of another: family and model tell these apart, also in the keys of saved costs.
    """
    fields: dict[str, str] = {}
    for line in read_text(cpuinfo).splitlines():
        key, _, value = line.partition(":")
        fields.setdefault(key.strip(), value.strip())
    if (name := fields.get("model name", "")) and not any(map(str.isdigit, name)) and "cpu family" in fields:
        return f"{name} (family {fields['cpu family']}, model {fields.get('model', '?')})"
    return name or read_text(device_tree).rstrip("\0") or fields.get("Model", "")


def _one_processor_per_core(system: Path, allowed: set[int]) -> list[int]:
    """The first allowed processor of each group of hyper-threads, without slow cores."""
    cores: dict[str, tuple[int, int]] = {}
    for processor in sorted(allowed):
        directory = system / f"cpu{processor}"
        # The second name is the one before Linux 5.3.
        names = ("topology/core_cpus_list", "topology/thread_siblings_list")
        siblings = next(filter(None, (read_text(directory / name).strip() for name in names)), str(processor))
        cores.setdefault(siblings, (int(read_text(directory / "cpu_capacity") or 1), processor))
    fastest = max(cores.values(), default=(1, 0))[0]
    return [processor for capacity, processor in cores.values() if capacity >= MIN_CAPACITY_SHARE * fastest]


def _memory_field(path: Path, name: str) -> int:
    """Value in bytes of a line such as `VmHWM:  2048 kB`; 0 if there is no such line."""
    lines = read_text(path).splitlines()
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:")), 0)


# macOS.


def sysctl(name: str) -> bytes | None:
    """A value of macOS by its name: a string with a final zero byte, or an integer; None if the name is unknown."""
    value = ctypes.create_string_buffer(4096)
    size = ctypes.c_size_t(len(value))
    read = ctypes.CDLL(None).sysctlbyname
    if read(name.encode(), value, ctypes.byref(size), None, ctypes.c_size_t(0)) != 0:
        return None
    return value.raw[: size.value]


def _mac_processor_name() -> str:
    return (sysctl("machdep.cpu.brand_string") or b"").rstrip(b"\0").decode("utf-8", errors="replace")


def _mac_cores() -> int | None:
    """Performance cores of Apple silicon, or all cores of an Intel Mac."""
    value = sysctl("hw.perflevel0.physicalcpu") or sysctl("hw.physicalcpu")
    return None if value is None else int.from_bytes(value, sys.byteorder)


# Windows.


def _windows_processor_name() -> str:
    if sys.platform != "win32":  # for the type checker, which knows `winreg` on Windows only
        return ""
    import winreg

    key = r"HARDWARE\DESCRIPTION\System\CentralProcessor\0"
    with winreg.OpenKey(winreg.HKEY_LOCAL_MACHINE, key) as opened:
        return str(winreg.QueryValueEx(opened, "ProcessorNameString")[0])


def _windows_cores() -> int | None:
    kernel = ctypes.CDLL("kernel32")
    size = ctypes.c_uint32(0)
    relation_processor_core = 0
    kernel.GetLogicalProcessorInformationEx(relation_processor_core, None, ctypes.byref(size))
    records = ctypes.create_string_buffer(size.value)
    if not kernel.GetLogicalProcessorInformationEx(relation_processor_core, records, ctypes.byref(size)):
        return None
    return count_records(records.raw[: size.value])


def count_records(records: bytes) -> int:
    """Count SYSTEM_LOGICAL_PROCESSOR_INFORMATION_EX records: one per core, each beginning with its kind and size."""
    count = offset = 0
    while offset + 8 <= len(records):
        _, size = struct.unpack_from("<II", records, offset)
        if not size:
            break
        offset += size
        count += 1
    return count


class _MemoryCounters(ctypes.Structure):
    """PROCESS_MEMORY_COUNTERS"""

    _fields_ = (
        ("cb", ctypes.c_uint32),
        ("PageFaultCount", ctypes.c_uint32),
        ("PeakWorkingSetSize", ctypes.c_size_t),
        ("WorkingSetSize", ctypes.c_size_t),
        ("quotas_and_page_files", ctypes.c_size_t * 6),
    )


def _windows_peak_memory() -> int:
    counters = _MemoryCounters(cb=ctypes.sizeof(_MemoryCounters))
    kernel = ctypes.CDLL("kernel32")
    kernel.GetCurrentProcess.restype = ctypes.c_void_p
    read = kernel.K32GetProcessMemoryInfo
    read.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint32)
    if not read(kernel.GetCurrentProcess(), ctypes.byref(counters), counters.cb):
        return 0
    return int(counters.PeakWorkingSetSize)


class _MemoryStatus(ctypes.Structure):
    """MEMORYSTATUSEX"""

    _fields_ = (
        ("size", ctypes.c_uint32),
        ("load", ctypes.c_uint32),
        ("total", ctypes.c_uint64),
        ("available", ctypes.c_uint64),
        ("page_files_and_address_space", ctypes.c_uint64 * 5),
    )


def _windows_memory(field: Literal["total", "available"]) -> int:
    status = _MemoryStatus(size=ctypes.sizeof(_MemoryStatus))
    return int(getattr(status, field)) if ctypes.CDLL("kernel32").GlobalMemoryStatusEx(ctypes.byref(status)) else 0
