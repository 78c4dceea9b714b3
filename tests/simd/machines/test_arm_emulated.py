"""ARM under qemu: the same bits, and the same token ids with every drafter, as on this machine.

The tests run if `tests/simd/arm64.sh` has set up an environment and $ONDEVICE_ARM64 names its directory. Kernels are
built here, since the emulated Python has neither numba nor LLVM: as shared libraries, if ziglang is installed, which
links them, and as code blocks. Either is used only if the features that qemu reports allow it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from ondevice.bundle import Bundle
from ondevice.native import shipping
from tests.simd.conftest import AFFINE, CONVOLUTIONS, MXFP4, SHARED, SIGMOIDS, SINKS, STATES, TABLE
from tests.simd.hostile_forwards import each_once, run
from tests.simd.machines.generations import replies
from tests.simd.outputs import digest

ROOT = Path(__file__).parents[3]

pytestmark = [
    pytest.mark.skipif(not os.environ.get("ONDEVICE_ARM64"), reason="tests/simd/arm64.sh has not been run"),
    pytest.mark.parametrize(
        ("cpu", "name"), [("cortex-a76", "neon-dotprod"), ("cortex-a72", "neon"), ("max", "neon-i8mm")]
    ),
]


@pytest.fixture(scope="module")
def library_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A function that builds the kernel library of a set for ARM."""
    pytest.importorskip("ziglang")
    out = tmp_path_factory.mktemp("libraries")
    return cache(lambda name: shipping.ship(name, "linux-aarch64", out))


@pytest.fixture(scope="module")
def blocks_for(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Path]:
    """A function that makes a cache directory with the code blocks of a set, where an emulated CPU looks for them."""

    def build(cpu: str, name: str) -> Path:
        cache_directory = tmp_path_factory.mktemp("blocks")
        code = "from ondevice.native import library; print(library.code_directory())"
        directory = Path(emulated_python(cpu, "-c", code, ONDEVICE_CACHE=str(cache_directory)).strip())
        for part in ("packing", "forward"):
            command = [sys.executable, "-m", "ondevice.native.builder", "--platform", "linux-aarch64", "--set", name]
            command += ["--part", part, "--out", str(directory / f"{part}.block")]
            environment = {**os.environ, "PYTHONHASHSEED": "0"}
            subprocess.run(command, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL, check=True)
        return cache_directory

    return cache(build)


def emulated_python(cpu: str, *words: str | Path, **variables: str) -> str:
    """The output of Python on an emulated ARM CPU."""
    system = Path(os.environ["ONDEVICE_ARM64"])
    environment = {"ONDEVICE_CACHE": str(system / "cache")} | variables
    environment["PYTHONPATH"] = os.pathsep.join([str(system / "site"), str(ROOT)])
    emulator = [str(system / "qemu/usr/bin/qemu-aarch64-static"), "-cpu", cpu, "-L", str(system / "root")]
    command = [*emulator, str(system / "root/usr/bin/python3.11"), *map(str, words)]
    ended = subprocess.run(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return ended.stdout


def emulated(shared: Path, cpu: str, module: str, *words: str | Path) -> Any:
    """The parsed output of a test module on an emulated ARM CPU: Cortex-A76 (Raspberry Pi 5), Cortex-A72 (Pi 4), or
    `max`, all that qemu emulates.
    """
    return json.loads(emulated_python(cpu, "-m", module, *words, ONDEVICE_KERNELS=str(shared)))


def test_a_forward_has_the_same_bits(
    library_of: Callable[[str], Path], bundles: dict[str, Bundle], cpu: str, name: str
) -> None:
    """Bundles without experts, with experts, of affine weights, of either table, with sinks and biases, with states,
    and trained quantised.
    """
    families = ("e2b", "26b", AFFINE, TABLE, MXFP4, SINKS, SIGMOIDS, CONVOLUTIONS, STATES, SHARED, "half")
    compared = [bundles[family] for family in families]
    expected = {"set": name, "digests": [digest(bundle) for bundle in compared]}
    assert emulated(library_of(name), cpu, "tests.simd.outputs", *(bundle.path for bundle in compared)) == expected


def test_every_drafter_generates_the_same_token_ids(
    library_of: Callable[[str], Path], tiny: Path, cpu: str, name: str
) -> None:
    assert emulated(library_of(name), cpu, "tests.simd.machines.generations", tiny) == replies(tiny)


def test_hostile_numbers_stay_in_their_memory(
    library_of: Callable[[str], Path], hostile: Callable[[str], Path], cpu: str, name: str
) -> None:
    """The same logits are numbers as on this machine."""
    directories = [hostile(family) for family in ("e2b", "26b")]
    expected = {
        f"{directory} {' '.join(each)}": run(directory, *each)
        for number, directory in enumerate(directories)
        for each in each_once(number)
    }
    answer = emulated(library_of(name), cpu, "tests.simd.hostile_forwards", "--each-once", *directories)
    assert answer == {"set": name, "found": expected}


@pytest.mark.parametrize(
    ("gigabytes", "seed"),
    [(6, 0), *(pytest.param(1 + seed % 6, seed, marks=pytest.mark.slow) for seed in range(1, 17))],
)
def test_code_blocks_are_loaded_anywhere(
    blocks_for: Callable[[str, str], Path],
    bundles: dict[str, Bundle],
    cpu: str,
    name: str,
    gigabytes: int,
    seed: int,
) -> None:
    """As `test_far_apart` on this machine: gigabytes are mapped before and between loads."""
    bundle = bundles["e2b"]
    words = ("-m", "tests.simd.machines.far_apart", str(gigabytes), str(seed), bundle.path)
    found = json.loads(emulated_python(cpu, *words, ONDEVICE_CACHE=str(blocks_for(cpu, name))))
    assert found["digest"] == digest(bundle)
    assert found["loaded"] >= 3
