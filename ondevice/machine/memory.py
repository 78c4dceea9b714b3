"""Memory: the most that this process has held, and what there is to take."""

from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path

from ondevice.machine.quota import memory_quota

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
        return _windows_available()
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


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


def _windows_available() -> int:
    status = _MemoryStatus(size=ctypes.sizeof(_MemoryStatus))
    return int(status.available) if ctypes.CDLL("kernel32").GlobalMemoryStatusEx(ctypes.byref(status)) else 0
