"""The instruction sets of kernel libraries: the one that is chosen for a CPU, and what LLVM may use for it."""

from __future__ import annotations

import pytest

from ondevice.native import library
from ondevice.native.features import ARM_FEATURES, X86_FEATURES, architecture
from ondevice.native.sets import PLATFORMS, SETS, TargetSet, best_set, fastest

V2 = {"cx16", "sahf", "popcnt", "sse3", "ssse3", "sse4.1", "sse4.2"}
V3 = V2 | {"avx", "avx2", "bmi", "bmi2", "f16c", "fma", "lzcnt", "movbe"}
V4 = V3 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}
VNNI = V4 | {"avx512vnni"}


@pytest.mark.parametrize(
    ("machine", "features", "expected"),
    [
        pytest.param("x86_64", {"sse3", "ssse3", "cx16", "sahf"}, "generic", id="Core 2"),
        pytest.param("x86_64", V2 | {"avx"}, "generic", id="Sandy Bridge"),
        pytest.param("x86_64", V3, "avx2", id="Haswell, Zen 2"),
        pytest.param("x86_64", V3 | {"avxvnni"}, "avxvnni", id="Alder Lake"),
        pytest.param("x86_64", V4, "avx2", id="Skylake-X"),
        pytest.param("x86_64", VNNI, "avx512vnni", id="Cascade Lake"),
        pytest.param("x86_64", VNNI | {"avx512vbmi"}, "avx512vbmi", id="Ice Lake, Zen 4"),
        pytest.param("x86_64", VNNI | {"avx512vbmi", "avxvnni"}, "avx512vbmi", id="Zen 5"),
        pytest.param("x86_64", V3 - {"fma"}, "generic", id="VIA Eden X4"),
        # Hypervisors hide some.
        pytest.param("x86_64", V3 - {"movbe"}, "generic", id="without movbe"),
        pytest.param("x86_64", VNNI - {"sahf"}, "generic", id="without sahf"),
        pytest.param("x86_64", VNNI - {"avx512bw"} | {"avx512vbmi"}, "avx2", id="without avx512bw"),
        pytest.param("x86_64", VNNI - {"avx512cd"} | {"avxvnni"}, "avxvnni", id="without avx512cd"),
        pytest.param("x86_64", V4 | {"avx512vbmi"}, "avx2", id="without avx512vnni"),
        pytest.param("x86_64", set(), "generic", id="nothing known"),
        pytest.param("aarch64", {"neon"}, "neon", id="Raspberry Pi 4"),
        pytest.param("aarch64", {"neon", "lse", "dotprod"}, "neon-dotprod", id="Raspberry Pi 5, M1, Graviton 2"),
        pytest.param("aarch64", {"neon", "lse", "dotprod", "i8mm"}, "neon-i8mm", id="M2, Graviton 3, Snapdragon X"),
        pytest.param("aarch64", {"neon", "lse", "i8mm"}, "neon", id="without dotprod"),
        pytest.param("aarch64", {"neon", "dotprod"}, "neon", id="without lse"),
        pytest.param("aarch64", set(), "generic", id="nothing known of ARM"),
        pytest.param("riscv64", set(), "generic", id="another architecture"),
    ],
)
def test_the_fastest_set_of_a_cpu(machine: str, features: set[str], expected: str) -> None:
    assert fastest(machine, frozenset(features)) == expected


def test_every_platform_s_sets_exist() -> None:
    assert {name for each in PLATFORMS.values() for name in each.sets} == set(SETS)


def test_a_set_that_the_cpu_lacks_is_not_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    other = "avx2" if architecture() == "aarch64" else "neon"
    monkeypatch.setenv(library.CHOICE, other)
    assert library.choice.__wrapped__().set == best_set()
    assert f"not using the kernels for {other}: this CPU lacks" in caplog.text


