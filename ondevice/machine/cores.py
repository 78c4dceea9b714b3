"""How many threads a computation should have.

One per physical core: the kernels saturate a core's units and the memory bus, so a second thread per core only adds
overhead. Not on a small board's or a phone's efficiency cores: each thread has an equal share of the work, and all wait
for the slowest. Fewer in a container whose processor time is limited: threads beyond the quota are stopped together.
"""

from __future__ import annotations

import ctypes
import os
import struct
import sys
from functools import lru_cache
from pathlib import Path

from ondevice.machine.quota import processor_quota

SLOW = 0.6
"""A core under this share of the fastest one's capacity is left out: a Cortex-A55 has 0.5 of the A76 beside it."""


@lru_cache
def default_threads() -> int:
    """Physical cores that this process may use, by its affinity and its container's quota; at least 1."""
    cores = physical_cores()
    quota = processor_quota() if sys.platform == "linux" else None
    return cores if quota is None else max(1, min(cores, int(quota)))


def physical_cores(root: Path = Path("/")) -> int:
    """Physical cores, slow ones left out, that this process may run on; logical ones where a system tells no more."""
    if sys.platform == "linux":
        return len(core_processors(root)) or 1
    count = _mac() if sys.platform == "darwin" else _windows() if sys.platform == "win32" else None
    return count or os.cpu_count() or 1


def processors() -> int:
    """What runs threads here, hyper-threads included, as far as this process may use it; at least 1."""
    return (len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count()) or 1


def core_processors(root: Path = Path("/")) -> list[int]:
    """A processor of each of those cores, to pin a thread to; none where the system pins no threads."""
    if sys.platform != "linux":
        return []
    return _linux(root / "sys/devices/system/cpu", os.sched_getaffinity(0))


def _linux(system: Path, allowed: set[int]) -> list[int]:
    """The first allowed processor of each group of hyper-threads, slow cores left out."""
    cores: dict[str, tuple[int, int]] = {}
    for processor in sorted(allowed):
        directory = system / f"cpu{processor}"
        # The second is the name before Linux 5.3.
        names = ("topology/core_cpus_list", "topology/thread_siblings_list")
        siblings = next(filter(None, (_read(directory / name) for name in names)), str(processor))
        cores.setdefault(siblings, (int(_read(directory / "cpu_capacity") or 1), processor))
    fastest = max(cores.values(), default=(1, 0))[0]
    return [processor for capacity, processor in cores.values() if capacity >= SLOW * fastest]


def _read(path: Path) -> str:
    try:
        return path.read_text("ascii").strip()
    except OSError:
        return ""


def _mac() -> int | None:
    """The performance cores of Apple silicon, or all cores of an Intel Mac."""
    for name in (b"hw.perflevel0.physicalcpu", b"hw.physicalcpu"):
        value = ctypes.c_int(0)
        size = ctypes.c_size_t(ctypes.sizeof(value))
        if ctypes.CDLL(None).sysctlbyname(name, ctypes.byref(value), ctypes.byref(size), None, ctypes.c_size_t(0)) == 0:
            return value.value
    return None


def _windows() -> int | None:
    kernel = ctypes.CDLL("kernel32")
    size = ctypes.c_uint32(0)
    relation_processor_core = 0
    kernel.GetLogicalProcessorInformationEx(relation_processor_core, None, ctypes.byref(size))
    records = ctypes.create_string_buffer(size.value)
    if not kernel.GetLogicalProcessorInformationEx(relation_processor_core, records, ctypes.byref(size)):
        return None
    return count_records(records.raw[: size.value])


def count_records(records: bytes) -> int:
    """SYSTEM_LOGICAL_PROCESSOR_INFORMATION_EX: one record per core, each beginning with its kind and its size."""
    count = offset = 0
    while offset + 8 <= len(records):
        _, size = struct.unpack_from("<II", records, offset)
        if not size:
            break
        offset += size
        count += 1
    return count
