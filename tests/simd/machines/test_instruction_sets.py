"""The same bits on every instruction set that this machine can run: integer sums are exact, float sums have one order.

All kernels are compiled for each instruction set, which takes minutes, so only `make slow` runs these tests.
`test_arm_emulated.py` does the same for ARM.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from ondevice.bundle import Bundle
from ondevice.native.features import native_features
from ondevice.native.sets import PLATFORMS, SETS, best_set
from tests.simd.conftest import AFFINE, CONVOLUTIONS, MXFP4, SHARED, SIGMOIDS, SINKS, STATES, TABLE
from tests.simd.hostile_forwards import NO_NUMBERS
from tests.simd.outputs import digest

ROOT = Path(__file__).parents[3]

NAMES = PLATFORMS["linux-x86_64"].sets


@pytest.fixture(scope="module")
def compared(bundles: dict[str, Bundle], trained: Path) -> list[Path]:
    """Bundles without experts, with experts, of affine weights, of either table, with sinks and biases, with
    states, and of one trained quantised.
    """
    families = ("e2b", "26b", AFFINE, TABLE, MXFP4, SINKS, SIGMOIDS, CONVOLUTIONS, STATES, SHARED)
    return [*(bundles[family].path for family in families), trained]


@pytest.fixture(scope="module")
def answers(compared: list[Path]) -> dict[str, list[str]]:
    """Digests of the bundles' outputs by instruction set, computed in one process each, in parallel."""
    chosen = [name for name in NAMES if SETS[name].needed <= native_features()]
    processes = {}
    for name in chosen:
        path = os.pathsep.join([str(ROOT), str(ROOT / "export"), os.environ.get("PYTHONPATH", "")])
        environment = {**os.environ, "ONDEVICE_KERNELS": name, "PYTHONPATH": path}
        command = [sys.executable, "-m", "tests.simd.outputs", *map(str, compared)]
        processes[name] = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True)
    found = {}
    for name, process in processes.items():
        answer = json.loads(process.communicate(timeout=600)[0])
        assert answer["set"] == name
        found[name] = answer["digests"]
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_the_bits_are_this_machine_s_own(answers: dict[str, list[str]], compared: list[Path], name: str) -> None:
    if name not in answers:
        pytest.skip("this CPU does not have it")
    assert answers[name] == [digest(Bundle.open(path)) for path in compared]


@pytest.fixture(scope="module")
def hostile_answers(hostile: Callable[[str], Path]) -> Callable[[str], dict[str, str]]:
    """A function: name of an instruction set -> what comes of all hostile bundles and session files on it."""
    directories = [str(hostile(family)) for family in ("e2b", "26b", "half")]
    path = os.pathsep.join([str(ROOT), str(ROOT / "export"), os.environ.get("PYTHONPATH", "")])

    def run(name: str) -> dict[str, str]:
        environment = {**os.environ, "ONDEVICE_KERNELS": name, "PYTHONPATH": path}
        command = [sys.executable, "-m", "tests.simd.hostile_forwards", *directories]
        done = subprocess.run(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, check=True)
        answer = json.loads(done.stdout)
        assert answer["set"] == name
        found: dict[str, str] = answer["found"]
        return found

    return cache(run)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_hostile_numbers_stay_in_their_memory(hostile_answers: Callable[[str], dict[str, str]], name: str) -> None:
    """With every kind of cache and attention; and the same logits are numbers on every instruction set."""
    if not SETS[name].needed <= native_features():
        pytest.skip("this CPU does not have it")
    found = hostile_answers(name)
    assert all(share == "0 %" for run, share in found.items() if run.endswith(NO_NUMBERS))
    assert found == hostile_answers(best_set())
