"""Features of real CPUs, as their systems report them, and of this one, as LLVM reports them."""

from __future__ import annotations

import platform
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from ondevice import machine
from ondevice.native import features
from ondevice.native.features import (
    AVX512_STATE,
    AVX_STATE,
    X86_FEATURES,
    Sysctl,
    native_features,
    of_arm_mac,
    of_arm_windows,
    of_capabilities,
    of_cpuid,
    of_cpuinfo,
    of_intel_mac,
)
from tests.native.windows import pretend_windows

V2 = {"cx16", "sahf", "popcnt", "sse3", "ssse3", "sse4.1", "sse4.2"}
V3 = V2 | {"avx", "avx2", "bmi", "bmi2", "f16c", "fma", "lzcnt", "movbe"}
V4 = V3 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}

KNOWN = {*X86_FEATURES, *features.ARM_FEATURES}


def test_this_machine_as_llvm_sees_it() -> None:
    """LLVM does not report all that is known here: it leaves out ARM's dot products."""
    llvm = pytest.importorskip("llvmlite.binding")
    found = native_features.__wrapped__()
    reported = {name: there for name, there in llvm.get_host_cpu_features().items() if name in KNOWN}
    assert reported == {name: name in found for name in reported}
    assert found <= KNOWN
    if features.architecture() == "x86_64":
        assert set(reported) == set(X86_FEATURES)


# Linux. The flags are those of /proc/cpuinfo, without mitigations and performance counters.

BASE = (
    "fpu vme de pse tsc msr pae mce cx8 apic sep mtrr pge mca cmov pat pse36 clflush mmx fxsr sse sse2 ht syscall nx "
    "pdpe1gb rdtscp lm constant_tsc rep_good nopl xtopology nonstop_tsc cpuid aperfmperf pni pclmulqdq monitor ssse3 "
    "cx16 sse4_1 sse4_2 popcnt aes xsave avx rdrand lahf_lm"
)
HASWELL = (
    f"{BASE} dtes64 ds_cpl vmx est tm2 sdbg fma xtpr pdcm pcid movbe tsc_deadline_timer f16c abm cpuid_fault "
    "invpcid_single fsgsbase tsc_adjust bmi1 avx2 smep bmi2 erms invpcid xsaveopt dtherm ida arat pln pts"
)
SKYLAKE_X = (
    f"{HASWELL} 3dnowprefetch cdp_l3 hle rtm cqm mpx rdt_a avx512f avx512dq rdseed adx smap clflushopt clwb intel_pt "
    "avx512cd avx512bw avx512vl xsavec xgetbv1 xsaves"
)
CASCADE_LAKE = f"{SKYLAKE_X} pku ospke avx512_vnni"
ICE_LAKE = (
    f"{CASCADE_LAKE} avx512ifma sha_ni avx512vbmi umip avx512_vbmi2 gfni vaes vpclmulqdq avx512_bitalg "
    "avx512_vpopcntdq la57 rdpid fsrm"
)
ALDER_LAKE = (
    f"{HASWELL} 3dnowprefetch rdseed adx smap clflushopt clwb intel_pt sha_ni xsavec xgetbv1 xsaves "
    "split_lock_detect avx_vnni hwp umip pku ospke waitpkg gfni vaes vpclmulqdq rdpid movdiri movdir64b fsrm serialize"
)
ZEN_2 = (
    f"{BASE} mmxext fxsr_opt extd_apicid fma movbe f16c cmp_legacy svm extapic cr8_legacy abm sse4a misalignsse "
    "3dnowprefetch osvw ibs skinit wdt tce topoext fsgsbase bmi1 avx2 smep bmi2 cqm rdt_a rdseed adx smap clflushopt "
    "clwb sha_ni xsaveopt xsavec xgetbv1 clzero irperf xsaveerptr wbnoinvd arat umip rdpid"
)
ZEN_4 = (
    f"{ZEN_2} erms invpcid avx512f avx512dq avx512ifma avx512cd avx512bw avx512vl xsaves avx512_bf16 avx512vbmi "
    "avx512_vbmi2 gfni vaes vpclmulqdq avx512_vnni avx512_bitalg avx512_vpopcntdq"
)
ZEN_5 = f"{ZEN_4} avx_vnni movdiri movdir64b avx512_vp2intersect"
NEHALEM = BASE.replace(" avx ", " ").replace(" aes ", " ").replace(" xsave ", " ").replace(" rdrand ", " ")


