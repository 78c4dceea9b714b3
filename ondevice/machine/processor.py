"""The names of the processor and of the operating system, for the foot of a table, and what ARM's can do."""

from __future__ import annotations

import ctypes
import platform
import sys
from pathlib import Path

CPUINFO = Path("/proc/cpuinfo")
DEVICE_TREE = Path("/proc/device-tree/model")

AT_HWCAP, ASIMDDP = 16, 1 << 20
"""Of Linux on ARM: <linux/auxvec.h>, <asm/hwcap.h>."""
PF_ARM_V82_DP = 43
"""Of Windows on ARM: <winnt.h>."""


def processor_name() -> str:
    """Such as `AMD Ryzen 7 7840U`, or on a small board `Raspberry Pi 5 Model B`."""
    name = ""
    if sys.platform == "linux":
        name = _linux(CPUINFO, DEVICE_TREE)
    elif sys.platform == "darwin":
        name = _mac()
    elif sys.platform == "win32":
        name = _windows()
    return " ".join(name.split()) or platform.processor() or platform.machine()


def os_name() -> str:
    """Such as `Linux 6.8.0 x86_64`."""
    return f"{platform.system()} {platform.release()} {platform.machine()}"


def arm_dot_products() -> bool:
    """Whether this is a 64-bit ARM CPU that adds products of bytes four at a time, by the operating system."""
    if platform.machine().lower() not in ("aarch64", "arm64"):
        return False
    if sys.platform == "linux":
        return bool(hardware_capabilities() & ASIMDDP)
    if sys.platform == "win32":
        return bool(ctypes.CDLL("kernel32").IsProcessorFeaturePresent(PF_ARM_V82_DP))
    return sys.platform == "darwin"  # all of Apple's


def hardware_capabilities() -> int:
    """The bits in which Linux tells a program what the CPU has; each architecture has bits of its own."""
    read = ctypes.CDLL(None).getauxval
    read.argtypes, read.restype = [ctypes.c_ulong], ctypes.c_ulong
    return int(read(AT_HWCAP))


def _linux(cpuinfo: Path, device_tree: Path) -> str:
    """x86 has a model name; an ARM board is better known by its own than by its core's part number."""
    fields: dict[str, str] = {}
    for line in _read(cpuinfo).splitlines():
        key, _, value = line.partition(":")
        fields.setdefault(key.strip(), value.strip())
    return fields.get("model name") or _read(device_tree).rstrip("\0") or fields.get("Model", "")


def _read(path: Path) -> str:
    try:
        return path.read_text("utf-8", errors="replace")
    except OSError:
        return ""


def _mac() -> str:
    value = ctypes.create_string_buffer(256)
    size = ctypes.c_size_t(len(value))
    read = ctypes.CDLL(None).sysctlbyname
    if read(b"machdep.cpu.brand_string", value, ctypes.byref(size), None, ctypes.c_size_t(0)) != 0:
        return ""
    return value.value.decode("utf-8", errors="replace")


def _windows() -> str:
    if sys.platform != "win32":  # for the type checker, which knows `winreg` there only
        return ""
    import winreg

    key = r"HARDWARE\DESCRIPTION\System\CentralProcessor\0"
    with winreg.OpenKey(winreg.HKEY_LOCAL_MACHINE, key) as opened:
        return str(winreg.QueryValueEx(opened, "ProcessorNameString")[0])
