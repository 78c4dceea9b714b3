"""The instruction sets and platforms for which a kernel library can be built, those of this machine, and its parts."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from functools import cache

from ondevice.native.features import architecture, native_features

_V3 = "+avx,+avx2,+bmi,+bmi2,+cx16,+f16c,+fma,+lzcnt,+movbe,+popcnt,+sahf,+sse3,+sse4.1,+sse4.2,+ssse3"
_V4 = _V3 + ",+avx512bw,+avx512cd,+avx512dq,+avx512f,+avx512vl"
_NOT_A72 = "-aes,-crc,-perfmon,-sha2"


@dataclass(frozen=True)
class TargetSet:
    """An instruction set.

    name : for messages, options and file names
    cpu : LLVM's name of a CPU, which decides the order of instructions
    features : LLVM's names of features, `+avx,+avx2`, of all those that not every CPU of the architecture has: code for
        the set may contain any instruction that `cpu` and `features` allow, so what `cpu` has beyond them is switched
        off, `-rcpc`
    """

    name: str
    cpu: str
    features: str

    @property
    def needed(self) -> set[str]:
        """Names of the features that a CPU must have."""
        return {feature[1:] for feature in self.features.split(",") if feature.startswith("+")}


SETS = {
    each.name: each
    for each in (
        TargetSet("generic", "", ""),
        TargetSet("avx2", "x86-64", _V3),
        TargetSet("avxvnni", "x86-64", _V3 + ",+avxvnni"),
        TargetSet("avx512vnni", "x86-64", _V4 + ",+avx512vnni"),
        TargetSet("avx512vbmi", "x86-64", _V4 + ",+avx512vbmi,+avx512vnni"),
        TargetSet("neon", "cortex-a72", f"+neon,{_NOT_A72}"),
        # Kunpeng 920 has dot products without RCPC, with which LLVM loads what other threads have stored.
        TargetSet("neon-dotprod", "cortex-a76", f"+neon,+dotprod,+lse,{_NOT_A72},-fullfp16,-ras,-rcpc,-rdm,-ssbs"),
        TargetSet("neon-i8mm", "cortex-a76", f"+neon,+dotprod,+i8mm,+lse,{_NOT_A72},-fullfp16,-ras,-rcpc,-rdm,-ssbs"),
    )
}
"""By name, slower ones first."""


@dataclass(frozen=True)
class Platform:
    """A platform for which libraries are shipped.

    triple : LLVM's name of it
    linked_as : zig's name of it, with the oldest C library, or macOS, that it runs with
    wheel : tag of its wheels
    suffix : of the names of its shared libraries
    sets : names of its sets
    libraries : those that are linked beside the C library
    """

    triple: str
    linked_as: str
    wheel: str
    suffix: str
    sets: tuple[str, ...]
    libraries: tuple[str, ...] = ()


_WAIT_ON_ADDRESS = ("api-ms-win-core-synch-l1-2-0",)
_X86, _ARM = ("generic", "avx2", "avxvnni", "avx512vnni", "avx512vbmi"), ("neon", "neon-dotprod", "neon-i8mm")
PLATFORMS = {
    "linux-x86_64": Platform("x86_64-unknown-linux-gnu", "x86_64-linux-gnu.2.17", "manylinux_2_17_x86_64", ".so", _X86),
    "linux-aarch64": Platform(
        "aarch64-unknown-linux-gnu", "aarch64-linux-gnu.2.17", "manylinux_2_17_aarch64", ".so", _ARM
    ),
    "macos-aarch64": Platform(
        "arm64-apple-macosx11.0.0", "aarch64-macos.11.0", "macosx_11_0_arm64", ".dylib", _ARM[1:]
    ),
    "windows-x86_64": Platform(
        "x86_64-pc-windows-gnu", "x86_64-windows-gnu", "win_amd64", ".dll", _X86, _WAIT_ON_ADDRESS
    ),
    "windows-aarch64": Platform(
        "aarch64-pc-windows-gnu", "aarch64-windows-gnu", "win_arm64", ".dll", _ARM, _WAIT_ON_ADDRESS
    ),
}


def native_platform() -> str:
    """The name of this platform, as in PLATFORMS if libraries are shipped for it."""
    system = {"win32": "windows", "darwin": "macos"}.get(sys.platform, "linux")
    return f"{system}-{architecture()}"


def block_triple(platform: str) -> str:
    """LLVM's name of a platform, but with ELF as the format of objects, from which `linking` makes code blocks.

    Calling convention and reserved registers are those of the platform.
    """
    system, _, machine = platform.partition("-")
    rest = {"windows": "pc-windows-msvc-elf", "macos": "apple-macosx11.0.0-elf"}.get(system, "unknown-linux-gnu")
    return f"{machine}-{rest}"


@cache
def best_set() -> str:
    """The fastest set that this CPU has."""
    return fastest(architecture(), native_features())


def fastest(architecture: str, features: frozenset[str]) -> str:
    """The fastest set of which a CPU has every feature; the one without features if there is no other."""
    arm = architecture == "aarch64"
    usable = [each.name for each in SETS.values() if each.needed <= features and ("neon" in each.needed) == arm]
    return usable[-1] if usable else "generic"


# Parts of a library.

PARTS = ("packing", "tokens", "forward", "export", "roofline")
"""All parts of the kernel library, each built as one code block on a machine for which no library is shipped: packing
of weights; sampling and drafting, for every engine; forwards of the simd engine; the exporter; measurements of the
machine."""


def parts_of(engine: str) -> tuple[str, ...]:
    """The parts that generations on an engine need."""
    return ("packing", "tokens", "forward") if engine == "simd" else ("tokens",)