def cpuinfo(*flags: str) -> str:
    """The file, with a processor for each list of flags."""
    return "\n".join(
        f"processor\t: {number}\nvendor_id\t: GenuineIntel\nmodel name\t: a CPU\ncpu MHz\t\t: 800.000\n"
        f"flags\t\t: {each}\nvmx flags\t: vnmi avx_vnni ept\nbugs\t\t: spectre_v1 avx2\nbogomips\t: 5192.19\n"
        for number, each in enumerate(flags)
    )


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        pytest.param(NEHALEM, V2, id="Nehalem"),
        pytest.param(HASWELL, V3, id="Haswell"),
        pytest.param(ZEN_2, V3 | {"sse4a"}, id="Zen 2"),
        pytest.param(ALDER_LAKE, V3 | {"avxvnni"}, id="Alder Lake"),
        pytest.param(SKYLAKE_X, V4, id="Skylake-X"),
        pytest.param(CASCADE_LAKE, V4 | {"avx512vnni"}, id="Cascade Lake"),
        pytest.param(ICE_LAKE, V4 | {"avx512vnni", "avx512vbmi"}, id="Ice Lake"),
        pytest.param(ZEN_4, V4 | {"avx512vnni", "avx512vbmi", "sse4a"}, id="Zen 4"),
        pytest.param(ZEN_5, V4 | {"avx512vnni", "avx512vbmi", "avxvnni", "sse4a"}, id="Zen 5"),
    ],
)
def test_flags_of_linux(flags: str, expected: set[str]) -> None:
    assert of_cpuinfo(cpuinfo(flags, flags)) == expected


def test_a_feature_is_one_that_every_core_has() -> None:
    assert of_cpuinfo(cpuinfo(ICE_LAKE, ICE_LAKE, ALDER_LAKE)) == V3


@pytest.mark.parametrize("text", ["", "processor\t: 0\nFeatures\t: fp asimd asimddp\n", "flags\t\t:\n"])
def test_another_file_has_no_features(text: str) -> None:
    """As in a system without /proc, or where an ARM machine emulates x86-64."""
    assert of_cpuinfo(text) == set()


@pytest.mark.parametrize(
    ("hwcap", "hwcap2", "expected"),
    [
        pytest.param(0x887, 0, {"neon"}, id="Raspberry Pi 4"),
        pytest.param(0x119FFF, 0, {"neon", "lse", "dotprod"}, id="Raspberry Pi 5"),
        pytest.param(0x10119FFF, 0, {"neon", "lse", "dotprod"}, id="Graviton 2"),
        pytest.param(0xDFFFFFFF, 0x1F381, {"neon", "lse", "dotprod", "i8mm"}, id="Graviton 3"),
        pytest.param(0xEFB3FFFF, 0x180, {"neon", "lse", "dotprod"}, id="M1"),
        pytest.param(0xEFB3FFFF, 0x6180, {"neon", "lse", "dotprod", "i8mm"}, id="M2"),
        pytest.param(0x019FFF, 0, {"neon", "lse"}, id="dot products hidden"),
    ],
)
def test_capabilities_of_linux(hwcap: int, hwcap2: int, expected: set[str]) -> None:
    assert of_capabilities(hwcap, hwcap2) == expected


# macOS.

MAC_BASE = (
    "FPU VME DE PSE TSC MSR PAE MCE CX8 APIC SEP MTRR PGE MCA CMOV PAT PSE36 CLFSH DS ACPI MMX FXSR SSE SSE2 SS HTT TM "
    "PBE SSE3 PCLMULQDQ DTES64 MON DSCPL VMX EST TM2 SSSE3 FMA CX16 TPR PDCM SSE4.1 SSE4.2 x2APIC MOVBE POPCNT AES "
    "PCID XSAVE OSXSAVE SEGLIM64 TSCTMR AVX1.0 RDRAND F16C"
)
MAC_7_HASWELL = "RDWRFSGS TSC_THREAD_OFFSET BMI1 AVX2 SMEP BMI2 ERMS INVPCID FPU_CSDS"
MAC_7_CASCADE = (
    f"{MAC_7_HASWELL} MPX PQE AVX512F AVX512DQ RDSEED ADX SMAP CLFSOPT CLWB IPT AVX512CD AVX512BW AVX512VL PKU "
    "AVX512VNNI"
)
MAC_7_ICE = f"{MAC_7_CASCADE} AVX512IFMA SHA AVX512VBMI UMIP GFNI VAES VPCLMULQDQ AVX512BITALG AVX512VPOPCNTDQ RDPID"
MAC_EXTENDED = "SYSCALL XD 1GBPAGE EM64T LAHF LZCNT PREFETCHW RDTSCP TSCI"
ROSETTA = (
    "FPU VME DE PSE TSC MSR PAE MCE CX8 APIC SEP MTRR PGE MCA CMOV PAT PSE36 CLFSH MMX FXSR SSE SSE2 SSE3 PCLMULQDQ "
    "SSSE3 CX16 SSE4.1 SSE4.2 MOVBE POPCNT AES"
)


