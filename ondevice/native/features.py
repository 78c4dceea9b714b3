"""The features of this CPU, probed without LLVM, which names them.

`native_features` reads this machine; the functions `of_...` each translate one system's report and are pure. Only those
are known that the sets of `sets` need, and SSE4A, which no set needs and no other maker's CPU than AMD's has:
`X86_FEATURES` and `ARM_FEATURES`, with their names elsewhere.

A feature counts only if it can be used. An x86 CPU may have AVX while the system does not save its registers, and a
hypervisor may hide features. Linux and macOS report what is left; on Windows CPUID does not, so the register state that
the system saves is read too. A report that cannot be read means no features, never too many.
"""

from __future__ import annotations

import ctypes
import platform
import sys
import sysconfig
from collections.abc import Callable
from functools import cache
from typing import NamedTuple

from ondevice import machine
from ondevice.native.code_block import CodePages

AVX_STATE, AVX512_STATE = 0x06, 0xE6
"""Bits of XCR0: register states that the system must save before AVX, or AVX-512, can be used."""

EAX, EBX, ECX, EDX = range(4)
LEAF_1, LEAF_7, LEAF_7_1, EXTENDED_1 = (1, 0), (7, 0), (7, 1), (0x80000001, 0)
"""Leaves and subleaves of CPUID."""


class X86Feature(NamedTuple):
    """A feature of x86-64 as each system, and CPUID, report it."""

    linux: str
    """Flag in /proc/cpuinfo."""
    mac: str
    """Word in the sysctls of `MAC_WORDS`; empty if no Mac has the feature."""
    leaf: tuple[int, int]
    """Leaf and subleaf of CPUID."""
    register: int
    bit: int
    state: int = 0
    """Bits of XCR0 that must be set."""


X86_FEATURES = {
    "sse3": X86Feature("pni", "SSE3", LEAF_1, ECX, 0),
    "ssse3": X86Feature("ssse3", "SSSE3", LEAF_1, ECX, 9),
    "cx16": X86Feature("cx16", "CX16", LEAF_1, ECX, 13),
    "sse4.1": X86Feature("sse4_1", "SSE4.1", LEAF_1, ECX, 19),
    "sse4.2": X86Feature("sse4_2", "SSE4.2", LEAF_1, ECX, 20),
    "movbe": X86Feature("movbe", "MOVBE", LEAF_1, ECX, 22),
    "popcnt": X86Feature("popcnt", "POPCNT", LEAF_1, ECX, 23),
    "sahf": X86Feature("lahf_lm", "LAHF", EXTENDED_1, ECX, 0),
    "lzcnt": X86Feature("abm", "LZCNT", EXTENDED_1, ECX, 5),
    "sse4a": X86Feature("sse4a", "", EXTENDED_1, ECX, 6),
    "bmi": X86Feature("bmi1", "BMI1", LEAF_7, EBX, 3),
    "bmi2": X86Feature("bmi2", "BMI2", LEAF_7, EBX, 8),
    "fma": X86Feature("fma", "FMA", LEAF_1, ECX, 12, AVX_STATE),
    "avx": X86Feature("avx", "AVX1.0", LEAF_1, ECX, 28, AVX_STATE),
    "f16c": X86Feature("f16c", "F16C", LEAF_1, ECX, 29, AVX_STATE),
    "avx2": X86Feature("avx2", "AVX2", LEAF_7, EBX, 5, AVX_STATE),
    "avxvnni": X86Feature("avx_vnni", "", LEAF_7_1, EAX, 4, AVX_STATE),
    "avx512f": X86Feature("avx512f", "AVX512F", LEAF_7, EBX, 16, AVX512_STATE),
    "avx512dq": X86Feature("avx512dq", "AVX512DQ", LEAF_7, EBX, 17, AVX512_STATE),
    "avx512cd": X86Feature("avx512cd", "AVX512CD", LEAF_7, EBX, 28, AVX512_STATE),
    "avx512bw": X86Feature("avx512bw", "AVX512BW", LEAF_7, EBX, 30, AVX512_STATE),
    "avx512vl": X86Feature("avx512vl", "AVX512VL", LEAF_7, EBX, 31, AVX512_STATE),
    "avx512vbmi": X86Feature("avx512vbmi", "AVX512VBMI", LEAF_7, ECX, 1, AVX512_STATE),
    "avx512vnni": X86Feature("avx512_vnni", "AVX512VNNI", LEAF_7, ECX, 11, AVX512_STATE),
}
"""Features of x86-64 by LLVM's names."""

