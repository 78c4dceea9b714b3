"""The same bits on every instruction set that this machine can run: integer sums are exact, float sums have one order.

All kernels are compiled for each instruction set, which takes minutes, so only `make slow` runs these tests.
`test_arm_emulated.py` does the same for ARM.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from ondevice.bundle import Bundle
from ondevice.engines.simd.kernels.isa import instruction_set
from ondevice.engines.simd.kernels.isa.instruction_set import of_features
from tests.simd.outputs import digest

ROOT = Path(__file__).parents[2]

TARGETS = {
    "avxvnni": ("x86-64-v3", "+avx2,+fma,+f16c,+avx512f,+avx512vl,+avx512vnni"),
    "avx2": ("x86-64-v3", "+avx2,+fma,+f16c"),
    "generic": ("x86-64", "+sse2"),
}
"""LLVM's CPU name and features, by instruction set; `avxvnni` uses the AVX-512 form of the 256-bit instruction."""


@pytest.fixture(scope="module")
def compared(bundles: dict[str, Bundle], trained: Path) -> list[Path]:
    """Three bundles: without experts, with experts, and from a checkpoint that was trained quantised."""
    return [*(bundles[family].path for family in ("e2b", "26b")), trained]


@pytest.fixture(scope="module")
def answers(compared: list[Path]) -> dict[str, list[str]]:
    """Digests of the bundles' outputs by instruction set, computed in one process each, in parallel."""
    if platform.machine() not in ("x86_64", "AMD64"):
        pytest.skip("these are x86-64's")
    native = instruction_set.current().name
    chosen = [name for name in TARGETS if name != "avxvnni" or native == "avx512vnni"]
    processes = {}
    for name in chosen:
        cpu, features = TARGETS[name]
        path = os.pathsep.join([str(ROOT), str(ROOT / "export"), os.environ.get("PYTHONPATH", "")])
        environment = {**os.environ, "NUMBA_CPU_NAME": cpu, "NUMBA_CPU_FEATURES": features, "PYTHONPATH": path}
        command = [sys.executable, "-m", "tests.simd.outputs", *map(str, compared)]
        processes[name] = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True)
    found = {}
    for name, process in processes.items():
        answer = json.loads(process.communicate(timeout=600)[0])
        assert answer["name"] == name
        found[name] = answer["digests"]
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", TARGETS)
def test_the_bits_are_this_machine_s_own(answers: dict[str, list[str]], compared: list[Path], name: str) -> None:
    if name not in answers:
        pytest.skip("this CPU does not have it")
    assert answers[name] == [digest(Bundle.open(path)) for path in compared]


@pytest.mark.parametrize(
    ("triple", "features", "expected"),
    [
        ("x86_64-unknown-linux-gnu", "+avx2,+fma,+f16c,+avx512bw,+avx512vnni,-avx512f", "avx512vnni"),
        ("x86_64-pc-windows-msvc", "+avx2,+fma,+f16c,+avxvnni", "avxvnni"),
        ("x86_64-unknown-linux-gnu", "+avx2,+fma,+f16c,-avxvnni", "avx2"),
        ("x86_64-unknown-linux-gnu", "+avx2,+fma", "generic"),
        ("x86_64-unknown-linux-gnu", "", "generic"),
        ("aarch64-unknown-linux-gnu", "+neon,+dotprod", "neon-dotprod"),
        ("arm64-apple-darwin", "+neon", "neon"),
    ],
)
def test_what_a_cpu_s_features_allow(triple: str, features: str, expected: str) -> None:
    assert of_features(triple, features).name == expected