def sysctls(**values: str | int) -> Sysctl:
    """Values by their names with _ for dots, as macOS stores them."""
    stored = {
        name: value.encode() + b"\0" if isinstance(value, str) else value.to_bytes(4, "little")
        for name, value in values.items()
    }
    return lambda name: stored.get(name.replace(".", "_"))


def intel_mac(leaf_7: str, *, avx512: int, avx: int = 1) -> Sysctl:
    return sysctls(
        machdep_cpu_features=MAC_BASE, machdep_cpu_leaf7_features=leaf_7, machdep_cpu_extfeatures=MAC_EXTENDED,
        hw_optional_avx1_0=avx, hw_optional_avx2_0=avx, hw_optional_avx512f=avx512,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("read", "expected"),
    [
        pytest.param(intel_mac(MAC_7_HASWELL, avx512=0), V3, id="Haswell"),
        pytest.param(intel_mac(MAC_7_CASCADE, avx512=1), V4 | {"avx512vnni"}, id="Mac Pro of 2019"),
        pytest.param(intel_mac(MAC_7_ICE, avx512=1), V4 | {"avx512vnni", "avx512vbmi"}, id="MacBook Air of 2020"),
        pytest.param(intel_mac(MAC_7_CASCADE, avx512=0), V3, id="registers of AVX-512 not saved"),
        pytest.param(
            intel_mac(MAC_7_HASWELL, avx512=0, avx=0), V2 | {"movbe", "bmi", "bmi2", "lzcnt"}, id="AVX's not saved"
        ),
        pytest.param(
            sysctls(machdep_cpu_features=ROSETTA, machdep_cpu_extfeatures="SYSCALL XD EM64T LAHF RDTSCP TSCI"),
            V2 | {"movbe"},
            id="translated by an ARM Mac",
        ),
        pytest.param(sysctls(), set(), id="nothing is known"),
    ],
)
def test_intel_macs(read: Sysctl, expected: set[str]) -> None:
    assert of_intel_mac(read) == expected


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        pytest.param(
            {"neon": 1, "arm_FEAT_LSE": 1, "arm_FEAT_DotProd": 1, "arm_FEAT_I8MM": 0},
            {"neon", "lse", "dotprod"},
            id="M1",
        ),
        pytest.param(
            {"neon": 1, "arm_FEAT_LSE": 1, "arm_FEAT_DotProd": 1, "arm_FEAT_I8MM": 1},
            {"neon", "lse", "dotprod", "i8mm"},
            id="M2",
        ),
        pytest.param({"neon": 1}, {"neon", "lse", "dotprod"}, id="macOS 11"),
        pytest.param({"neon": 1, "arm_FEAT_LSE": 1, "arm_FEAT_DotProd": 0}, {"neon", "lse"}, id="dot products hidden"),
    ],
)
def test_arm_macs(values: dict[str, int], expected: set[str]) -> None:
    assert of_arm_mac(sysctls(**{f"hw_optional_{name}": value for name, value in values.items()})) == expected


# Windows.


@pytest.mark.parametrize(
    ("numbers", "expected"),
    [
        pytest.param({19, 34, 43, 67}, {"neon", "lse", "dotprod"}, id="Snapdragon 8cx"),
        pytest.param({19, 34, 43, 66, 67}, {"neon", "lse", "dotprod", "i8mm"}, id="Snapdragon X"),
        pytest.param({19}, {"neon"}, id="Cortex-A72"),
    ],
)
def test_windows_on_arm(numbers: set[int], expected: set[str]) -> None:
    assert of_arm_windows(lambda number: number in numbers) == expected


Leaves = dict[tuple[int, int], features.Registers]

# (leaf, subleaf): EAX, EBX, ECX, EDX
CPUID_HASWELL: Leaves = {
    (0, 0): (0xD, 0x756E6547, 0x6C65746E, 0x49656E69),
    (1, 0): (0x306C3, 0x100800, 0x7FFAFBFF, 0xBFEBFBFF),
    (7, 0): (0, 0x27AB, 0, 0x9C000000),
    (7, 1): (0x7, 0x340, 0x340, 0),  # there is no such subleaf: these are another leaf's
    (0x80000000, 0): (0x80000008, 0, 0, 0),
    (0x80000001, 0): (0, 0, 0x21, 0x2C100800),
}
CPUID_ALDER_LAKE: Leaves = {
    **CPUID_HASWELL,
    (0, 0): (0x20, 0x756E6547, 0x6C65746E, 0x49656E69),
    (7, 0): (0x2, 0x239CA7EB, 0x98C027AC, 0xFC1CC410),
    (7, 1): (0x400810, 0, 0, 0),
    (0x80000001, 0): (0, 0, 0x121, 0x2C100800),
}
CPUID_ICE_LAKE: Leaves = {
    **CPUID_HASWELL,
    (0, 0): (0x1B, 0x756E6547, 0x6C65746E, 0x49656E69),
    (7, 0): (0, 0xF2BF27EF, 0x40405F4E, 0xBC000410),
    (0x80000001, 0): (0, 0, 0x121, 0x2C100800),
}
CPUID_OLD: Leaves = {  # all bits of leaves that the CPU does not have
    **CPUID_HASWELL,
    (0, 0): (0x6, 0x756E6547, 0x6C65746E, 0x49656E69),
    (7, 0): (0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFF),
    (7, 1): (0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFF),
    (0x80000000, 0): (0x80000000, 0, 0, 0),
    (0x80000001, 0): (0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFF),
}


