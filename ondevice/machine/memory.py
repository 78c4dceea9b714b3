"""Memory: the most that this process has held, and what there is to take."""

from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path
from typing import Literal

from ondevice.machine.quota import memory_limit, memory_quota

STATUS = Path("/proc/self/status")
CLEAR = Path("/proc/self/clear_refs")


def peak_rss_bytes() -> int:
    """Peak resident set size since the start, or since `reset_peak_rss`; 0 where the system does not say."""
    if sys.platform == "linux":
        # Not getrusage: its figure survives exec, so a small program shows the size of whoever started it.
        return _linux(STATUS, "VmHWM")
    if sys.platform == "win32":
        return _windows()
    import resource

    return int(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)  # bytes on macOS


def reset_peak_rss() -> bool:
    """Let the peak start again at what is held now. Only Linux can; says whether it worked."""
    if sys.platform != "linux":
        return False
    try:
        CLEAR.write_text("5", "ascii")
    except OSError:
        return False
    return True


def available_bytes(root: Path = Path("/")) -> int:
    """What can be taken without swapping; on macOS, which does not say, all memory; 0 where nothing is known."""
    if sys.platform == "linux":
        free, quota = _linux(root / "proc/meminfo", "MemAvailable"), memory_quota(root)
        return free if quota is None else min(free, quota)
    if sys.platform == "win32":
        return _windows_status("available")
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def total_bytes(root: Path = Path("/")) -> int:
    """Memory of the machine, or as much of it as this process may have; 0 where nothing is known."""
    if sys.platform == "linux":
        memory, limit = _linux(root / "proc/meminfo", "MemTotal"), memory_limit(root)
        return memory if limit is None else min(memory, limit)
    if sys.platform == "win32":
        return _windows_status("total")
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def memory_warning(weight_bytes: int, root: Path = Path("/")) -> str | None:
    """What to say of weights that do not fit, None where they do. No reason to refuse them: they are mapped, so that
    what has no room is read from the disk, and of some models much is seldom read.
    """
    total = total_bytes(root)
    if not total or weight_bytes <= total:
        return None
    return (
        f"its weights have {weight_bytes / 1e9:.1f} GB and this machine has {total / 1e9:.1f} GB of memory: "
        "what has no room is read from the disk, again for every token, which is slow"
    )


def _linux(path: Path, name: str) -> int:
    """The bytes that a line such as `VmHWM:  2048 kB` tells."""
    try:
        lines = path.read_text("utf-8", errors="replace").splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:")), 0)


class _MemoryCounters(ctypes.Structure):
    """PROCESS_MEMORY_COUNTERS"""

    _fields_ = (
        ("cb", ctypes.c_uint32),
        ("PageFaultCount", ctypes.c_uint32),
        ("PeakWorkingSetSize", ctypes.c_size_t),
        ("WorkingSetSize", ctypes.c_size_t),
        ("quotas_and_page_files", ctypes.c_size_t * 6),
    )


def _windows() -> int:
    counters = _MemoryCounters(cb=ctypes.sizeof(_MemoryCounters))
    kernel = ctypes.CDLL("kernel32")
    kernel.GetCurrentProcess.restype = ctypes.c_void_p
    read = kernel.K32GetProcessMemoryInfo
    read.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint32)
    return (
        int(counters.PeakWorkingSetSize) if read(kernel.GetCurrentProcess(), ctypes.byref(counters), counters.cb) else 0
    )


class _MemoryStatus(ctypes.Structure):
    """MEMORYSTATUSEX"""

    _fields_ = (
        ("size", ctypes.c_uint32),
        ("load", ctypes.c_uint32),
        ("total", ctypes.c_uint64),
        ("available", ctypes.c_uint64),
        ("page_files_and_address_space", ctypes.c_uint64 * 5),
    )


def _windows_status(field: Literal["total", "available"]) -> int:
    status = _MemoryStatus(size=ctypes.sizeof(_MemoryStatus))
    return int(getattr(status, field)) if ctypes.CDLL("kernel32").GlobalMemoryStatusEx(ctypes.byref(status)) else 0
