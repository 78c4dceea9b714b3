"""CPU features as systems report them, and the instruction set that is chosen by them."""

from __future__ import annotations

import platform
import sys

import pytest

from ondevice.native import features, library, sets
from ondevice.native.features import CPUID, native_features, of_cpuid, of_cpuinfo, of_names
from ondevice.native.sets import PLATFORMS, SETS, best_set

HASWELL = (
    "fpu vme sse sse2 ss ht pni pclmulqdq ssse3 fma cx16 sse4_1 sse4_2 movbe popcnt aes xsave avx f16c rdrand lahf_lm "
    "abm bmi1 avx2 smep bmi2 erms invpcid"
)
CPUS = {
    "Core 2": ("fpu sse sse2 pni ssse3 cx16 lahf_lm", "generic"),
    "Sandy Bridge": ("sse2 pni ssse3 cx16 sse4_1 sse4_2 popcnt avx lahf_lm", "generic"),
    "Haswell": (HASWELL, "avx2"),
    "a hypervisor without FMA": (HASWELL.replace(" fma", ""), "generic"),
    "Skylake-X, without VNNI": (f"{HASWELL} avx512f avx512dq avx512cd avx512bw avx512vl", "avx2"),
    "Cascade Lake": (f"{HASWELL} avx512f avx512dq avx512cd avx512bw avx512vl avx512_vnni", "avx512vnni"),
    "Ice Lake": (f"{HASWELL} avx512f avx512dq avx512cd avx512bw avx512vl avx512vbmi avx512_vnni", "avx512vbmi"),
    "Alder Lake": (f"{HASWELL} avx_vnni", "avxvnni"),
}
MAC = (
    "FPU SSE SSE2 SSE3 SSSE3 FMA CX16 SSE4.1 SSE4.2 MOVBE POPCNT AES XSAVE AVX1.0 F16C BMI1 AVX2 BMI2 LAHF LZCNT "
    "AVX512F AVX512DQ AVX512CD AVX512BW AVX512VL AVX512_VBMI AVX512_VNNI"
)


@pytest.fixture
def on(monkeypatch: pytest.MonkeyPatch):
    """A function that replaces this machine's architecture and features."""

    def replace(machine: str, found: frozenset[str]) -> None:
        monkeypatch.setattr(platform, "machine", lambda: machine)
        monkeypatch.setattr(sets, "native_features", lambda: found)
        best_set.cache_clear()

    yield replace
    monkeypatch.undo()
    best_set.cache_clear()


@pytest.mark.parametrize("cpu", CPUS)
def test_the_fastest_set_of_a_cpu(cpu: str, on) -> None:
    flags, expected = CPUS[cpu]
    on("x86_64", of_cpuinfo(f"processor\t: 0\nmodel name\t: {cpu} avx2\nflags\t\t: {flags}\nbugs\t\t: spectre_v1\n"))
    assert best_set() == expected


@pytest.mark.parametrize(("found", "expected"), [({"neon"}, "neon"), ({"neon", "dotprod"}, "neon-dotprod")])
def test_the_fastest_set_of_an_arm_cpu(found: set[str], expected: str, on) -> None:
    on("arm64", frozenset(found))
    assert best_set() == expected


def test_another_architecture_takes_the_generic_set(on) -> None:
    on("riscv64", frozenset())
    assert best_set() == "generic"


def test_macs_names(on) -> None:
    on("x86_64", of_names(MAC))
    assert best_set() == "avx512vbmi"


def test_every_platform_s_sets_exist() -> None:
    assert {name for each in PLATFORMS.values() for name in each.sets} == set(SETS)


@pytest.mark.parametrize(
    ("saves", "expected"), [((True, True), "avx512vbmi"), ((True, False), "avxvnni"), ((False, False), "generic")]
)
def test_registers_that_the_system_does_not_save(saves: tuple[bool, bool], expected: str, on) -> None:
    everything = {(leaf, subleaf): (0xFFFFFFFF,) * 4 for leaf in (1, 7, 0x80000001) for subleaf in (0, 1)}
    on("AMD64", of_cpuid(everything, *saves))
    assert best_set() == expected


@pytest.mark.skipif(sys.platform != "linux" or platform.machine() != "x86_64", reason="compares with /proc/cpuinfo")
def test_the_instruction_cpuid_says_what_linux_says() -> None:
    known = {name for bits in CPUID.values() for name in bits.values()} | {"avxvnni"}
    found = of_cpuid(features._cpuid(), "avx" in native_features(), "avx512f" in native_features())
    assert found & known == native_features() & known


def test_the_features_are_those_that_llvm_finds() -> None:
    llvm = pytest.importorskip("llvmlite.binding")
    theirs = llvm.get_host_cpu_features()
    known = {name for each in SETS.values() for name in each.needed} - {"dotprod"}  # LLVM does not look for it
    assert {name for name in known if theirs.get(name)} == native_features() & known


@pytest.mark.parametrize(
    ("system", "capabilities", "expected"),
    [("linux", 0x119FFF, True), ("linux", 0x887, False), ("darwin", 0, True)],  # Raspberry Pi 5, Pi 4, Apple
)
def test_dot_products_of_arm(system: str, capabilities: int, expected: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", system)
    monkeypatch.setattr(features, "hardware_capabilities", lambda: capabilities)
    assert features.arm_dot_products() == expected


def test_a_set_that_the_cpu_lacks_is_not_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    other = "avx2" if platform.machine() in ("aarch64", "arm64") else "neon"
    monkeypatch.setenv(library.CHOICE, other)
    assert library.choice.__wrapped__().set == best_set()
    assert f"not using the kernels for {other}: this CPU lacks" in caplog.text