@pytest.mark.parametrize(
    ("leaves", "saved", "expected"),
    [
        pytest.param(CPUID_HASWELL, 0x7, V3, id="Haswell"),
        pytest.param(CPUID_ALDER_LAKE, 0x207, V3 | {"avxvnni"}, id="Alder Lake"),
        pytest.param(CPUID_ICE_LAKE, 0xE7, V4 | {"avx512vnni", "avx512vbmi"}, id="Ice Lake"),
        pytest.param(CPUID_ICE_LAKE, 0x7, V3, id="registers of AVX-512 not saved"),
        pytest.param(CPUID_ICE_LAKE, 0x67, V3, id="some of them not saved"),
        pytest.param(CPUID_ALDER_LAKE, 0x3, V2 | {"movbe", "lzcnt", "bmi", "bmi2"}, id="AVX's not saved"),
        pytest.param(CPUID_OLD, 0xE7, V2 - {"sahf"} | {"movbe", "avx", "f16c", "fma"}, id="few leaves"),
    ],
)
def test_cpuid(leaves: Leaves, saved: int, expected: set[str]) -> None:
    assert of_cpuid(lambda leaf, subleaf: leaves[leaf, subleaf], saved) == expected


def test_register_states() -> None:
    """XCR0: bit 1 SSE, bit 2 AVX, bits 5 to 7 AVX-512."""
    assert AVX_STATE == 1 << 1 | 1 << 2
    assert AVX512_STATE == AVX_STATE | 1 << 5 | 1 << 6 | 1 << 7


# Which report is read.


@pytest.mark.parametrize(
    ("system", "name", "expected"),
    [
        ("linux", "x86_64", "x86_64"),
        ("darwin", "x86_64", "x86_64"),
        ("darwin", "arm64", "aarch64"),
        ("linux", "aarch64", "aarch64"),
        ("linux", "riscv64", "riscv64"),
    ],
)
def test_architectures(system: str, name: str, expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", system)
    monkeypatch.setattr(platform, "machine", lambda: name)
    assert features.architecture() == expected


@pytest.mark.parametrize(("process", "expected"), [("win-amd64", "x86_64"), ("win-arm64", "aarch64")])
def test_architectures_of_windows(process: str, expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_windows(monkeypatch, None, process)
    assert features.architecture() == expected


def test_each_system_is_asked_for_its_own_report(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "cpuinfo").write_text(cpuinfo(ZEN_4))
    monkeypatch.setattr(machine, "CPUINFO", tmp_path / "cpuinfo")
    monkeypatch.setattr(features, "hardware_capabilities", {16: 0x119FFF, 26: 0}.__getitem__)
    monkeypatch.setattr(machine, "sysctl", intel_mac(MAC_7_HASWELL, avx512=0))
    found = {}
    for system, name in [
        ("linux", "x86_64"), ("linux", "aarch64"), ("linux", "riscv64"), ("darwin", "x86_64"), ("darwin", "arm64"),
        ("freebsd14", "amd64"),
    ]:  # fmt: skip
        monkeypatch.setattr(sys, "platform", system)
        monkeypatch.setattr(platform, "machine", lambda name=name: name)
        found[system, name] = native_features.__wrapped__()
    assert found == {
        ("linux", "x86_64"): of_cpuinfo(cpuinfo(ZEN_4)),
        ("linux", "aarch64"): {"neon", "lse", "dotprod"},
        ("linux", "riscv64"): set(),
        ("darwin", "x86_64"): V3,
        ("darwin", "arm64"): {"neon", "lse", "dotprod"},
        ("freebsd14", "amd64"): set(),
    }
    pretend_windows(monkeypatch, SimpleNamespace(IsProcessorFeaturePresent={19, 34}.__contains__), "win-arm64")
    assert native_features.__wrapped__() == {"neon", "lse"}


def test_a_system_without_proc_has_no_features(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(machine, "CPUINFO", tmp_path / "cpuinfo")
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    assert native_features.__wrapped__() == set()