MAC_WORDS = ("machdep.cpu.features", "machdep.cpu.leaf7_features", "machdep.cpu.extfeatures")
MAC_AVX, MAC_AVX512 = "hw.optional.avx1_0", "hw.optional.avx512f"
"""Intel Macs: sysctls with the names of CPUID's bits, and whether the system saves the registers."""


class ArmFeature(NamedTuple):
    """A feature of 64-bit ARM as each system reports it."""

    hwcap: int
    """Bit of Linux's AT_HWCAP (<asm/hwcap.h>)."""
    mac: str
    """A sysctl. Before version 12, macOS has not all of them."""
    windows: int
    """Argument of IsProcessorFeaturePresent (<winnt.h>)."""
    hwcap2: int = 0
    """Bit of Linux's AT_HWCAP2, for a feature that has none of AT_HWCAP."""
    every_mac: bool = True
    """Whether every ARM Mac has the feature."""


ARM_FEATURES = {
    "neon": ArmFeature(1 << 1, "hw.optional.neon", 19),
    "lse": ArmFeature(1 << 8, "hw.optional.arm.FEAT_LSE", 34),
    "dotprod": ArmFeature(1 << 20, "hw.optional.arm.FEAT_DotProd", 43),
    "i8mm": ArmFeature(0, "hw.optional.arm.FEAT_I8MM", 66, hwcap2=1 << 13, every_mac=False),
}
"""Features of 64-bit ARM by LLVM's names. Linux's are asimd, atomics, asimddp and i8mm."""

AT_HWCAP, AT_HWCAP2 = 16, 26
"""Keys of Linux's `getauxval` (<linux/auxvec.h>)."""


def architecture() -> str:
    """LLVM's name of the architecture of this process: of an emulated one, if a machine emulates it."""
    # On Windows, `platform` names the machine's own architecture.
    name = sysconfig.get_platform().removeprefix("win-") if sys.platform == "win32" else platform.machine().lower()
    return {"amd64": "x86_64", "arm64": "aarch64"}.get(name, name)


@cache
def native_features() -> frozenset[str]:
    """LLVM's names of those known features that this CPU has; none where that is unknown."""
    x86, arm = (architecture() == name for name in ("x86_64", "aarch64"))
    found: frozenset[str] = frozenset()
    if sys.platform == "linux":
        if x86:
            found = of_cpuinfo(machine.read_text(machine.CPUINFO))
        elif arm:
            found = of_capabilities(hardware_capabilities(AT_HWCAP), hardware_capabilities(AT_HWCAP2))
    elif sys.platform == "darwin":
        if x86:
            found = of_intel_mac(machine.sysctl)
        elif arm:
            found = of_arm_mac(machine.sysctl)
    elif sys.platform == "win32":
        kernel = ctypes.CDLL("kernel32")
        if x86:
            found = _windows_x86(kernel)
        elif arm:
            found = of_arm_windows(kernel.IsProcessorFeaturePresent)
    return found


# Linux.


def of_cpuinfo(text: str) -> frozenset[str]:
    """Features of x86-64 that all processors in a /proc/cpuinfo have."""
    lines = {line for line in text.splitlines() if line.startswith("flags")}
    flags = [set(line.partition(":")[2].split()) for line in lines]
    common = set.intersection(*flags) if flags else set()
    return frozenset(name for name, feature in X86_FEATURES.items() if feature.linux in common)


def of_capabilities(hwcap: int, hwcap2: int) -> frozenset[str]:
    """Features of 64-bit ARM in the bit masks AT_HWCAP and AT_HWCAP2."""
    return frozenset(name for name, feature in ARM_FEATURES.items() if hwcap & feature.hwcap or hwcap2 & feature.hwcap2)


def hardware_capabilities(key: int) -> int:
    """Linux's AT_HWCAP or AT_HWCAP2, bit masks of CPU features; a bit's meaning depends on the architecture."""
    read = ctypes.CDLL(None).getauxval
    read.argtypes, read.restype = [ctypes.c_ulong], ctypes.c_ulong
    return int(read(key))


# macOS.

