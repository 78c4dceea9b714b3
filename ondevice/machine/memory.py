"""The most memory that this process has held."""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path

STATUS = Path("/proc/self/status")
CLEAR = Path("/proc/self/clear_refs")


def peak_rss_bytes() -> int:
    """Peak resident set size since the start, or since `reset_peak_rss`; 0 where the system does not say."""
    if sys.platform == "linux":
        # Not getrusage: its figure survives exec, so a small program shows the size of whoever started it.
        return _linux(STATUS)
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


def _linux(status: Path) -> int:
    try:
        lines = status.read_text("utf-8", errors="replace").splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:")), 0)


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