def test_a_set_that_does_not_exist_is_answered_with_a_list(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(library.CHOICE, "avx51")
    assert library.choice.__wrapped__().set == best_set()
    known = ", ".join(SETS)
    assert f"not using the kernels in avx51: no such file, and the instruction sets are {known}" in caplog.text


# Features that LLVM may use.

X86, ARM = "x86_64-unknown-linux-gnu", "aarch64-unknown-linux-gnu"
NAMES = {
    X86: {
        *X86_FEATURES,
        *("adx", "aes", "avx512bf16", "avx512bitalg", "avx512fp16", "avx512ifma", "avx512vbmi2", "avx512vp2intersect"),
        *("avx512vpopcntdq", "avxifma", "avxneconvert", "avxvnniint8", "clflushopt", "clwb", "crc32", "fma4"),
        *("fsgsbase", "gfni", "invpcid", "mwaitx", "pclmul", "pku", "prfchw", "rdpid", "rdrnd", "rdseed", "rtm", "sha"),
        *("tbm", "vaes", "vpclmulqdq", "xop", "xsave", "xsavec", "xsaveopt", "xsaves"),
    },
    ARM: {
        *ARM_FEATURES,
        *("aes", "bf16", "complxnum", "crc", "dit", "flagm", "fp16fml", "fptoint", "fullfp16", "jsconv"),
        *("lse2", "pauth", "perfmon", "rand", "ras", "rcpc", "rcpc-immo", "rdm", "sb", "sha2", "sha3", "sm4", "ssbs"),
        *("sve", "sve2"),
    },
}
"""LLVM's names of the instructions that some CPUs have."""

NOT_COMPARED = {"cx16", "sahf"}
"""LLVM inlines functions without regard to these."""


def triple_of(target: TargetSet) -> str:
    return ARM if "neon" in target.needed else X86


def allowed(target: TargetSet) -> set[str]:
    """The features of `NAMES` that code for a set may use.

    LLVM inlines a function only where all of its features are allowed. So there is a function for each feature, for
    the same CPU with that feature alone, and a second function that calls it for the set.
    """
    llvm = pytest.importorskip("llvmlite.binding")
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    names, cpu = sorted(NAMES[triple_of(target)]), target.cpu or "generic"
    none = ",".join(f"-{name}" for name in names)
    functions = [
        f'define internal void @has.{name}(ptr %p) "target-cpu"="{cpu}" "target-features"="{none},+{name}" {{\n'
        f"  store volatile i32 1, ptr %p\n  ret void\n}}\n"
        f'define void @ask.{name}(ptr %p) "target-cpu"="{cpu}" "target-features"="{target.features}" {{\n'
        f"  call void @has.{name}(ptr %p)\n  ret void\n}}\n"
        for name in names
    ]
    module = llvm.parse_assembly(f'target triple = "{triple_of(target)}"\n' + "".join(functions))
    machine = llvm.Target.from_triple(triple_of(target)).create_target_machine(opt=3)
    options = llvm.create_pipeline_tuning_options(speed_level=3)
    options.inlining_threshold = 225
    passes = llvm.create_pass_builder(machine, options)
    passes.getModulePassManager().run(module, passes)
    bodies = {function.name: str(function) for function in module.functions}
    return {name for name in names if f"@has.{name}(" not in bodies[f"ask.{name}"]}


@pytest.mark.parametrize("name", SETS)
def test_llvm_may_use_what_is_needed_and_no_more(name: str) -> None:
    """A CPU's name implies features: `cortex-a76` RCPC, for example, which not every CPU with dot products has."""
    assert allowed(SETS[name]) - NOT_COMPARED == SETS[name].needed - NOT_COMPARED


def test_llvm_is_asked_rightly() -> None:
    assert allowed(TargetSet("", "x86-64-v2", "")) - NOT_COMPARED == V2 - NOT_COMPARED | {"crc32"}
    assert allowed(TargetSet("", "x86-64-v3", "")) - NOT_COMPARED == V3 - NOT_COMPARED | {"crc32", "xsave"}
    assert "movbe" not in allowed(TargetSet("", "x86-64-v3", "-movbe"))
    assert allowed(TargetSet("", "cortex-a72", "+neon")) == {"neon", "aes", "crc", "perfmon", "sha2"}
    assert {"rcpc", "rdm", "lse"} < allowed(TargetSet("", "cortex-a76", "+neon"))


def test_every_need_is_probed() -> None:
    needed = {name for each in SETS.values() for name in each.needed}
    assert needed | {"sse4a"} == {*X86_FEATURES, *ARM_FEATURES}
    assert "sse4a" not in needed  # no set may, as Intel's CPUs lack it