Sysctl = Callable[[str], bytes | None]
"""Reads a value by its name; None if the system does not know the name."""


def of_intel_mac(read: Sysctl) -> frozenset[str]:
    """Features of x86-64 by macOS, also in a process that an ARM Mac translates."""
    words = {word for name in MAC_WORDS for word in (read(name) or b"").rstrip(b"\0").decode("ascii").split()}
    avx, avx512 = (any(read(name) or b"") for name in (MAC_AVX, MAC_AVX512))
    saved = AVX512_STATE if avx and avx512 else AVX_STATE if avx else 0
    return frozenset(
        name
        for name, feature in X86_FEATURES.items()
        if feature.mac in words and saved & feature.state == feature.state
    )


def of_arm_mac(read: Sysctl) -> frozenset[str]:
    """Features of 64-bit ARM by macOS; also those that the system is too old to know and every ARM Mac has."""
    values = {name: read(feature.mac) for name, feature in ARM_FEATURES.items()}
    return frozenset(
        name for name, value in values.items() if (ARM_FEATURES[name].every_mac if value is None else any(value))
    )


# Windows.
#
# IsProcessorFeaturePresent knows AVX2 and AVX512F but neither FMA, F16C nor VNNI, and there are CPUs with AVX2 and
# without FMA. So x86-64 needs CPUID, an instruction without a system call. A process that forbids new code has no
# features by this.

CPUID_CODE = bytes.fromhex(
    "53"  # push rbx
    "89c8"  # mov eax, ecx
    "89d1"  # mov ecx, edx
    "0fa2"  # cpuid
    "418900"  # mov [r8], eax
    "41895804"  # mov [r8 + 4], ebx
    "41894808"  # mov [r8 + 8], ecx
    "4189500c"  # mov [r8 + 12], edx
    "5b"  # pop rbx
    "c3"  # ret
)
"""Machine code of `void cpuid(uint32_t leaf, uint32_t subleaf, uint32_t registers[4])`, in Windows' calling convention.
"""

Registers = tuple[int, int, int, int]
"""EAX, EBX, ECX and EDX."""


def of_cpuid(cpuid: Callable[[int, int], Registers], saved: int) -> frozenset[str]:
    """Features of x86-64 by CPUID.

    Args:
        cpuid: the registers of a leaf and subleaf.
        saved: XCR0, the register states that the system saves.
    """

    def is_there(leaf: int, subleaf: int) -> bool:
        """Whether the CPU has a leaf: of others it returns the highest one's registers."""
        return leaf <= cpuid(leaf & 0x80000000, 0)[EAX] and (subleaf == 0 or subleaf <= cpuid(leaf, 0)[EAX])

    leaves = {feature.leaf for feature in X86_FEATURES.values()}
    registers = {leaf: cpuid(*leaf) for leaf in leaves if is_there(*leaf)}
    return frozenset(
        name
        for name, feature in X86_FEATURES.items()
        if feature.leaf in registers
        and registers[feature.leaf][feature.register] >> feature.bit & 1
        and saved & feature.state == feature.state
    )


def of_arm_windows(is_present: Callable[[int], int]) -> frozenset[str]:
    """Features of 64-bit ARM by IsProcessorFeaturePresent."""
    return frozenset(name for name, feature in ARM_FEATURES.items() if is_present(feature.windows))


def cpuid_at(address: int) -> Callable[[int, int], Registers]:
    """A function that calls machine code with the arguments of `CPUID_CODE`."""
    function = ctypes.CFUNCTYPE(None, ctypes.c_uint32, ctypes.c_uint32, ctypes.c_void_p)(address)

    def cpuid(leaf: int, subleaf: int) -> Registers:
        registers = (ctypes.c_uint32 * 4)()
        function(leaf, subleaf, ctypes.addressof(registers))
        return (registers[EAX], registers[EBX], registers[ECX], registers[EDX])

    return cpuid


def _windows_x86(kernel: ctypes.CDLL) -> frozenset[str]:
    kernel.GetEnabledXStateFeatures.restype = ctypes.c_uint64
    try:
        pages = CodePages(len(CPUID_CODE))
        pages.seal(CPUID_CODE)
    except OSError:
        return frozenset()
    try:
        return of_cpuid(cpuid_at(pages.address), int(kernel.GetEnabledXStateFeatures()))
    finally:
        pages.free()
