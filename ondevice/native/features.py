"""The features of this CPU, probed without LLVM, which names them.

Only those are known that the sets of `sets` need. A hypervisor or an operating system can hide features that a CPU has:
Linux's list leaves them out, and elsewhere features that use wide registers count only if the system saves these.
"""

from __future__ import annotations

import ctypes
import mmap
import platform
import sys
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

AT_HWCAP = 16
ASIMDDP = 1 << 20
"""Linux: number of the auxiliary vector's entry with capabilities, and the bit of ARM's dot products."""

PF_AVX2, PF_AVX512F, PF_ARM_V82_DP = 40, 41, 43
"""Windows: numbers for IsProcessorFeaturePresent."""

OTHER_NAMES = {
    "abm": "lzcnt",
    "avx1.0": "avx",
    "avx512_vbmi": "avx512vbmi",
    "avx512_vnni": "avx512vnni",
    "avx_vnni": "avxvnni",
    "bmi1": "bmi",
    "lahf": "sahf",
    "lahf_lm": "sahf",
    "pni": "sse3",
    "sse4_1": "sse4.1",
    "sse4_2": "sse4.2",
}
"""Names in Linux's /proc/cpuinfo and macOS's sysctl, in lower case, where LLVM has others."""

CPUID = {
    (1, 2): {0: "sse3", 9: "ssse3", 12: "fma", 13: "cx16", 19: "sse4.1", 20: "sse4.2", 22: "movbe", 23: "popcnt"}
    | {28: "avx", 29: "f16c"},
    (7, 1): {3: "bmi", 5: "avx2", 8: "bmi2", 16: "avx512f", 17: "avx512dq", 28: "avx512cd", 30: "avx512bw"}
    | {31: "avx512vl"},
    (7, 2): {1: "avx512vbmi", 11: "avx512vnni"},
    (0x80000001, 2): {0: "sahf", 5: "lzcnt"},
}
"""(leaf of the instruction CPUID, register: 0 to 3 for EAX to EDX) -> bit -> feature; Intel's manual, volume 2A."""

AVX_VNNI = (7, 1, 0, 4)
"""Leaf, subleaf, register and bit of `avxvnni`."""

WIDE = {"avx", "avx2", "avxvnni", "f16c", "fma"}
"""Features that need the system to save registers of 256 bits; those that begin with avx512 need 512."""


@cache
def native_features() -> frozenset[str]:
    """LLVM's names of the features that this CPU has, as far as `sets` needs them."""
    machine = platform.machine().lower()
    if machine in ("aarch64", "arm64"):
        return frozenset({"neon", "dotprod"} if arm_dot_products() else {"neon"})
    if machine not in ("x86_64", "amd64"):
        return frozenset()
    if sys.platform == "win32":
        present = ctypes.CDLL("kernel32").IsProcessorFeaturePresent
        return of_cpuid(_cpuid(), bool(present(PF_AVX2)), bool(present(PF_AVX512F)))
    if sys.platform == "darwin":
        names = ("machdep.cpu.features", "machdep.cpu.leaf7_features", "machdep.cpu.extfeatures")
        return of_names(" ".join(map(_sysctl, names)))
    return of_cpuinfo(Path("/proc/cpuinfo").read_text("utf-8", "replace"))


def of_cpuinfo(text: str) -> frozenset[str]:
    """The features in /proc/cpuinfo: those of the first processor."""
    lines = (line.partition(":") for line in text.splitlines())
    return of_names(next((flags for name, _, flags in lines if name.strip() == "flags"), ""))


def of_names(names: str) -> frozenset[str]:
    """LLVM's names of features that a system lists, separated by spaces."""
    return frozenset(OTHER_NAMES.get(name, name) for name in names.lower().split())


def of_cpuid(registers: Mapping[tuple[int, int], tuple[int, ...]], saves_256: bool, saves_512: bool) -> frozenset[str]:
    """The features that CPUID reports, as far as the system saves the registers that they use.

    registers : EAX to EDX by leaf and subleaf
    """
    found = {
        name
        for (leaf, register), bits in CPUID.items()
        for bit, name in bits.items()
        if registers[leaf, 0][register] >> bit & 1
    }
    leaf, subleaf, register, bit = AVX_VNNI
    if registers[leaf, subleaf][register] >> bit & 1:
        found.add("avxvnni")
    if not saves_256:
        found -= WIDE
    return frozenset(found if saves_512 else {name for name in found if not name.startswith("avx512")})


def arm_dot_products() -> bool:
    """Whether a 64-bit ARM CPU has the int8 dot-product instructions (SDOT, UDOT), according to the system."""
    if sys.platform == "linux":
        return bool(hardware_capabilities() & ASIMDDP)
    if sys.platform == "win32":
        return bool(ctypes.CDLL("kernel32").IsProcessorFeaturePresent(PF_ARM_V82_DP))
    return sys.platform == "darwin"  # every Apple CPU has them


def hardware_capabilities() -> int:
    """Linux's AT_HWCAP bit mask of CPU features; the meaning of a bit depends on the architecture."""
    read = ctypes.CDLL(None).getauxval
    read.argtypes, read.restype = [ctypes.c_ulong], ctypes.c_ulong
    return int(read(AT_HWCAP))


def _sysctl(name: str) -> str:
    """A string that macOS's sysctl has under a name; "" if there is none."""
    size = ctypes.c_size_t(1 << 12)
    text = ctypes.create_string_buffer(size.value)
    failed = ctypes.CDLL(None).sysctlbyname(name.encode(), text, ctypes.byref(size), None, 0)
    return "" if failed else text.value.decode("ascii", "replace")


def _cpuid() -> dict[tuple[int, int], tuple[int, ...]]:
    """EAX to EDX of the leaves that `of_cpuid` reads. Windows has no list of features, so the instruction is run."""
    ask = _cpuid_function()
    found = {}
    for leaf, subleaf in ((1, 0), (7, 0), (7, 1), (0x80000001, 0)):
        registers = (ctypes.c_uint32 * 4)()
        ask(leaf, subleaf, registers)
        found[leaf, subleaf] = tuple(registers)
    return found


def _cpuid_function() -> Any:
    """A function (leaf, subleaf, out: uint32[4]) of machine code."""
    windows = sys.platform == "win32"
    enter = "89c8 89d1" if windows else "4989d0 89f8 89f1"  # mov r8, rdx; mov eax, leaf; mov ecx, subleaf
    store = "418900 41895804 41894808 4189500c"  # mov [r8 + 4 i], register i
    code = bytes.fromhex(f"53 {enter} 0fa2 {store} 5b c3")  # push rbx; ...; cpuid; ...; pop rbx; ret
    kind: Any = ctypes.CFUNCTYPE(None, ctypes.c_uint32, ctypes.c_uint32, ctypes.c_void_p)
    if windows:
        allocate: Any = ctypes.CDLL("kernel32").VirtualAlloc
        allocate.restype, allocate.argtypes = ctypes.c_void_p, [ctypes.c_void_p, ctypes.c_size_t] + [ctypes.c_ulong] * 2
        commit, execute = 0x3000, 0x40
        address = allocate(None, len(code), commit, execute)
        ctypes.memmove(address, code, len(code))
        return kind(address)
    page = mmap.mmap(-1, mmap.PAGESIZE, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
    page.write(code)
    function = kind(ctypes.addressof(ctypes.c_char.from_buffer(page)))
    function.page = page
    return function
